"""The ledger: how fast a million trained tokens are checked, how large they are, what a step pays.

    python -m benchmarks.ledger [--quick] [--tokens 1000000] [--rounds 20] [--parts check step]

`check` writes a ledger of so many trained tokens with the run's own code, from batches that are
made up: groups of 8 episodes with replies of 200 to 2,000 tokens, a quarter of the groups in
several turns, one step off-policy. `python -m rl.ledger` then checks it in a process of its own.
`agents` is a second ledger, a quarter as large: episodes of 12 turns in four branches, of which the
longest has a context of 14,000 tokens.

    seconds           wall time of the whole command, imports too
    peak_mib          largest memory of that process
    bytes_per_token   of the files, over trained tokens

`step` is a run of `tiny` with all its actors, in which the ledger is switched on, off, off and on
from step to step. A step counts from the beginning of its training to that of the next one, so that
the writing in the background, while the next step generates, is a part of the step that is written.

    wall, cpu         median over the rounds of the steps with the ledger over those without, minus
                      1, of the wall time and of the CPU time of all processes; `interval` is the
                      bootstrapped 95% interval
    loop_ms           time that the event loop's thread spends in a step on the ledger and on
                      receipts, which a run has without a ledger too
    writer_ms         CPU time of the writing thread for a step

A machine that does other things moves the steps by several percent, and much more than the ledger;
`loop_ms` and `writer_ms` are of the same run and hardly move. The last line is a JSON object;
`ratio` has figures over their targets, of which `step` is all of `loop_ms` and `writer_ms` over one
percent of a step, as if nothing of the writing were done while the loop waits.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.observability import interval
from benchmarks.processes import ROOT, Worker, loop_steps, tiny_assets
from benchmarks.trained_batches import AGENTS, REPLIES, Shape, write_ledger

PARTS = ("check", "step")
TARGETS = {"seconds": 60.0, "peak_mib": 1024.0, "bytes_per_token": 24.0, "step": 0.01}
"""Largest acceptable figures: of a million tokens, and of a step's time."""
ROUND = (True, False, False, True)
"""Whether the ledger is on in the steps of a round."""
NUM_WARMUP_STEPS = len(ROUND)
RUN_AND_TELL = """
import resource, subprocess, sys
status = subprocess.call(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(status)
"""
"""Program that runs a command, and then prints the largest memory of that in KiB."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="3 rounds")
    parser.add_argument(
        "--tokens", type=int, default=1_000_000, help="trained tokens of the ledger"
    )
    parser.add_argument("--rounds", type=int, help="of four steps; 20")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    args = parser.parse_args()
    rounds = args.rounds or (3 if args.quick else 20)

    figures: dict[str, Any] = {}
    if "check" in args.parts:
        figures["replies"] = measure_check(REPLIES, num_tokens=args.tokens)
        figures["agents"] = measure_check(AGENTS, num_tokens=args.tokens // 4)
    if "step" in args.parts:
        figures["step"] = measure_step(rounds=rounds)
    print(
        json.dumps(
            {
                "benchmark": "ledger",
                "cores": os.cpu_count(),
                **figures,
                "targets": TARGETS,
                "compared": "figure over its target: at most 1 is met",
                "ratio": compute_ratios(figures),
            }
        )
    )


def compute_ratios(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures that have a target over it; the targets are of a million tokens."""
    ratios = {}
    if "replies" in figures:
        of = figures["replies"]
        for name in ("seconds", "peak_mib", "bytes_per_token"):
            ratios[name] = of[name] / TARGETS[name]
    if "step" in figures:
        of = figures["step"]
        spent_ms = sum(of["loop_ms"].values()) + of["writer_ms"]
        ratios["step"] = spent_ms / 1e3 / of["wall"]["off_s"] / TARGETS["step"]
    return ratios


# The check


def measure_check(shape: Shape, *, num_tokens: int) -> dict[str, float]:
    """Write a ledger and check it in another process."""
    with tempfile.TemporaryDirectory() as name:
        run = Path(name)
        started = time.perf_counter()
        num_trained = write_ledger(run, shape, num_tokens=num_tokens)
        make_s = time.perf_counter() - started
        size = sum(file.stat().st_size for file in (run / "ledger").iterdir())
        seconds, peak_mib, said = time_command([sys.executable, "-m", "rl.ledger", str(run)])
    print(f"{shape.name}: {said.splitlines()[0]}; {seconds:.1f} s, {peak_mib:.0f} MiB", flush=True)
    return {
        "tokens": num_trained,
        "seconds": seconds,
        "peak_mib": peak_mib,
        "bytes_per_token": size / num_trained,
        "made_s": make_s,
    }


def time_command(command: Sequence[str]) -> tuple[float, float, str]:
    """Run a command; return its wall time, its largest memory in MiB, and what it printed.

    Raises RuntimeError if it failed.
    """
    started = time.perf_counter()
    # Started by a small process: a process begins with the largest memory of its parent.
    done = subprocess.run(
        [sys.executable, "-c", RUN_AND_TELL, *command], cwd=ROOT, capture_output=True, text=True
    )
    seconds = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    *said, peak_kib = done.stdout.splitlines()
    return seconds, int(peak_kib) / 1024, "\n".join(said)


