"""Hosts from SLURM: one job with a node for each host, on which Monarch starts a worker."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from monarch.job import SlurmJob

from actors.config import LaunchConfig

logger = logging.getLogger(__name__)

ENDED = {"BOOT_FAIL", "DEADLINE", "NODE_FAIL", "OUT_OF_MEMORY"}
"""Final states of a job that Monarch does not know; it would wait on."""

OUTLIVE_A_NODE = ("--no-kill", "--no-requeue", "--export=ALL,SLURM_NO_KILL=set")
"""Options of sbatch with which a failed node ends neither the job nor its step (`srun` reads the variable). Otherwise
SLURM would also queue the job again, whose new workers nobody would use."""


class NodesOfRun(SlurmJob):
    """Monarch's job, read through the plain text of squeue, which is the same in all versions of SLURM.

    Monarch 0.7 reads `squeue --json`: before SLURM 24.05 the nodes have another form there, and 22.05 answers with all
    jobs of the cluster, whichever was asked for.
    """

    _seen = ""

    def _get_job_info_json(self, job_id: str) -> dict[str, Any] | None:
        query = ["squeue", "--job", job_id, "--states=all", "--noheader", "--format=%T|%N|%r"]
        try:
            answer = _output(query).strip()
            if not answer:
                return None
            state, node_list, reason = answer.split("|", maxsplit=2)
            nodes = _output(["scontrol", "show", "hostnames", node_list]).split() if node_list else []
        except subprocess.CalledProcessError as error:
            logger.warning("%s failed: %s", error.cmd[0], error.stderr.strip())
            return None
        if state == "PENDING" and reason not in {"None", self._seen}:
            self._seen = reason
            logger.info("SLURM job %s is in the queue: %s", job_id, reason)
        states = [state, "FAILED"] if state in ENDED else [state]
        allocation = [{"name": name} for name in nodes]
        return {"job_state": states, "job_resources": {"nodes": {"allocation": allocation}}}

    def share_node(self, tasks_per_node: int, gpus_per_task: int, partition: str) -> None:
        """Do nothing: Monarch's method needs another package, and its result is not used in the job's script."""


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def make_job(launch: LaunchConfig, groups: Mapping[str, int], *, gpus_of: Mapping[str, int]) -> NodesOfRun:
    """Return the job of these groups of hosts; its nodes are alike, so each has the most devices that any needs."""
    slurm = launch.slurm
    return NodesOfRun(
        dict(groups),
        python_exe=launch.python or sys.executable,
        slurm_args=(*OUTLIVE_A_NODE, *slurm.sbatch_args),
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
