"""Hosts from SLURM: one job with a node for each host, on which Monarch starts a worker."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from monarch.job import SlurmJob

from actors.compat import slurm_worker
from actors.config import LaunchConfig

logger = logging.getLogger(__name__)

ENDED = {"BOOT_FAIL", "DEADLINE", "NODE_FAIL", "OUT_OF_MEMORY"}
"""Final states of a job that Monarch does not know; it would wait on."""
COMMAND_TIMEOUT_S = 120.0
"""Longest wait for a command of SLURM, whose own limit for a controller that is away is shorter by
default.
"""
MAX_FAILURES = 30
"""Failures of squeue one after another, at least 2 s apart, with which a job counts as lost."""

OUTLIVE_A_NODE = ("--no-kill", "--no-requeue", "--export=ALL,SLURM_NO_KILL=set")
"""Options of sbatch with which a failed node ends neither the job nor its step (`srun` reads the
variable). Otherwise SLURM would also queue the job again, whose new workers nobody would use."""
SRUN = ("srun", "--cpu-bind=none", "--kill-on-bad-exit=0", "--wait=0")
"""Start of the workers, whatever a cluster's defaults are: a worker starts the processes of its
host, so it is not bound to one core, and its end does not end the others."""


class NodesOfRun(SlurmJob):
    """Monarch's job, submitted, read and cancelled by plain uses of SLURM's commands."""

    _slurm_job_id: str | None
    _seen = ""
    _num_failures = 0

    def _submit_slurm_job(self, num_nodes: int, client_script: str | None = None) -> str:
        """Submit the job and return its number.

        Options are on the command line: the directives that Monarch writes into the script give way
        to SBATCH_ variables of the user's environment, and break at spaces.
        """
        self._ensure_service_proc_ids(num_nodes)
        folder = Path(self._log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{self._job_name}_{os.getpid()}"
        logs = [f"--{kind}={folder}/slurm_%j_{name}.{kind[:3]}" for kind in ("output", "error")]
        own = [
            f"--job-name={name}",
            f"--nodes={num_nodes}",
            "--ntasks-per-node=1",
            *logs,
            "--parsable",
        ]
        identities, code = slurm_worker(self)
        script = (
            "#!/bin/bash\nexport "
            f"{identities}\n{shlex.join([*SRUN, self._python_exe, '-c', code])}\n"
        )
        return (
            _output(["sbatch", *self._slurm_args, *own], stdin=script).split()[-1].partition(";")[0]
        )

    def _get_job_info_json(self, job_id: str) -> dict[str, Any] | None:
        """Return the job's state and nodes in Monarch's form.

        Monarch 0.7 reads `squeue --json`: before SLURM 24.05 the nodes have another form there, and
        22.05 answers with all jobs of the cluster, whichever was asked for.
        """
        query = ["squeue", "--job", job_id, "--states=all", "--noheader", "--format=%T|%N|%r"]
        try:
            answer = _output(query).strip()
            if not answer:
                return None
            state, node_list, reason = answer.split("|", maxsplit=2)
            nodes = (
                _output(["scontrol", "show", "hostnames", node_list]).split() if node_list else []
            )
        except RuntimeError as error:
            logger.warning("SLURM job %s: %s", job_id, error)
            self._num_failures += 1
            return {"job_state": ["UNKNOWN"]} if self._num_failures < MAX_FAILURES else None
        self._num_failures = 0
        if state == "PENDING" and reason not in {"None", self._seen}:
            self._seen = reason
            logger.info("SLURM job %s is in the queue: %s", job_id, reason)
        states = [state, "FAILED"] if state in ENDED else [state]
        allocation = [{"name": name} for name in nodes]
        return {"job_state": states, "job_resources": {"nodes": {"allocation": allocation}}}

    def _kill(self) -> None:
        """Cancel the job; after an error, which Monarch's method only logs, the guard tries
        again.
        """
        if self._slurm_job_id is not None:
            _output(["scancel", self._slurm_job_id])
            self._slurm_job_id = None


def _output(command: Sequence[str], *, stdin: str | None = None) -> str:
    """Return what a command of SLURM writes; raises RuntimeError with its message if it fails or
    does not end.

    The command does not see the variables of a job that this process may be in, nor filters of
    squeue.
    """
    env = {
        name: value
        for name, value in os.environ.items()
        if name == "SLURM_CONF" or not name.startswith(("SLURM_", "SQUEUE_"))
    }
    try:
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, env=env, timeout=COMMAND_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{command[0]} did not end within {COMMAND_TIMEOUT_S:g} s") from None
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr.strip()}")
    return done.stdout


def make_job(
    launch: LaunchConfig, groups: Mapping[str, int], *, gpus_of: Mapping[str, int]
) -> NodesOfRun:
    """Return the job of these groups of hosts; its nodes are alike, so each has the most devices
    that any needs.
    """
    slurm = launch.slurm
    asked = {
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "time": slurm.time_limit,
        "gpus-per-node": max(gpus_of.values()) or None,
        "cpus-per-task": slurm.cpus_per_host,
        "mem": slurm.memory_per_host,
    }
    options = [f"--{name}={value}" for name, value in asked.items() if value is not None]
    exclusive = ["--exclusive"] if slurm.exclusive else []
    further = [word for arg in slurm.sbatch_args for word in shlex.split(arg)]
    return NodesOfRun(
        dict(groups),
        python_exe=launch.python or sys.executable,
        slurm_args=(*OUTLIVE_A_NODE, *options, *exclusive, *further),
        monarch_port=slurm.port,
        job_name=launch.job_name,
        log_dir=str(Path(slurm.log_folder).expanduser().absolute()),
        job_start_timeout=max(1, round(launch.start_timeout_s)),
    )
