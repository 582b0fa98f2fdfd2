"""Uses of Monarch 0.7 beyond its documented interface, each with its reason."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shlex
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import monarch.actor

# A call to a dead process raises SupervisionError; no public module exports it.
from monarch._rust_bindings.monarch_hyperactor.supervision import (
    SupervisionError as SupervisionError,
)
from monarch.actor import MeshFailure

from rl.utils.errors import RunError

CLIENT_EXIT_S = 2.0
"""Time for Monarch's client to end when the process exits; a busy machine takes more than a second.
"""
NAMED_LIMIT_S = 30.0
"""Longest wait for a thread to run for the first time."""
NAMED_NS, NAMED_TICKS = 10**6, 2
"""Processor time, in ns and in ticks of the kernel, after which a thread has its name."""


def configure_monarch(on_fault: Callable[[MeshFailure], None]) -> None:
    """Keep Monarch from interrupting the controller when an actor dies, and from editing log
    records.

    Monarch's default hook ends the main thread by KeyboardInterrupt. The caller that waits for the
    dead actor gets an error anyway, and every wait has a deadline, so the controller can decide.
    """
    monarch.actor.unhandled_fault_hook = on_fault
    # The lines of relay's logs name role and rank themselves.
    monarch.actor.config.prefix_python_logs_with_actor = False


def run_actor_process() -> None:
    """Run this process's actors until they end, by SystemExit.

    The only public entry is Monarch's command, before which relay could set up nothing.
    """
    from monarch._src.actor.bootstrap_main import invoke_main

    monarch.actor.config.prefix_python_logs_with_actor = False
    invoke_main()


def get_endpoint_name(endpoint: Any) -> str:
    """Return the name of an endpoint that was taken from an actor's class."""
    name: str = endpoint._method.__name__
    return name


def is_client_started() -> bool:
    """Return whether this process has used Monarch, whose sockets are open from then on."""
    from monarch._src.actor.actor_mesh import _client_context

    return _client_context.try_get() is not None


def list_monarch_threads(tasks: Path = Path("/proc/self/task")) -> list[int]:
    """Return the threads that Monarch's runtime has started in this process, at its import.

    Args:
        tasks: folder in which the kernel shows this process's threads.

    Raises:
        RunError: a thread has not run for `NAMED_LIMIT_S`, so that nobody knows whose it is.
    """
    # A thread names itself when it first runs, which on a busy machine may be after the import: in
    # the meantime it has the name of the thread that started it.
    deadline_s = time.monotonic() + NAMED_LIMIT_S
    while not all(map(_has_run, tasks.iterdir())):
        if time.monotonic() > deadline_s:
            raise RunError(
                f"a thread of this process has not begun to run within {NAMED_LIMIT_S:g} s: the "
                "machine is too busy to start a run"
            )
        time.sleep(0.001)

    def is_monarchs(task: Path) -> bool:
        # By the kernel's name for it, as Monarch does not list its threads.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            return (task / "comm").read_text().startswith("monarch-pytokio")
        return False

    return [int(task.name) for task in filter(is_monarchs, tasks.iterdir())]


def _has_run(task: Path) -> bool:
    """Return whether a thread has waited for something, or has computed long enough to be named."""
    try:
        # The name, in brackets, may have any characters.
        state, *numbers = (task / "stat").read_text().rpartition(")")[2].split()
        # It may wait for a page of memory (D) before its first instruction.
        if state not in ("R", "D"):
            return True
        with contextlib.suppress(FileNotFoundError):  # of kernels without these figures
            return int((task / "schedstat").read_text().split()[0]) >= NAMED_NS
        user, system = numbers[10:12]
        return int(user) + int(system) >= NAMED_TICKS
    except (FileNotFoundError, ProcessLookupError):
        return True  # it has ended


