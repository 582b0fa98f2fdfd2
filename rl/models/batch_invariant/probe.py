"""Test of this machine's kernels: every row must have the same bits in every batch.

A matrix library chooses its kernels by size, processor and number of threads, so only a test can
tell. Each result is compared with that of single tiles on one thread; a trainer and a generator
that both pass therefore agree with each other, whatever their threads.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl.models.batch_invariant.model import ROW_MULTIPLE
from rl.models.decoder import Decoder
from rl.utils.caches import is_remembered, remember
from rl.utils.processes import use_threads

MAX_PRODUCTS = 5e8
"""Multiply-adds of the largest tested product beyond one tile; a fraction of a second."""
MAX_COMPARED = 1e10
"""The same for the comparison of one thread with several, which happens once in a run at most."""
LARGEST_WEIGHT = 2**26
"""Numbers of the largest weight whose products are compared: 256 MiB, and twice that for the
gradients."""
MAX_LOGITS = 4e6
"""Logits of the largest tested batch of requests."""

KERNEL_SETTINGS = re.compile(r"(ATEN|DNNL|KMP|MKL|ONEDNN|OMP|OPENBLAS)_|LD_PRELOAD$")
"""Environment variables by which a user may choose other kernels."""
PROCESSOR_LINES = re.compile(
    r"(vendor_id|cpu family|model|stepping|flags|cache size|Features|CPU \w+)\b", re.IGNORECASE
)
"""Lines of /proc/cpuinfo, of x86 and of ARM."""

Layer = Callable[[Tensor], Tensor]
"""Row-wise function from [T, E] to [T, ...]."""


def check_machine(
    config: Decoder.Config,
    *,
    dtype: torch.dtype,
    max_rows: int,
    tensor_parallel_degree: int = 1,
    float32_head: bool = False,
) -> None:
    """Test a model's layers with up to `max_rows` rows, on the calling thread's number of threads.

    A machine that has passed is not tested again, while processor and libraries are the same.

    Args:
        dtype: dtype of all products, but that of the output head with `float32_head`.

    Raises:
        ValueError: naming the first failing layer, its dtype and the numbers of rows that differ.
    """
    shapes = sorted(set(list_linear_shapes(config, tensor_parallel_degree=tensor_parallel_degree)))
    passed = _describe_machine() | {
        "passed": [1, ROW_MULTIPLE, MAX_PRODUCTS, MAX_LOGITS],  # 1: the test's own number.
        "shapes": shapes,
        "norms": [type(config.build_norm(1)).__name__, config.dim, config.block.attention.head_dim],
        "vocab_size": config.vocab_size,
        "dtype": str(dtype),
        "max_rows": max_rows,
        "tensor_parallel_degree": tensor_parallel_degree,
        "float32_head": float32_head,
    }
    if is_remembered(passed):
        return
    for fan_in, fan_out in shapes:
        check_product(fan_in, fan_out, dtype=dtype, max_rows=max_rows)
    if float32_head:
        fan_out = round(config.vocab_size / tensor_parallel_degree)
        check_product(config.dim, fan_out, dtype=torch.float32, max_rows=max_rows)

    counts, vocab_size = list_row_counts(max_rows), config.vocab_size
    for width in sorted({config.dim, config.block.attention.head_dim}):
        norm = config.build_norm(width).to(dtype)
        check_rows(f"RMSNorm of width {width}", norm, width=width, dtype=dtype, counts=counts)

    # A step samples for any number of requests, without padding.
    batches = [1, 2, 3, 5, 7, *(count + 1 for count in counts if count * vocab_size <= MAX_LOGITS)]
    for name, layer in (("log_softmax", lambda x: x.log_softmax(-1)), ("exp", torch.exp)):
        check_rows(
            f"{name} of {vocab_size} logits",
            layer,
            width=vocab_size,
            dtype=torch.float32,
            counts=batches,
            tile=1,
        )
    remember(passed)


def _describe_machine() -> dict[str, object]:
    """Return what decides which kernels a library takes."""
    settings = {name: os.environ[name] for name in os.environ if KERNEL_SETTINGS.match(name)}
    return {
        "processor": _describe_processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "settings": settings,
    }


def has_equal_bits(
    config: Decoder.Config,
    *,
    dtype: torch.dtype,
    max_rows: int,
    num_threads: int,
    tensor_parallel_degree: int = 1,
    float32_head: bool = False,
    gradients: bool = False,
) -> bool:
    """Return whether one thread and `num_threads` give a model's layers the same bits.

    `check_machine` has compared whole batches on several threads with tiles on one. What is added
    here are whole batches on one thread, and with `gradients` their gradients, some of which are
    sums over all rows. False for models with a product so large that one thread is never faster.
    """
    products: set[tuple[int, int, torch.dtype]] = set()
    for fan_in, fan_out in list_linear_shapes(
        config, tensor_parallel_degree=tensor_parallel_degree
    ):
        products.add((fan_in, fan_out, dtype))
    if float32_head:
        products.add((config.dim, round(config.vocab_size / tensor_parallel_degree), torch.float32))
    if max(fan_in * fan_out for fan_in, fan_out, _ in products) > LARGEST_WEIGHT:
        return False

    attention = config.block.attention
    has_bias = attention.qkv_bias or attention.o_bias
    largest = list_row_counts(max_rows)[-1]
    compare = partial(compare_threads, num_threads=num_threads, gradients=gradients)
    # The first weights of a layer are drawn at a moment that the load decides; the run's random
    # numbers must not depend on it.
    with torch.random.fork_rng(devices=[]):
        for fan_in, fan_out, of_product in products:
            layer = nn.Linear(fan_in, fan_out, bias=has_bias, dtype=of_product)
            most = max(ROW_MULTIPLE, int(MAX_COMPARED / (fan_in * fan_out)))
            for rows in {ROW_MULTIPLE, min(8 * ROW_MULTIPLE, most), min(largest, most)}:
                if not compare(layer, rows=rows, width=fan_in, dtype=of_product):
                    return False

        # Heads are normalized one by one.
        widths = {config.dim: largest, attention.head_dim: largest * attention.num_heads}
        for width, rows in widths.items():
            norm = config.build_norm(width).to(dtype)
            if not compare(norm, rows=rows, width=width, dtype=dtype):
                return False
    return _is_sum_equal(largest, num_threads=num_threads)


def _is_sum_equal(count: int, *, num_threads: int) -> bool:
    """Return whether threads do not divide a sum of as many numbers among them, as of a loss."""
    x = torch.randn(count, generator=torch.Generator().manual_seed(2))
    threads = torch.get_num_threads()
    sums: list[Tensor] = []
    for used in (1, num_threads):
        use_threads(used)
        sums.append(x.sum())
    use_threads(threads)
    return torch.equal(*sums)


def compare_threads(
    layer: nn.Module,
    *,
    rows: int,
    width: int,
    dtype: torch.dtype,
    num_threads: int,
    gradients: bool,
) -> bool:
    """Return whether a layer's results for as many rows have the same bits on one thread."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, width, generator=generator).to(dtype).requires_grad_(gradients)
    results: list[list[Tensor]] = []
    threads = torch.get_num_threads()
    for count in (1, num_threads):
        use_threads(count)
        try:
            with torch.set_grad_enabled(gradients):
                y = layer(x)
                found = [y]
                if gradients:
                    inputs = [x, *layer.parameters()]
                    found += torch.autograd.grad(y, inputs, grad_outputs=y.detach().cos())
        finally:
            use_threads(threads)
        results.append(found)
    return all(map(torch.equal, *results))


