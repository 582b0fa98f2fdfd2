"""Hosts from SLURM: one job whose nodes are the hosts."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from monarch.job import SlurmJob

from actors.config import LaunchConfig


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
