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

from actors.config import SlurmConfig
from actors.launch.compat import SlurmHooks, describe_slurm_worker

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


class NodesOfRun(SlurmHooks, SlurmJob):
    """Monarch's job, submitted, read and cancelled by plain uses of SLURM's commands."""

    def __init__(
        self,
        config: SlurmConfig,
        groups: Mapping[str, int],
        *,
        job_name: str,
        python: str | None,
        timeout_s: float,
        options: Sequence[str],
    ) -> None:
        """Take the options of sbatch, which come before those of every job.

        `python` is the path of the hosts' Python; None: that of this process.
        """
        self.python = python or sys.executable
        self.log_folder = Path(config.log_folder).expanduser().absolute()
        self.name = job_name
        self.options = tuple(options)
        self._reason = ""
        """Reason for which the job was in the queue when it was last read."""
        self._num_failures = 0
        super().__init__(
            dict(groups),
            python_exe=self.python,
            monarch_port=config.port,
            job_name=self.name,
            job_start_timeout=max(1, round(timeout_s)),
        )

    def submit(self, num_nodes: int) -> str:
        """Submit the job and return its number.

        Options are on the command line: the directives that Monarch writes into the script give way
        to SBATCH_ variables of the user's environment, and break at spaces.
        """
        self.log_folder.mkdir(parents=True, exist_ok=True)
        name = f"{self.name}_{os.getpid()}"
        options = [
            *self.options,
            f"--job-name={name}",
            f"--nodes={num_nodes}",
            "--ntasks-per-node=1",
            f"--output={self.log_folder}/slurm_%j_{name}.out",
            f"--error={self.log_folder}/slurm_%j_{name}.err",
            "--parsable",
        ]

        # A script of relay's own: srun must start the workers without a cluster's defaults.
        identities, code = describe_slurm_worker(self)
        command = shlex.join([*SRUN, self.python, "-c", code])
        script = f"#!/bin/bash\nexport {identities}\n{command}\n"
        answer = _run_command(["sbatch", *options], stdin=script)
        # The number, which sbatch follows by ";" and the cluster where there are several.
        return answer.split()[-1].partition(";")[0]

    def read_job(self, job_id: str) -> dict[str, Any] | None:
        """Return the job's state and nodes in Monarch's form.

        Monarch 0.7 reads `squeue --json`: before SLURM 24.05 the nodes have another form there, and
        22.05 answers with all jobs of the cluster, whichever was asked for.
        """
        query = ["squeue", "--job", job_id, "--states=all", "--noheader", "--format=%T|%N|%r"]
        try:
            answer = _run_command(query).strip()
            if not answer:
                return None
            state, node_list, reason = answer.split("|", maxsplit=2)
            nodes = []
            if node_list:
                nodes = _run_command(["scontrol", "show", "hostnames", node_list]).split()
        except RuntimeError as error:
            # SLURM's controller may be restarting: only many failures in a row lose the job.
            logger.warning("SLURM job %s: %s", job_id, error)
            self._num_failures += 1
            return {"job_state": ["UNKNOWN"]} if self._num_failures < MAX_FAILURES else None
        self._num_failures = 0

        if state == "PENDING" and reason not in {"None", self._reason}:
            self._reason = reason
            logger.info("SLURM job %s is in the queue: %s", job_id, reason)
        states = [state, "FAILED"] if state in ENDED else [state]
        allocation = [{"name": name} for name in nodes]
        return {"job_state": states, "job_resources": {"nodes": {"allocation": allocation}}}

    def cancel(self, job_id: str) -> None:
        """Cancel the job; raise RuntimeError with SLURM's message if that fails."""
        _run_command(["scancel", job_id])


def _run_command(command: Sequence[str], *, stdin: str | None = None) -> str:
    """Return the output of a command of SLURM.

    Raises:
        RuntimeError: the command has failed, with its message, or does not end.
    """
    # Without the variables of a job that this process may be in, and without filters of squeue.
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
    config: SlurmConfig,
    groups: Mapping[str, int],
    *,
    gpus_of: Mapping[str, int],
    job_name: str,
    python: str | None,
    timeout_s: float,
) -> NodesOfRun:
    """Return the job of these groups of hosts, which is not yet applied.

    Args:
        groups: number of hosts of each group.
        gpus_of: number of devices of each host of a group.
        timeout_s: longest wait for the hosts.
    """
    values = {
        "partition": config.partition,
        "account": config.account,
        "qos": config.qos,
        "time": config.time_limit,
        # The nodes of a job are alike, so each has the most devices that any group needs.
        "gpus-per-node": max(gpus_of.values()) or None,
        "cpus-per-task": config.cpus_per_host,
        "mem": config.memory_per_host,
    }
    options = list(OUTLIVE_A_NODE)
    for name, value in values.items():
        if value is not None:
            options.append(f"--{name}={value}")
    if config.exclusive:
        options.append("--exclusive")

    # An argument may hold several words, as "-L name".
    for arg in config.sbatch_args:
        options += shlex.split(arg)
    return NodesOfRun(
        config,
        groups,
        job_name=job_name,
        python=python,
        timeout_s=timeout_s,
        options=options,
    )
