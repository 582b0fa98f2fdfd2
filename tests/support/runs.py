"""Whole runs in separate processes, started as a user starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from actors.processes import carrying_environment, with_descendants
from rl.observability.metrics import read_metrics
from rl.utils.processes import ProcessId, identify

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRun:
    status: int
    output: str
    """Standard output and standard error, interleaved."""
    folder: Path
    seconds: float

    @property
    def steps(self) -> list[dict[str, float]]:
        return [r for r in read_metrics(self.folder / "metrics.jsonl") if "reward/mean" in r]

    @property
    def evaluations(self) -> dict[int, dict[str, float]]:
        """Evaluation records by step."""
        return {int(r["step"]): r for r in read_metrics(self.folder / "metrics.jsonl") if "eval/correct" in r}


def restore_ctrl_c() -> None:
    """Restore SIGINT in a new process: background jobs of a shell inherit it as ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def command(dump_folder: Path, name: str, *options: str, resumes: bool = False) -> list[str]:
    run = [sys.executable, "-m", "rl.simple_grpo_sum_digits"]
    if resumes:
        return [*run, "--resume", str(dump_folder / name), *options]
    return [*run, "--dump_folder", str(dump_folder), "--name", name, *options]


def run_to_the_end(
    dump_folder: Path,
    name: str,
    *options: str,
    limit_s: float,
    resumes: bool = False,
    env: Mapping[str, str] | None = None,
) -> FinishedRun:
    """Run, or resume an earlier run of that name, until it ends within `limit_s`."""
    started = time.monotonic()
    done = subprocess.run(
        command(dump_folder, name, *options, resumes=resumes),
        cwd=ROOT,
        env=env,
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
    dump_folder: Path,
    name: str,
    *options: str,
    line: str,
    signal_number: signal.Signals,
    limit_s: float,
    resumes: bool = False,
    env: Mapping[str, str] | None = None,
) -> FinishedRun:
    """Send the signal to the run's whole process group, as a terminal does, once `line` is printed."""

    def interrupt(run: subprocess.Popen[str]) -> None:
        os.killpg(run.pid, signal_number)

    run = command(dump_folder, name, *options, resumes=resumes)
    folder = dump_folder / name
    return _act_after_line(run, folder, line=line, act=interrupt, limit_s=limit_s, env=env)


def kill_role_after_line(
    dump_folder: Path, name: str, *options: str, line: str, role: str, limit_s: float
) -> FinishedRun:
    """Send SIGKILL to the processes of one role, like the out-of-memory killer, once `line` is printed."""
    return _signal_role(
        dump_folder, name, *options, line=line, role=role, signal_number=signal.SIGKILL, limit_s=limit_s
    )


def stop_role_after_line(
    dump_folder: Path, name: str, *options: str, line: str, role: str, limit_s: float
) -> FinishedRun:
    """Send SIGSTOP to the processes of one role once `line` is printed, which stops them without killing
    them."""
    return _signal_role(
        dump_folder, name, *options, line=line, role=role, signal_number=signal.SIGSTOP, limit_s=limit_s
    )


def _signal_role(
    dump_folder: Path,
    name: str,
    *options: str,
    line: str,
    role: str,
    signal_number: signal.Signals,
    limit_s: float,
) -> FinishedRun:
    def act(run: subprocess.Popen[str]) -> None:
        processes = role_processes(run.pid, role)
        assert processes, f"the run has no process of role {role!r}"
        for process in processes:
            os.kill(process.pid, signal_number)

    run = command(dump_folder, name, *options)
    return _act_after_line(run, dump_folder / name, line=line, act=act, limit_s=limit_s)


def role_processes(controller_pid: int, role: str) -> list[ProcessId]:
    """Return the actor processes of a role and their children."""
    controller = identify(controller_pid)
    assert controller is not None
    descendants = set(with_descendants([controller]))
    return [process for process in carrying_environment("RELAY_ROLE", role) if process in descendants]


def _act_after_line(
    arguments: list[str],
    folder: Path,
    *,
    line: str,
    act: Callable[[subprocess.Popen[str]], None],
    limit_s: float,
    env: Mapping[str, str] | None = None,
) -> FinishedRun:
    started = time.monotonic()
    run = subprocess.Popen(
        arguments,
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
        for text in run.stdout:
            printed.append(text)
            if line in text:
                act(run)
                break
        rest, _ = run.communicate(timeout=limit_s)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    return FinishedRun(
        status=run.returncode,
        output="".join(printed) + rest,
        folder=folder,
        seconds=time.monotonic() - started,
    )