def hide_job_logs() -> None:
    """Drop log records of Monarch's jobs below a warning."""
    # After each import of a job's module, as the module sets a level of its own.
    for name in ("job", "slurm", "kubernetes"):
        logging.getLogger(f"monarch._src.job.{name}").setLevel(logging.WARNING)


@contextlib.contextmanager
def hide_client_start() -> Iterator[None]:
    """Drop the line that Monarch's client writes to stderr when it starts.

    Have `_end_client` called at exit, too.
    """
    sys.stderr.flush()
    # The client is Rust and writes to the descriptor, so replacing `sys.stderr` has no effect.
    saved = os.dup(2)
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(sink)
        # Registered anew each time: handlers run in reverse order, and this must precede Monarch's.
        atexit.unregister(_end_client)
        atexit.register(_end_client)


def _end_client() -> None:
    """End Monarch's client before Monarch's own handler does.

    That handler prints a traceback if the end takes more than a second.
    """
    with contextlib.suppress(TimeoutError):
        monarch.actor.shutdown_context(host_timeout=0.3).get(timeout=CLIENT_EXIT_S)


def prepare_client_gateway(job: Any) -> None:
    """Wait until the job's hosts can be reached; `job.state` would do it in the calling thread."""
    job._prepare_client_gateway()


class SlurmHooks(ABC):
    """Mixin for Monarch's SlurmJob that replaces its uses of SLURM's commands.

    Monarch has no public hook for them; `actors.launch.slurm` says how each of its own fails.
    """

    _slurm_job_id: str | None

    @abstractmethod
    def submit(self, num_nodes: int) -> str:
        """Submit the job and return its number."""

    @abstractmethod
    def read_job(self, job_id: str) -> dict[str, Any] | None:
        """Return the job's state and nodes in the form of `squeue --json`; None if it is lost."""

    @abstractmethod
    def cancel(self, job_id: str) -> None:
        """Cancel the job, or raise RuntimeError."""

    def _submit_slurm_job(self, num_nodes: int, client_script: str | None = None) -> str:
        job: Any = self
        job._ensure_service_proc_ids(num_nodes)
        return self.submit(num_nodes)

    def _get_job_info_json(self, job_id: str) -> dict[str, Any] | None:
        return self.read_job(job_id)

    def _kill(self) -> None:
        if self._slurm_job_id is not None:
            self.cancel(self._slurm_job_id)
            # After an error, which Monarch's method only logs, the job is not forgotten.
            self._slurm_job_id = None


def describe_slurm_worker(job: Any) -> tuple[str, str]:
    """Return a shell assignment of a SlurmJob's identities, and the Python code of a worker.

    Monarch only writes them into a script of its own, whose options are not safe
    (`actors.launch.slurm`).
    """
    from monarch._src.job._slurm_batch import _worker_bootstrap
    from monarch._src.job.service_identity import SERVICE_PROC_IDS_ENV, serialize_service_proc_ids

    identities = shlex.quote(serialize_service_proc_ids(job._service_proc_ids))
    return f"{SERVICE_PROC_IDS_ENV}={identities}", _worker_bootstrap(job._port, None)


class KubernetesHooks(ABC):
    """Mixin for Monarch's KubernetesJob: `extend_pod` may change the template of all pods.

    Monarch's public `ImageSpec` has neither variables of the environment nor claims.
    """

    @abstractmethod
    def extend_pod(self, template: Any) -> None:
        """Change the V1PodTemplateSpec in place."""

    def _build_worker_pod_template(self, *args: Any) -> Any:
        parent: Any = super()  # A static method there.
        template = parent._build_worker_pod_template(*args)
        self.extend_pod(template)
        return template


def list_simulated_hosts(job: Any, group: str, num_hosts: int) -> list[int]:
    """Return the pids of the processes by which a ProcessJob simulates a group's hosts.

    Monarch reports the death of such a host after 30 s at the earliest; its pid shows it at once.
    """
    return [job._host_to_pid[f"{group}_{number}"].pid for number in range(num_hosts)]
