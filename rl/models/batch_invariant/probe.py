"""Whether this machine's kernels give a row the same bits in every batch; asked before a model is used.

What cannot be seen from the outside, as a matrix library chooses its kernels by size, processor and
number of threads. Each answer is compared with that of single tiles on one thread, so a
trainer and a generator that both pass agree with each other, whatever their threads.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from rl.distributed.threads import use_threads
from rl.models.batch_invariant.rows import ROW_MULTIPLE
from rl.models.qwen3.model import Qwen3

MAX_PRODUCTS = 5e8
"""Multiply-adds of the largest product that is tried, beyond one tile: fractions of a second."""
MAX_LOGITS = 4e6
"""Of the largest batch of requests that is tried."""

Layer = Callable[[Tensor], Tensor]
"""[T, E] -> [T, ...], row by row."""


def check_machine(
    config: Qwen3.Config, *, dtype: torch.dtype, max_rows: int, tensor_parallel_degree: int = 1
) -> None:
    """Try a model's layers at different numbers of rows, on the calling thread's number of threads.

    Args:
        dtype: that they run in.
        max_rows: most tokens of a forward.
        tensor_parallel_degree: ranks that share a layer.

    Raises:
        ValueError: the first layer, by its width and dtype, and the numbers of rows that differ.
    """
    counts = row_counts(max_rows)
    for fan_in, fan_out in sorted(set(linear_shapes(config, tensor_parallel_degree=tensor_parallel_degree))):
        most = max(ROW_MULTIPLE, MAX_PRODUCTS / (fan_in * fan_out))
        check_rows(
            f"a linear layer {fan_in} -> {fan_out}",
            linear(fan_in, fan_out, dtype=dtype),
            width=fan_in,
            dtype=dtype,
            counts=[count for count in counts if count <= most],
        )
    head_dim, vocab_size = config.block.attention.head_dim, config.vocab_size
    for width in sorted({config.dim, head_dim}):
        norm = torch.nn.RMSNorm(width, eps=config.norm_eps, dtype=dtype)
        check_rows(f"RMSNorm of width {width}", norm, width=width, dtype=dtype, counts=counts)
    # A step draws for any number of requests: these are not padded.
    batches = [1, 2, 3, 5, 7, *(count + 1 for count in counts if count * vocab_size <= MAX_LOGITS)]
    for name, layer in (("log_softmax", _log_softmax), ("exp", torch.exp)):
        check_rows(
            f"{name} of {vocab_size} logits", layer, width=vocab_size, dtype=torch.float32,
            counts=batches, tile=1,
        )  # fmt: skip


def row_counts(max_rows: int) -> list[int]:
    """Multiples of the tile: all small ones, then ever fewer up to the first that holds `max_rows`."""
    tiles = -(-max_rows // ROW_MULTIPLE)
    counts = {*range(1, 9), *(round(2 ** (i / 2)) for i in range(6, 40)), tiles}
    return [count * ROW_MULTIPLE for count in sorted(counts) if count <= tiles]


def linear_shapes(config: Qwen3.Config, *, tensor_parallel_degree: int) -> Iterator[tuple[int, int]]:
    """Features in and out of each product of one rank."""
    attention, dim = config.block.attention, config.dim
    share = 1 / tensor_parallel_degree
    heads = round(attention.num_heads * attention.head_dim * share)
    hidden: int = round(config.block.feed_forward.hidden_dim * share)  # type: ignore[attr-defined]
    yield dim, round((attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim * share)
    yield heads, dim
    yield dim, 2 * hidden
    yield hidden, dim
    yield dim, round(config.vocab_size * share)


def linear(fan_in: int, fan_out: int, *, dtype: torch.dtype) -> Layer:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(fan_out, fan_in, generator=generator).mul_(fan_in**-0.5).to(dtype)
    return lambda x: F.linear(x, weight)


def _log_softmax(x: Tensor) -> Tensor:
    return x.log_softmax(-1)


@torch.no_grad()
def check_rows(
    name: str,
    layer: Layer,
    *,
    width: int,
    dtype: torch.dtype,
    counts: Iterable[int],
    tile: int = ROW_MULTIPLE,
) -> None:
    """Compare rows in batches of `counts` with the same rows in tiles on one thread.

    Raises:
        ValueError: naming the layer, the dtype, the machine and the numbers of rows that differ.
    """
    counts = list(counts)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(max(counts), width, generator=generator).to(dtype)
    with _one_thread():
        rows = torch.cat([layer(part) for part in x.split(tile)])
    different = [count for count in counts if not torch.equal(layer(x[:count].clone()), rows[:count])]
    if different:
        threads, kind = torch.get_num_threads(), str(dtype).removeprefix("torch.")
        machine = f"{processor()}, PyTorch {torch.__version__}, {threads} threads"
        batches = ", ".join(map(str, different))
        raise ValueError(
            f"batch_invariant=True: must be False on this machine ({machine}): {name} in {kind} gives other "
            f"bits in batches of {batches} rows than in tiles of {tile}"
        )


@contextmanager
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    use_threads(1)
    try:
        yield
    finally:
        use_threads(num_threads)


def processor() -> str:
    """Its name, for an error."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
