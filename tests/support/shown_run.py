"""Console output of a run of 20 steps that pauses for a line of input whenever a test is to look."""

from __future__ import annotations

import sys
from pathlib import Path

from rl.observability.console import ConsoleConfig, make_console
from rl.observability.progress import print_line
from rl.observability.spans import SpanRecorder

STEP = {"loss/mean": -0.0123, "logprob_diff/mean": 1e-7, "time/step_s": 0.5, "policy_version": 9}


def main(logs: Path) -> None:
    console = make_console(ConsoleConfig(num_rows=4), num_steps=20, logs=logs, title="try-1")
    trainers = [_process(logs, "trainer", rank) for rank in range(2)]
    generator = _process(logs, "generator_0", 0)
    for trainer in trainers:
        trainer.begin("forward_backward", 10)
    generator.begin("generate", None)
    generator.begin("generate", None)
    earlier = [{"step": 0, "eval/correct": 0.25, "eval/num_problems": 64}]
    earlier += [{"step": step, "reward/mean": step / 10, **STEP} for step in range(1, 4)]
    with console.shown(earlier):
        for step in range(4, 11):
            console.write({"step": step, "reward/mean": step / 10, **STEP})
        console.write({"step": 10, "eval/correct": 0.5, "eval/num_problems": 64})
        sys.stdin.readline()
        print_line("generator_0 is lost")
        sys.stdin.readline()
        with console.watch("evaluation at step 10 (64 problems)"):
            sys.stdin.readline()
        for step in range(11, 21):
            console.write({"step": step, "reward/mean": step / 10, **STEP})
        sys.stdin.readline()
    print_line("finished: 20 steps")


def _process(logs: Path, role: str, rank: int) -> SpanRecorder:
    activity = SpanRecorder()
    activity.start(logs, role=role, rank=rank)
    return activity


if __name__ == "__main__":
    main(Path(sys.argv[1]))
