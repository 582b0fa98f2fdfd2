"""Whole runs in separate processes, started as a user starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.launch.cleanup import find_by_environment, list_with_descendants
from rl.ledger.check import check_run
from rl.ledger.files import list_files
from rl.observability.metrics import read_metrics
from rl.observability.run_folder import LEDGER
from rl.utils.processes import ProcessId, identify, kill

ROOT = Path(__file__).resolve().parent.parent.parent
SHORT = ("--module", "tests.support.faulty_configs", "--config", "short", "--task.reward", "noise")
"""Options of a run of three steps from random weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRun:
    status: int
    output: str
    """Standard output and standard error, interleaved."""
    folder: Path

    @property
    def steps(self) -> list[dict[str, float]]:
        return [r for r in read_metrics(self.folder / "metrics.jsonl") if "reward/mean" in r]

    @property
    def evaluations(self) -> dict[int, dict[str, float]]:
        """Evaluation records by step."""
        return {
            int(r["step"]): r
            for r in read_metrics(self.folder / "metrics.jsonl")
            if "eval/correct" in r
        }


def restore_ctrl_c() -> None:
    """Restore SIGINT and SIGHUP in a new process: background jobs of a shell and of nohup inherit
    them as ignored.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start_controller(module: str, *arguments: str, **env: str) -> subprocess.Popen[str]:
    """Start a controller of `tests.support` in a process group of its own, like a shell."""
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.support.{module}", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=restore_ctrl_c,
    )


def wait_until_gone(pids: Sequence[int]) -> list[int]:
    """Wait up to 10 s for processes to end; return those that are left."""
    deadline = time.monotonic() + 10
    while any(identify(pid) for pid in pids) and time.monotonic() < deadline:
        os.sched_yield()
    return [pid for pid in pids if identify(pid)]


def command(dump_folder: Path, name: str, *options: str, resumes: bool = False) -> list[str]:
    run = [sys.executable, "-m", "rl.simple_grpo_sum_digits"]
    if resumes:
        return [*run, "--resume", str(dump_folder / name), *options]
    return [*run, "--dump_folder", str(dump_folder), "--name", name, *options]


Act = Callable[[subprocess.Popen[str]], None]
"""What a test does to a run, given its controller."""


def signal_group(number: signal.Signals) -> Act:
    """Return an act that sends the signal to the run's whole process group, as a terminal does."""
    return lambda run: os.killpg(run.pid, number)


def kill_role(role: str) -> Act:
    """Return an act that kills the processes of one role, like the out-of-memory killer."""

    def act(run: subprocess.Popen[str]) -> None:
        processes = role_processes(run.pid, role)
        assert processes, f"the run has no process of role {role!r}"
        for process in processes:
            kill(process)

    return act


def role_processes(controller_pid: int, role: str) -> list[ProcessId]:
    """Return the actor processes of a role and their children."""
    controller = identify(controller_pid)
    assert controller is not None
    descendants = set(list_with_descendants([controller]))
    return [
        process for process in find_by_environment("RELAY_ROLE", role) if process in descendants
    ]


def run_to_the_end(
    dump_folder: Path,
    name: str,
    *options: str,
    limit_s: float,
    resumes: bool = False,
    env: Mapping[str, str] | None = None,
    after: tuple[str, Act] | None = None,
) -> FinishedRun:
    """Run, or resume an earlier run of that name, until it ends within `limit_s`.

    Args:
        after: a text and what is done to the run once it prints that text.
    """
    run = subprocess.Popen(
        command(dump_folder, name, *options, resumes=resumes),
        cwd=ROOT,
        env={**(os.environ if env is None else env), "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=restore_ctrl_c,
    )
    assert run.stdout is not None
    printed: list[str] = []
    try:
        if after is not None:
            for text in run.stdout:
                printed.append(text)
                if after[0] in text:
                    after[1](run)
                    break
        rest, _ = run.communicate(timeout=limit_s)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    finished = FinishedRun(
        status=run.returncode, output="".join(printed) + rest, folder=dump_folder / name
    )
    check_ledger(finished)
    return finished


def check_ledger(run: FinishedRun) -> None:
    """Check that what a run has trained follows from what was sampled, however it ended."""
    if list_files(run.folder / LEDGER):
        checked = check_run(run.folder)
        assert checked.violation is None, f"{checked.violation}\n{run.output}"
