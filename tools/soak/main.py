"""Run after run, each checked for how it ended and what it left: `make soak`.

Every run is a tiny one with all its parts, shortened: warm-up (the first; the others find it made), training,
evaluation, checkpoints, export, learning curve; synchronous and asynchronous by turns. A line a run says what
it came to, and the last line is one JSON object. Exit status: 0 all were clean, 1 one was not, 130
interrupted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rl.observability.metrics import read_metrics
from rl.observability.run_folder import read_status
from tools.soak.leftovers import Leftovers, Watch

ROOT = Path(__file__).resolve().parent.parent.parent
NUM_STEPS = 6
GRACE_S = 10.0
SHORTENED = {
    "warmup.num_steps": 60,
    "loop.num_steps": NUM_STEPS,
    "loop.num_prompts": 8,
    "loop.num_samples": 4,
    "loop.eval_every": 3,
    "task.num_eval": 16,
    "trainer.checkpoint.interval": 2,
    "trainer.checkpoint.async_mode": "async",
}
MODES: dict[str, dict[str, object]] = {
    "synchronous": {"loop.max_policy_age": 0},
    "asynchronous": {"loop.max_policy_age": 2},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Of one run."""

    mode: str
    status: int | None
    """Of its exit; None: it did not end within its time."""
    run_s: float
    problems: tuple[str, ...]
    """What it should not have done or left; none where all is well."""


def command(dump_folder: Path, name: str, mode: str) -> list[str]:
    options = SHORTENED | MODES[mode]
    flags = [text for field, value in options.items() for text in (f"--{field}", str(value))]
    run = [sys.executable, "-m", "rl.simple_grpo_sum_digits"]
    return [*run, "--dump_folder", str(dump_folder), "--name", name, *flags]


def run_one(folder: Path, number: int, *, limit_s: float, also: Path | None) -> Outcome:
    """One run from its start to its last process, and the check of what it came to."""
    mode = list(MODES)[number % len(MODES)]
    name, outputs = f"run-{number}", folder / "outputs"
    watch = Watch(folder / "tmp", also=also)
    started = time.monotonic()
    output = folder / f"{name}.out"
    with output.open("w") as stream:
        process = subprocess.Popen(
            command(outputs, name, mode),
            cwd=ROOT,
            env=watch.environment(),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            run_s = time.monotonic() - started
            if process.poll() is None:
                watch.end()
                process.wait()
    left = watch.left(grace_s=GRACE_S, run_folder=outputs / name)
    watch.end()
    problems = check(outputs / name, status=status, left=left, limit_s=limit_s)
    if problems:
        print(output.read_text()[-3000:], flush=True)
    else:  # what went well is not looked at again
        shutil.rmtree(outputs / name)
        output.unlink()
    return Outcome(mode=mode, status=status, run_s=run_s, problems=problems)


def check(run_folder: Path, *, status: int | None, left: Leftovers, limit_s: float) -> tuple[str, ...]:
    """What is wrong with a run that should have finished and left nothing but its folder."""
    problems = []
    if status is None:
        problems.append(f"it did not end within {limit_s:g} s")
    elif status != 0:
        problems.append(f"exit status {status}")
    if left and status is not None:  # what was killed could not clean up
        problems.append(f"left behind: {left}")
    if status != 0:
        return tuple(problems)
    if (said := read_status(run_folder)) != "finished":
        problems.append(f"its status is {said}")
    records = read_metrics(run_folder / "metrics.jsonl")
    steps = [record["step"] for record in records if "reward/mean" in record]
    if steps != list(range(1, NUM_STEPS + 1)):
        problems.append(f"its steps are {steps}")
    wanted = {"checkpoints", "config.json", "learning_curve.png", "logs", "metrics.jsonl", "rollouts.jsonl"}
    if missing := wanted - {path.name for path in run_folder.iterdir()}:
        problems.append(f"missing: {', '.join(sorted(missing))}")
    if partial := [path.name for path in run_folder.rglob(".*") if path.name not in (".lock", ".metadata")]:
        problems.append(f"half written: {', '.join(sorted(partial))}")
    return tuple(problems)


def summary(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """The last line."""
    times = [outcome.run_s for outcome in outcomes]
    return {
        "runs": len(outcomes),
        "clean": sum(not outcome.problems for outcome in outcomes),
        "hung": sum(outcome.status is None for outcome in outcomes),
        "left_something": sum("left behind" in " ".join(outcome.problems) for outcome in outcomes),
        "modes": dict(Counter(outcome.mode for outcome in outcomes)),
        "median_s": round(statistics.median(times), 1) if times else None,
        "longest_s": round(max(times), 1) if times else None,
        "problems": [asdict(outcome) for outcome in outcomes if outcome.problems],
    }


def soak(args: argparse.Namespace) -> int:
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir=args.folder))
    also = None if args.shared_machine else Path(tempfile.gettempdir())
    outcomes: list[Outcome] = []
    print(f"{args.runs} runs; everything is in {folder}", flush=True)
    try:
        for number in range(args.runs):
            outcome = run_one(folder, number, limit_s=args.limit_s, also=also)
            outcomes.append(outcome)
            said = "clean" if not outcome.problems else "; ".join(outcome.problems)
            print(f"run {number + 1}/{args.runs}, {outcome.mode}: {outcome.run_s:.1f} s, {said}", flush=True)
    finally:
        print(json.dumps(summary(outcomes)), flush=True)
        if outcomes and not any(outcome.problems for outcome in outcomes):
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if any(outcome.problems for outcome in outcomes) else 0


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make soak", description="Run after run, each checked.")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--limit_s", type=float, default=300.0, help="of one run")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="a short path, for sockets")
    parser.add_argument(
        "--shared_machine",
        action="store_true",
        help="others use the folder of temporary files too: look only at what heeds TMPDIR",
    )
    args = parser.parse_args(argv)
    if args.runs < 1 or not args.limit_s > 0:
        parser.error(f"--runs={args.runs} and --limit_s={args.limit_s}: both must be above 0")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception: the run at work is ended too
    try:
        return soak(args)
    except KeyboardInterrupt:
        print("\nsoak: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