# A step


def measure_step(*, rounds: int) -> dict[str, Any]:
    """Run `tiny` with the ledger switched on and off."""
    with tempfile.TemporaryDirectory() as name:
        assets = tiny_assets(Path(name))
        threads = os.cpu_count() or 1
        with Worker(run_switched, threads=threads, assets=assets, rounds=rounds) as worker:
            figures: dict[str, Any] = worker.call("copy")
    print(f"step: {figures}", flush=True)
    return figures


class Times:
    """Seconds of steps, and of calls by name and by step."""

    def __init__(self) -> None:
        self.step = 0
        """The last step that trains, or has trained."""
        self.by_step: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self._begun = (0.0, 0.0)

    def begin_step(self) -> None:
        now = (time.perf_counter(), sum_cpu_s())
        if self.step:
            for name, end, start in zip(("wall", "cpu"), now, self._begun, strict=True):
                self.by_step[name][self.step] = end - start
        self.step += 1
        self._begun = now

    @contextmanager
    def measure(self, name: str, step: int, clock: Callable[[], float]) -> Iterator[None]:
        started = clock()
        try:
            yield
        finally:
            self.by_step[name][step] += clock() - started

    def list(self, name: str, steps: Sequence[int]) -> list[float]:
        return [self.by_step[name].get(step, 0.0) for step in steps]


def sum_cpu_s() -> float:
    """Return the CPU time of this process and all below it, in seconds."""
    process = psutil.Process()
    times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def is_on(step: int) -> bool:
    """Return whether a step is written into the ledger."""
    return ROUND[(step - 1) % len(ROUND)]


def run_switched(assets: str, rounds: int) -> dict[str, Any]:
    """Run `tiny` in this process; return the figures of its steps."""
    from configs.sum_digits import tiny

    config = tiny()
    config.ledger.enable = True
    num_cores = os.cpu_count() or 1
    times = Times()
    watch(times)
    records = loop_steps(
        config,
        assets=assets,
        tokens=config.loop.sampling.max_tokens,
        steps=rounds * len(ROUND),
        threads=[num_cores, num_cores],
        num_warmup=NUM_WARMUP_STEPS,
        num_cooldown=1,  # A step ends with the beginning of the next one.
    )
    tokens = [record["completion/tokens_mean"] for record in records]
    num_episodes = config.loop.groups_per_batch * config.loop.group_size
    return {
        "rounds": rounds,
        "tokens_per_step": statistics.median(tokens) * num_episodes,
        **compute_figures(times, [int(record["step"]) for record in records]),
    }


def compute_figures(times: Times, steps: Sequence[int]) -> dict[str, Any]:
    """Return the figures of whole rounds of steps."""
    on, off = ([step for step in steps if is_on(step) == side] for side in (True, False))
    figures: dict[str, Any] = {}
    for name in ("wall", "cpu"):
        # Both steps of a side in a round together.
        sums = [np.reshape(times.list(name, of), (-1, 2)).sum(axis=1) for of in (on, off)]
        by_round = sums[0] / sums[1] - 1
        figures[name] = {
            "overhead": float(np.median(by_round)),
            "interval": interval(by_round),
            "on_s": statistics.median(times.list(name, on)),
            "off_s": statistics.median(times.list(name, off)),
        }

    def median_ms(name: str, of: Sequence[int]) -> float:
        return 1e3 * statistics.median(times.list(name, of))

    # Without a ledger the recorder's tokens are collected in the same way.
    collect_ms = median_ms("collect", on) - median_ms("collect", off)
    return figures | {
        "loop_ms": {"ledger": median_ms("choose", on), "receipts": median_ms("seal", steps)},
        "writer_ms": median_ms("write", on) + collect_ms,
    }


def watch(times: Times) -> None:
    """Switch the ledger of this process's runs by steps, and time the calls that it needs."""
    from actors import controller
    from actors.cluster import clients
    from rl.loop import loop
    from rl.loop.ledger import StepLedger

    class SwitchedLedger(StepLedger):
        """Ledger of the steps that are on."""

        def choose_ids(self, groups: Any) -> Any:
            times.begin_step()
            if not is_on(times.step):
                return []
            with times.measure("choose", times.step, time.perf_counter):
                return super().choose_ids(groups)

        def step(self, step: int, *args: Any, **more: Any) -> None:
            if is_on(step):
                with times.measure("write", step, time.thread_time):
                    super().step(step, *args, **more)

    def seal(*args: Any, **more: Any) -> Any:
        with times.measure("seal", times.step + 1, time.perf_counter):
            return sealing(*args, **more)

    def collect(*args: Any, **more: Any) -> Any:
        # In the writing thread, while the loop goes on; the next step is not chosen before.
        with times.measure("collect", times.step, time.thread_time):
            return collecting(*args, **more)

    sealing, collecting = vars(clients)["seal"], vars(loop)["collect_trained_rollouts"]
    patches: dict[Any, dict[str, Any]] = {
        controller: {"StepLedger": SwitchedLedger},
        clients: {"seal": seal},
        loop: {"collect_trained_rollouts": collect},
    }
    for module, names in patches.items():
        vars(module).update(names)


if __name__ == "__main__":
    main()
