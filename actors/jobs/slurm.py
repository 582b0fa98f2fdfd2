"""Hosts from SLURM: one job whose nodes are the hosts, and the script that asks for it."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from monarch.job import SlurmJob

from actors.config import LaunchConfig

_KEEP_THE_SCRIPT = """#!/bin/sh
cat > "$0.script"
echo "Submitted batch job 0"
"""


def mesh_name(launch: LaunchConfig, group: str) -> str:
    """Return the name of a group's hosts in the job."""
    return group


def make_job(launch: LaunchConfig, groups: Mapping[str, int], *, gpus_of: Mapping[str, int]) -> SlurmJob:
    """Monarch's job for these groups of hosts; nothing is submitted yet.

    It changes how this process talks to actors (TCP), so it is made before anything else of Monarch.
    """
    slurm = launch.slurm
    return SlurmJob(
        dict(groups),
        python_exe=launch.python or sys.executable,
        slurm_args=slurm.sbatch_args,
        monarch_port=slurm.port,
        job_name=launch.job_name,
        time_limit=slurm.time_limit,
        partition=slurm.partition,
        log_dir=str(Path(slurm.log_folder).expanduser().absolute()),
        exclusive=slurm.exclusive,
        gpus_per_node=max(gpus_of.values()) or None,
        cpus_per_task=slurm.cpus_per_host,
        mem=slurm.memory_per_host,
        job_start_timeout=max(1, round(launch.start_timeout_s)),
        account=slurm.account,
        qos=slurm.qos,
    )


def submitted(launch: LaunchConfig, groups: Mapping[str, int], *, gpus_of: Mapping[str, int]) -> str:
    """Return the script that a run would submit with sbatch.

    Monarch writes the script and runs sbatch in one step, so it finds an sbatch here that keeps it.
    """
    with tempfile.TemporaryDirectory() as folder:
        sbatch = Path(folder) / "sbatch"
        sbatch.write_text(_KEEP_THE_SCRIPT)
        sbatch.chmod(0o700)
        job = make_job(launch, groups, gpus_of=gpus_of)
        # Monarch makes this folder, which a look at the script should not.
        log_folder, job._log_dir = job._log_dir, folder
        path = os.environ.get("PATH", "")
        os.environ["PATH"] = f"{folder}{os.pathsep}{path}"
        try:
            job.apply()
        finally:
            os.environ["PATH"] = path
        return (Path(folder) / "sbatch.script").read_text().replace(f"={folder}/", f"={log_folder}/")
