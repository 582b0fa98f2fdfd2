"""Checksums of tensors that do not depend on the sharding, and their comparison of two sides.

The checksum of a box of a tensor is

    sum over the box's elements of  bits * column weight * row weight      (mod 2**64)

where *bits* are the element's bits as an unsigned number, and the weights depend only on the
element's row and column in the whole tensor. So the checksums of disjoint boxes add up to the
checksum of the tensor, however it is cut. A column weight lies between 1 and 2**32 - 1 and a row
weight is odd, so one wrong element always changes the sum; two swapped elements or rows leave it
unchanged with a chance of about 2**-32. Elements of 8 bytes count as two of 4.

On a CPU a compiled loop sums 10 to 20 GB/s a core; PyTorch operations (1.4 GB/s there) sum on a
GPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor

from rl.types import BoxSum
from rl.utils.tensor_memory import get_memory
from rl.weights.boxes import Box, select_parts_to_push
from rl.weights.types import WeightParityError

_SLAB_ELEMENTS = 2**24
"""Elements that `enqueue_checksum` widens to 8 bytes at a time."""


def checksum(tensor: Tensor, *, global_shape: Sequence[int], offsets: Sequence[int]) -> int:
    """Return the checksum of `tensor`, the box at `offsets` of a tensor of `global_shape`."""
    if tensor.numel() == 0:
        return 0
    if tensor.device.type != "cpu":
        total = enqueue_checksum(tensor, global_shape=global_shape, offsets=offsets)
        return int(total.item()) % 2**64

    bits_RC = _flatten_bits(tensor)
    num_rows, num_columns = bits_RC.shape
    stride = bits_RC.stride(0)
    # The loop strides through flat memory itself: rows may lie apart, as those of a column shard.
    span = (num_rows - 1) * stride + num_columns
    memory = get_memory(bits_RC, dtype=f"u{bits_RC.element_size()}", num_elements=span)
    rows, columns = _compute_weights(tensor.shape, global_shape, offsets, tensor.element_size())
    return int(_compile_loop()(memory, stride, rows, columns))


def load_kernel() -> None:
    """Load the compiled loop; the first call of a compiled function takes 0.3 s."""
    for dtype in (torch.float32, torch.bfloat16):
        checksum(torch.zeros(1, 1, dtype=dtype), global_shape=(1, 1), offsets=(0, 0))


def enqueue_checksum(
    tensor: Tensor, *, global_shape: Sequence[int], offsets: Sequence[int]
) -> Tensor:
    """Return the checksum, [] signed int64 on the tensor's device, without waiting for a GPU."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if tensor.numel() == 0:
        return total
    bits_RC = _flatten_bits(tensor)

    box = tuple(tensor.shape), tuple(global_shape), tuple(offsets), tensor.element_size()
    rows, columns = _load_weights(tensor.device, *box)
    # PyTorch has no unsigned integers to multiply: widened bits are masked to count as unsigned.
    mask = 2 ** (8 * bits_RC.element_size()) - 1
    # In slabs of rows, because the widened bits take up to 8 times the memory of the tensor.
    step = max(1, _SLAB_ELEMENTS // len(columns))
    for start in range(0, len(bits_RC), step):
        sums = ((bits_RC[start : start + step].long() & mask) * columns).sum(1)
        total += (sums * rows[start : start + step]).sum()
    return total


def _flatten_bits(tensor: Tensor) -> Tensor:
    """Return the bits of at least one element as [R, C] integers of at most 4 bytes."""
    if tensor.dim() == 0:
        tensor = tensor.reshape(1)
    if tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    bits = tensor.view({1: torch.uint8, 2: torch.int16}.get(tensor.element_size(), torch.int32))
    return bits.reshape(-1, bits.shape[-1])


def _compute_weights(
    shape: Sequence[int], global_shape: Sequence[int], offsets: Sequence[int], element_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the [R] uint64 weights of a box's rows and the [C] uint32 weights of its columns."""
    if not shape:
        shape, global_shape, offsets = (1,), (1,), (0,)

    # Number of each row in the whole tensor, over all dimensions but the last.
    rows = np.zeros(1, np.uint64)
    for size, whole, offset in zip(shape[:-1], global_shape[:-1], offsets[:-1], strict=True):
        steps = np.arange(offset, offset + size, dtype=np.uint64)
        rows = (rows[:, None] * np.uint64(whole) + steps).ravel()

    numbers = max(1, element_size // 4)
    first, last = offsets[-1] * numbers, (offsets[-1] + shape[-1]) * numbers
    return _hash_rows(rows), _hash_columns(last)[first:]


@lru_cache(maxsize=256)
def _load_weights(
    device: torch.device,
    shape: Sequence[int],
    global_shape: Sequence[int],
    offsets: Sequence[int],
    size: int,
) -> tuple[Tensor, Tensor]:
    """Return `_compute_weights` as int64 on a device, from a cache.

    Layers of the same shape and later versions share them.
    """
    rows, columns = _compute_weights(shape, global_shape, offsets, size)
    rows_on_device = torch.from_numpy(rows.view(np.int64)).to(device)
    return rows_on_device, torch.from_numpy(columns.astype(np.int64)).to(device)


def _hash_rows(rows: np.ndarray) -> np.ndarray:
    """Return odd weights of [R] uint64: the finalizer of splitmix64 (Steele et al. 2014)."""
    x = rows + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


def _hash_columns(num_columns: int) -> np.ndarray:
    return _build_column_table(max(12, (num_columns - 1).bit_length()))[:num_columns]


@lru_cache(maxsize=8)
def _build_column_table(log_size: int) -> np.ndarray:
    """Return [2**log_size] different uint32 above 0, by MurmurHash3's finalizer."""
    # The finalizer is a bijection that maps only 0 to 0, so a wrong element always shows.
    x = np.arange(1, 2**log_size + 1, dtype=np.uint32)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


@cache
def _compile_loop() -> Callable[[np.ndarray, int, np.ndarray, np.ndarray], int]:
    """Compile `_sum_rows` to run without the GIL."""
    import numba  # At the first use: the import takes half a second.

    return numba.njit(nogil=True, cache=True)(_sum_rows)


def _sum_rows(
    bits: np.ndarray, stride: int, row_weights: np.ndarray, column_weights: np.ndarray
) -> int:
    """Return the weighted sum of rows that are `stride` elements apart in `bits`."""
    total = np.uint64(0)
    for r in range(len(row_weights)):
        row = bits[r * stride : r * stride + len(column_weights)]
        row_sum = np.uint64(0)
        # 16 or 32 bits times 32 bits: a single multiplication of the vector unit.
        for k in range(len(column_weights)):
            row_sum += np.uint64(row[k]) * np.uint64(column_weights[k])
        total += row_sum * row_weights[r]
    return total  # type: ignore[return-value]


def make_box_sum(name: str, box: Box, *, dtype: torch.dtype, value: int) -> BoxSum:
    """Return the checksum `value` of a box, with the box's place in the whole tensor."""
    return BoxSum(
        name=name,
        dtype=str(dtype).removeprefix("torch."),
        global_shape=box.global_shape,
        offsets=box.offsets,
        shape=box.shape,
        value=value,
    )


def digest_sums(boxes: Iterable[BoxSum]) -> int:
    """Return one checksum of all tensors; those of different ranks' boxes add up, mod 2**64.

    Each box must be there once.
    """
    total = 0
    for box in boxes:
        kind = f"{box.name} {box.dtype} {box.global_shape}".encode()
        # Odd, so that no bit of a tensor's sum is lost.
        weight = int.from_bytes(hashlib.sha256(kind).digest()[:8], "little") | 1
        total += weight * box.value
    return total % 2**64


def digest_tensors(
    state_dict: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    buffer_names: Collection[str],
    rank: int,
) -> int:
    """Return this rank's part of the checksum of what `WeightStore.push` would send."""
    sums: list[BoxSum] = []
    for part in select_parts_to_push(state_dict, dtype=dtype, buffer_names=buffer_names, rank=rank):
        box, cast = part.box, part.local.to(part.dtype)
        value = checksum(cast, global_shape=box.global_shape, offsets=box.offsets)
        sums.append(make_box_sum(part.name, box, dtype=part.dtype, value=value))
    return digest_sums(sums)


def check_sums(
    *, version: int, pushed: Sequence[BoxSum], pulled: Mapping[str, Sequence[BoxSum]]
) -> None:
    """Compare the checksums of the boxes that were pushed with those of each generator's tensors.

    The sums of boxes are added up to those of whole tensors first, since trainer and generators may
    be sharded differently. Tensors must be the same ones, with equal dtypes, shapes and sums.

    Args:
        pushed: checksums of all trainer ranks; several ranks may send the same box.
        pulled: checksums of all ranks of each generator, by the generator's name; every copy is
            compared.

    Raises:
        WeightParityError: names generator, tensor and version, and what differs: a missing tensor,
            the dtype, the shape, or bits.
    """
    sent = _total_tensors(pushed, f"version {version}: the trainer")
    for generator, boxes in pulled.items():
        who = f"version {version}: generator {generator!r}"
        received = _total_tensors(boxes, who)
        for name in sorted(sent.keys() | received.keys()):
            if name not in received or name not in sent:
                lacks = who if name in sent else f"version {version}: the trainer"
                raise WeightParityError(f"{lacks} has no tensor {name!r}")

            # Dtype and shape first: with another dtype the sums differ anyway, and say less.
            if received[name][:2] != sent[name][:2]:
                raise WeightParityError(
                    f"{who} holds {name!r} as {received[name][:2]}, and it was sent as "
                    f"{sent[name][:2]}"
                )
            if received[name] != sent[name]:
                raise WeightParityError(
                    f"{who} holds other bits in {name!r} than the trainer sent: a shard was "
                    "corrupted in transfer, or is still of another version"
                )


def _total_tensors(
    boxes: Sequence[BoxSum], who: str
) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Return the dtype, shape and checksum of each whole tensor."""
    by_name: dict[str, list[BoxSum]] = {}
    # In a set, as replicas on several ranks send equal boxes, which count once.
    for box in set(boxes):
        by_name.setdefault(box.name, []).append(box)
    return {name: _total(copies, f"{who}, tensor {name!r}") for name, copies in by_name.items()}


def _total(boxes: Sequence[BoxSum], who: str) -> tuple[str, tuple[int, ...], int]:
    """Return the whole tensor's dtype, shape and checksum from its different boxes."""
    kinds = {(box.dtype, box.global_shape) for box in boxes}
    places = {(box.offsets, box.shape) for box in boxes}
    if len(kinds) > 1 or len(places) < len(boxes):
        raise WeightParityError(f"{who}: ranks hold different bits, dtypes or shapes")
    ((dtype, shape),) = kinds
    return dtype, shape, sum(box.value for box in boxes) % 2**64
