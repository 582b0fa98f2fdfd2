"""Whole runs as a user starts them, in a process of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rl.observability.metrics import read_metrics

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRun:
    status: int
    output: str
    """Standard output and error together."""
    folder: Path
    seconds: float

    @property
    def steps(self) -> list[dict[str, float]]:
        return [r for r in read_metrics(self.folder / "metrics.jsonl") if "reward/mean" in r]

    @property
    def evaluations(self) -> dict[int, dict[str, float]]:
        """By step."""
        return {int(r["step"]): r for r in read_metrics(self.folder / "metrics.jsonl") if "eval/correct" in r}


def hear_ctrl_c() -> None:
    """In a new process: a shell starts its background jobs with SIGINT ignored, and that is inherited."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def command(dump_folder: Path, name: str, *options: str) -> list[str]:
    run = [sys.executable, "-m", "rl.simple_grpo_sum_digits"]
    return [*run, "--dump_folder", str(dump_folder), "--name", name, *options]


def run_to_the_end(dump_folder: Path, name: str, *options: str, limit_s: float) -> FinishedRun:
    """Run until it ends by itself, within `limit_s`."""
    started = time.monotonic()
    done = subprocess.run(
        command(dump_folder, name, *options),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_s,
    )
    return FinishedRun(
        status=done.returncode,
        output=done.stdout,
        folder=dump_folder / name,
        seconds=time.monotonic() - started,
    )


def interrupt_after_line(
    dump_folder: Path, name: str, *options: str, line: str, signal_number: signal.Signals, limit_s: float
) -> FinishedRun:
    """Send the signal to the run's whole process group, as a terminal does, once `line` is printed."""
    started = time.monotonic()
    run = subprocess.Popen(
        command(dump_folder, name, *options),
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=hear_ctrl_c,
    )
    assert run.stdout is not None
    lines: list[str] = []
    try:
        for text in run.stdout:
            lines.append(text)
            if line in text:
                os.killpg(run.pid, signal_number)
                break
        rest, _ = run.communicate(timeout=limit_s)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    return FinishedRun(
        status=run.returncode,
        output="".join(lines) + rest,
        folder=dump_folder / name,
        seconds=time.monotonic() - started,
    )
