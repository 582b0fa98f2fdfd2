"""Steps of GRPO beside other work: how much a run slows down on a machine that does other things.

    python -m benchmarks.busy [--quick] [--busy 0 1 2 4] [--tokens 16] [--sides relay trl]

Each side is measured on the calm machine, and beside 1, 2 and 4 processes that compute without a
pause at the same priority. They begin with the second step of relay, whose start would take minutes
beside them, and before the first one of TRL. `alone` is a process with a single thread that
multiplies small matrices: it loses the share of the machine that the others take, which nobody can
avoid. A side's slowdown is its step beside the others over its calm step; the ratio, printed last,
is that slowdown over the slowdown of `alone`: 1 would be a side that loses its share and nothing
else.

The sides are those of `benchmarks.grpo_vs_trl`, with the same weights, prompts and sampling. tiny
is in the batch-invariant mode, as the config is by itself: only there may the trainer's number of
threads follow the load. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import grpo_vs_trl
from benchmarks.processes import Worker, num_repeats

LONGEST_S = 1800.0
"""Time after which a busy process ends by itself."""
ALONE_S = 5.0
"""Seconds that `alone` computes for on a calm machine, about."""


def main() -> None:
    options = grpo_vs_trl.parser()
    options.description = __doc__
    options.add_argument("--busy", type=int, nargs="+", help="busy processes; 0 1 2 4")
    args = options.parse_args()
    args.busy = args.busy or ([0, 2] if args.quick else [0, 1, 2, 4])
    args.tokens = args.tokens or [16 if args.model == "tiny" else 64]
    args.dtype = args.dtype or ["float32" if args.model == "tiny" else "bfloat16"]
    # Beside other work a step of TRL takes a quarter of a minute.
    relay = "relay_invariant" if args.model == "tiny" else "relay"
    args.sides = args.sides or ([relay] if args.quick else [relay, "relay_async", "trl"])
    if 0 not in args.busy:
        options.error("--busy: must include 0, the calm machine with which the others are compared")

    assets = grpo_vs_trl.find_assets(args.assets) if args.model == "smollm2" else None
    steps: dict[int, dict[str, float]] = {}
    for num_busy in args.busy:
        steps[num_busy] = measure(num_busy, assets=assets, args=args)
        seconds = ", ".join(f"{side} {step:.3g} s" for side, step in steps[num_busy].items())
        print(f"{num_busy} busy processes: {seconds}", flush=True)

    slowdowns = {n: {side: of[side] / steps[0][side] for side in of} for n, of in steps.items()}
    ratios: dict[str, dict[str, float]] = {}
    for num_busy, of in slowdowns.items():
        if num_busy:
            ratios[str(num_busy)] = {side: of[side] / of["alone"] for side in of if side != "alone"}
    figures = {
        "benchmark": "busy",
        "model": args.model,
        "tokens": args.tokens[0],
        "threads": args.threads,
        "repeats": args.repeats or num_repeats(args),
        "step_s": {str(n): of for n, of in steps.items()},
        "slowdown": {str(n): of for n, of in slowdowns.items()},
        "compared": "slowdown beside so many busy processes: relay over one thread",
        "ratio": ratios,
    }
    print(json.dumps(figures))


def measure(num_busy: int, *, assets: Path | None, args: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of a step of each side beside so many processes, and those of `alone`."""
    with tempfile.TemporaryDirectory() as folder:
        marker = Path(folder) / "steps"
        with keep_busy(num_busy, marker=marker):
            sides = grpo_vs_trl.measure(
                Path(folder),
                real_assets=assets,
                dtype=args.dtype[0],
                tokens=args.tokens[0],
                args=args,
                marker=marker,
            )
            with Worker(compute_alone, threads=1, marker=str(marker)) as worker:
                alone = worker.call("copy")
    return {side: figures["step_s"] for side, figures in sides.items()} | alone


def compute_alone(marker: str) -> dict[str, float]:
    """Return the mean seconds of equal pieces of work on one thread."""
    import torch

    torch.set_num_threads(1)
    Path(marker).touch()
    matrix = torch.randn(128, 128)
    pieces: list[float] = []
    end = time.perf_counter() + ALONE_S
    while time.perf_counter() < end or len(pieces) < 5:
        started = time.perf_counter()
        for _ in range(4_000):
            matrix @ matrix
        pieces.append(time.perf_counter() - started)
    # The mean, as a step is compared: the scheduler takes the processor in slices.
    return {"alone": statistics.mean(pieces)}


@contextmanager
def keep_busy(num_processes: int, *, marker: Path) -> Iterator[None]:
    """Let processes compute without a pause within the block, while the marker is there."""
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_spin, args=(marker,), daemon=True) for _ in range(num_processes)
    ]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _spin(marker: Path) -> None:
    end = time.monotonic() + LONGEST_S
    while time.monotonic() < end:
        if not marker.exists():
            time.sleep(0.05)
            continue
        for _ in range(1_000_000):
            pass


if __name__ == "__main__":
    main()
