"""Fake SLURM commands for Monarch's SlurmJob; the nodes are loopback addresses of this machine.

    folder = write_commands(tmp_path / "bin")      # to be put first on the PATH

`sbatch` runs its script at once, `srun` starts the command once for each node, `squeue`, `scontrol`
and `scancel` know the one job, whose state is FAKE_SLURM_STATE of the environment, or RUNNING.
Beside the commands are what was submitted (`script`, `options`) and, in the end, `cancelled`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
JOB_ID = "4711"


def write_commands(folder: Path) -> Path:
    folder.mkdir()
    for name in COMMANDS:
        command = folder / name
        run = f"{sys.executable} -m tests.support.fake_slurm {name}"
        command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {run} "$0" "$@"\n')
        command.chmod(0o700)
    return folder


def nodes(folder: Path) -> list[str]:
    """Return the loopback addresses of the submitted job, one for each node."""
    number = re.search(r"--nodes=(\d+)", (folder / "options").read_text())
    assert number is not None
    return [f"127.0.0.{2 + i}" for i in range(int(number[1]))]


def sbatch(folder: Path, options: list[str]) -> None:
    (folder / "options").write_text("\n".join(options))
    (folder / "script").write_text(sys.stdin.read())
    with (folder / "output").open("w") as output:
        job = subprocess.Popen(
            ["bash", folder / "script"], start_new_session=True, stdout=output, stderr=output
        )
    (folder / "pid").write_text(str(job.pid))
    print(JOB_ID)


def srun(folder: Path, command: list[str]) -> None:
    *_, python, option, code = command
    workers = [
        subprocess.Popen(
            # The hostname of a node is its address.
            [python, option, code.replace("socket.gethostname()", repr(node))],
            env={**os.environ, "SLURM_NODEID": str(number)},
        )
        for number, node in enumerate(nodes(folder))
    ]
    for worker in workers:
        worker.wait()


def squeue(folder: Path, arguments: list[str]) -> None:
    assert arguments == ["--job", JOB_ID, "--states=all", "--noheader", "--format=%T|%N|%r"], (
        arguments
    )
    (folder / "asked").touch()
    state = (
        "CANCELLED"
        if (folder / "cancelled").exists()
        else os.environ.get("FAKE_SLURM_STATE", "RUNNING")
    )
    print(f"{state}|{','.join(nodes(folder)) if state != 'PENDING' else ''}|None")


def scontrol(_: Path, arguments: list[str]) -> None:
    assert arguments[:2] == ["show", "hostnames"], arguments
    print("\n".join(arguments[2].split(",")))


def scancel(folder: Path, arguments: list[str]) -> None:
    assert arguments == [JOB_ID], arguments
    (folder / "cancelled").touch()
    session = int((folder / "pid").read_text())
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            if os.getsid(pid) == session:
                os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


COMMANDS = {
    "sbatch": sbatch,
    "srun": srun,
    "squeue": squeue,
    "scontrol": scontrol,
    "scancel": scancel,
}

if __name__ == "__main__":
    name, path, *arguments = sys.argv[1:]
    COMMANDS[name](Path(path).parent, arguments)