@cache
def check_product(fan_in: int, fan_out: int, *, dtype: torch.dtype, max_rows: int) -> None:
    """Test a linear layer at different numbers of rows; raise ValueError as `check_rows`."""
    # Cached: trainer and generator of one process ask for the same layers.
    most = max(ROW_MULTIPLE, MAX_PRODUCTS / (fan_in * fan_out))
    weight = torch.randn(fan_out, fan_in, generator=torch.Generator().manual_seed(0))
    weight = weight.mul_(fan_in**-0.5).to(dtype)
    check_rows(
        f"a linear layer {fan_in} -> {fan_out}",
        lambda x: F.linear(x, weight),
        width=fan_in,
        dtype=dtype,
        counts=[count for count in list_row_counts(max_rows) if count <= most],
    )


def list_row_counts(max_rows: int) -> list[int]:
    """Return multiples of the tile up to `max_rows`: all small, and some large multiples."""
    # Libraries change their kernels at small sizes, and at some large ones.
    tiles = -(-max_rows // ROW_MULTIPLE)
    counts = {*range(1, 9), *(round(2 ** (i / 2)) for i in range(6, 40)), tiles}
    return [count * ROW_MULTIPLE for count in sorted(counts) if count <= tiles]


def list_linear_shapes(
    config: Decoder.Config, *, tensor_parallel_degree: int
) -> Iterator[tuple[int, int]]:
    """Yield input and output features of each product of one rank."""
    attention, dim = config.block.attention, config.dim
    share = 1 / tensor_parallel_degree
    heads = round(attention.num_heads * attention.head_dim * share)
    hidden: int = round(config.block.feed_forward.hidden_dim * share)  # type: ignore[attr-defined]
    yield (
        dim,
        round((attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim * share),
    )
    yield heads, dim
    yield dim, 2 * hidden
    yield hidden, dim
    yield dim, round(config.vocab_size * share)


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
    """Raise ValueError if rows in batches differ from the same rows in tiles on one thread."""
    counts = list(counts)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(max(counts), width, generator=generator).to(dtype)
    threads = torch.get_num_threads()
    use_threads(1)
    try:
        rows = torch.cat([layer(part) for part in x.split(tile)])
    finally:
        use_threads(threads)

    different: list[str] = []
    for count in counts:
        if not torch.equal(layer(x[:count].clone()), rows[:count]):
            different.append(str(count))
    if different:
        kind = str(dtype).removeprefix("torch.")
        machine = f"{read_processor()}, PyTorch {torch.__version__}, {threads} threads"
        batches = ", ".join(different)
        raise ValueError(
            f"batch_invariant=True: must be False on this machine ({machine}): {name} in {kind} "
            f"gives other bits in batches of {batches} rows than in tiles of {tile}"
        )


def _describe_processor() -> list[str]:
    """Return the lines about the first core that tell one kind of processor from another.

    A home folder may be shared by many machines, and virtual ones have common names.
    """
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text("utf-8").partition("\n\n")
    except OSError:
        return [read_processor()]
    return [line for line in first.splitlines() if PROCESSOR_LINES.match(line)]


def read_processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()  # ARM's cpuinfo has no names.
