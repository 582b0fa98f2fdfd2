"""Uses of Monarch 0.7 beyond its documented interface, each with its reason."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import monarch.actor

# A call to a dead process raises SupervisionError; no public module exports it.
from monarch._rust_bindings.monarch_hyperactor.supervision import (
    SupervisionError as SupervisionError,
)
from monarch.actor import MeshFailure

CLIENT_EXIT_S = 2.0
"""Time for Monarch's client to end when the process exits; a busy machine takes more than a second.
"""


def settle_monarch(on_fault: Callable[[MeshFailure], None]) -> None:
    """Keep Monarch from interrupting the controller when an actor dies, and from editing log
    records.

    Monarch's default hook ends the main thread by KeyboardInterrupt. The caller that waits for the
    dead actor gets an error anyway, and every wait has a deadline, so the controller can decide.
    """
    monarch.actor.unhandled_fault_hook = on_fault
    monarch.actor.config.prefix_python_logs_with_actor = False  # our lines name role and rank


def run_actor_process() -> None:
    """Run this process's actors until they end, by SystemExit; there is no public entry but
    Monarch's command.
    """
    from monarch._src.actor.bootstrap_main import invoke_main

    monarch.actor.config.prefix_python_logs_with_actor = False  # our lines name role and rank
    invoke_main()


def is_client_started() -> bool:
    """Return whether this process has used Monarch, whose sockets are open from then on."""
    from monarch._src.actor.actor_mesh import _client_context

    return _client_context.try_get() is not None


def monarch_threads() -> list[int]:
    """Return the threads that Monarch's runtime has started in this process, at its import."""
    tasks = Path("/proc/self/task").iterdir()
    return [
        int(task.name)
        for task in tasks
        if (task / "comm").read_text().startswith("monarch-pytokio")
    ]


def quiet_jobs() -> None:
    """Drop log records of Monarch's jobs below a warning; their modules set a level when
    imported.
    """
    for name in ("job", "slurm", "kubernetes"):
        logging.getLogger(f"monarch._src.job.{name}").setLevel(logging.WARNING)


@contextlib.contextmanager
def quiet_client_start() -> Iterator[None]:
    """Drop the line that Monarch's client writes to stderr when it starts, and have `_end_client`
    called at exit.
    """
    sys.stderr.flush()
    saved = os.dup(2)
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(sink)
        atexit.unregister(_end_client)
        atexit.register(_end_client)


def _end_client() -> None:
    """End Monarch's client before Monarch's own handler does, which prints a traceback where that
    takes 1 s.
    """
    with contextlib.suppress(TimeoutError):
        monarch.actor.shutdown_context(host_timeout=0.3).get(timeout=CLIENT_EXIT_S)


def prepare_client_gateway(job: Any) -> None:
    """Wait until the job's hosts can be reached; `job.state` would do it in the calling thread."""
    job._prepare_client_gateway()


def slurm_worker(job: Any) -> tuple[str, str]:
    """Return a shell assignment of the identities of a SlurmJob's workers, and the Python code of a
    worker.

    Monarch only writes them into a script of its own, whose options are not safe
    (`actors.slurm_job`).
    """
    from monarch._src.job._slurm_batch import _worker_bootstrap
    from monarch._src.job.service_identity import SERVICE_PROC_IDS_ENV, serialize_service_proc_ids

    identities = shlex.quote(serialize_service_proc_ids(job._service_proc_ids))
    return f"{SERVICE_PROC_IDS_ENV}={identities}", _worker_bootstrap(job._port, None)


def simulated_host_pids(job: Any, group: str, num_hosts: int) -> list[int]:
    """Return the pids of the processes by which a ProcessJob simulates a group's hosts.

    Monarch reports the death of such a host after 30 s at the earliest; its pid shows it at once.
    """
    return [job._host_to_pid[f"{group}_{number}"].pid for number in range(num_hosts)]
