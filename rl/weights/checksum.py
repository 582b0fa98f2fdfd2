"""Checksums of tensors that are independent of the sharding, and their comparison between two
sides.

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

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor
from torchstore.transport import TensorSlice

from rl.types import BoxSum
from rl.utils.tensor_memory import memory_of
from rl.weights.types import WeightParityError

_SLAB_ELEMENTS = 2**24
"""Elements that `queue_checksum` widens to 8 bytes at a time."""


def checksum(tensor: Tensor, *, global_shape: Sequence[int], offsets: Sequence[int]) -> int:
    """Return the checksum of `tensor`, the box at `offsets` of a tensor of `global_shape`."""
    if tensor.numel() == 0:
        return 0
    if tensor.device.type != "cpu":
        return (
            int(queue_checksum(tensor, global_shape=global_shape, offsets=offsets).item()) % 2**64
        )
    bits_RC = _bits(tensor)
    num_rows, num_columns = bits_RC.shape
    stride = bits_RC.stride(0)
    span = (num_rows - 1) * stride + num_columns
    memory = memory_of(bits_RC, dtype=f"u{bits_RC.element_size()}", num_elements=span)
    rows, columns = _weights(tensor.shape, global_shape, offsets, tensor.element_size())
    return int(_compiled_loop()(memory, stride, rows, columns))


def queue_checksum(
    tensor: Tensor, *, global_shape: Sequence[int], offsets: Sequence[int]
) -> Tensor:
    """Return the checksum as a signed integer, [] int64 on the tensor's device, without waiting for
    a GPU.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if tensor.numel() == 0:
        return total
    bits_RC = _bits(tensor)
    box = tuple(tensor.shape), tuple(global_shape), tuple(offsets), tensor.element_size()
    rows, columns = _weights_on(tensor.device, *box)
    mask = 2 ** (8 * bits_RC.element_size()) - 1
    step = max(1, _SLAB_ELEMENTS // len(columns))
    for start in range(0, len(bits_RC), step):
        sums = ((bits_RC[start : start + step].long() & mask) * columns).sum(1)
        total += (sums * rows[start : start + step]).sum()
    return total


def _bits(tensor: Tensor) -> Tensor:
    """Return the bits of at least one element as [R, C] integers of at most 4 bytes."""
    if tensor.dim() == 0:
        tensor = tensor.reshape(1)
    if tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    bits = tensor.view({1: torch.uint8, 2: torch.int16}.get(tensor.element_size(), torch.int32))
    return bits.reshape(-1, bits.shape[-1])


def _weights(
    shape: Sequence[int], global_shape: Sequence[int], offsets: Sequence[int], element_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the [R] uint64 weights of a box's rows and the [C] uint32 weights of its columns."""
    if not shape:
        shape, global_shape, offsets = (1,), (1,), (0,)
    rows = np.zeros(1, np.uint64)
    for size, whole, offset in zip(shape[:-1], global_shape[:-1], offsets[:-1], strict=True):
        steps = np.arange(offset, offset + size, dtype=np.uint64)
        rows = (rows[:, None] * np.uint64(whole) + steps).ravel()
    numbers = max(1, element_size // 4)
    first, last = offsets[-1] * numbers, (offsets[-1] + shape[-1]) * numbers
    return _row_weights(rows), _column_weights(last)[first:]


@lru_cache(maxsize=256)
def _weights_on(
    device: torch.device,
    shape: Sequence[int],
    global_shape: Sequence[int],
    offsets: Sequence[int],
    size: int,
) -> tuple[Tensor, Tensor]:
    """Return `_weights` as int64 on a device; layers of one shape and later versions share them."""
    rows, columns = _weights(shape, global_shape, offsets, size)
    return torch.from_numpy(rows.view(np.int64)).to(device), torch.from_numpy(
        columns.astype(np.int64)
    ).to(device)


def _row_weights(rows: np.ndarray) -> np.ndarray:
    """Return odd weights of [R] uint64: the finalizer of splitmix64 (Steele et al. 2014)."""
    x = rows + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


def _column_weights(num_columns: int) -> np.ndarray:
    return _column_table(max(12, (num_columns - 1).bit_length()))[:num_columns]


@lru_cache(maxsize=8)
def _column_table(log_size: int) -> np.ndarray:
    """Return [2**log_size] different uint32 above 0: MurmurHash3's finalizer, which maps only 0 to
    0.
    """
    x = np.arange(1, 2**log_size + 1, dtype=np.uint32)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


@cache
def _compiled_loop() -> Callable[[np.ndarray, int, np.ndarray, np.ndarray], int]:
    """Compile `_sum_rows` without the GIL; importing numba takes half a second, so do it at first
    use.
    """
    import numba

    return numba.njit(nogil=True, cache=True)(_sum_rows)


def _sum_rows(
    bits: np.ndarray, stride: int, row_weights: np.ndarray, column_weights: np.ndarray
) -> int:
    """Return the weighted sum of rows that are `stride` elements apart in `bits`."""
    total = np.uint64(0)
    for r in range(len(row_weights)):
        row = bits[r * stride : r * stride + len(column_weights)]
        row_sum = np.uint64(0)
        # 16 or 32 bits times 32 bits: one multiplication of the vector unit.
        for k in range(len(column_weights)):
            row_sum += np.uint64(row[k]) * np.uint64(column_weights[k])
        total += row_sum * row_weights[r]
    return total  # type: ignore[return-value]


def box_sum(name: str, box: TensorSlice, *, dtype: torch.dtype, value: int) -> BoxSum:
    """Return the checksum `value` of a box, with the box's place in the whole tensor."""
    return BoxSum(
        name=name,
        dtype=str(dtype).removeprefix("torch."),
        global_shape=tuple(box.global_shape),
        offsets=tuple(box.offsets),
        shape=tuple(box.local_shape),
        value=value,
    )


def check_sums(
    *, version: int, pushed: Sequence[BoxSum], pulled: Mapping[str, Sequence[BoxSum]]
) -> None:
    """Compare the checksums that the trainer's ranks sent with the checksums that each generator
    holds.

    Args:
        pushed: checksums of all trainer ranks; several ranks may send the same box.
        pulled: checksums of all ranks of each generator, by the generator's name; every copy is
            compared.

    Raises:
        WeightParityError: names generator, tensor and version, and what differs: a missing tensor,
            the dtype, the shape, or bits.
    """
    sent = _totals(pushed, f"version {version}: the trainer")
    for generator, boxes in pulled.items():
        who = f"version {version}: generator {generator!r}"
        held = _totals(boxes, who)
        for name in sorted(sent.keys() | held.keys()):
            if name not in held or name not in sent:
                lacks = who if name in sent else f"version {version}: the trainer"
                raise WeightParityError(f"{lacks} has no tensor {name!r}")
            if held[name][:2] != sent[name][:2]:
                raise WeightParityError(
                    f"{who} holds {name!r} as {held[name][:2]}, and it was sent as {sent[name][:2]}"
                )
            if held[name] != sent[name]:
                raise WeightParityError(
                    f"{who} holds other bits in {name!r} than the trainer sent: a shard was "
                    "corrupted in transfer, or is still of another version"
                )


def _totals(boxes: Sequence[BoxSum], who: str) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Return the dtype, shape and checksum of each whole tensor."""
    by_name: dict[str, list[BoxSum]] = {}
    for box in set(boxes):  # equal copies count once
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
