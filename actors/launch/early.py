"""A process for the generator that imports vLLM while the config is still read.

Reading and checking a config takes seconds, and importing vLLM takes longer than anything else of a
start. So a program that trains (`rl.train`) starts a process for the generator before it knows the
config, and the launcher takes it for a role whose process would be just the same:

    with start_early(argv):          # around the whole program
        suit_network(...)            # the config is known: does the process's network suit it?
        take_early(role, env=...)    # in `Launcher.spawn_role`

A process that nobody has taken ends with the block. Only machines without GPUs start one: a GPU's
devices and kernels are chosen before vLLM is imported, and its start takes longer for other
reasons.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from actors.launch.cleanup import find_processes_of_role, guard_temporary_files
from rl.observability.logs import setup_logging
from rl.utils.processes import disable_collections, kill

if TYPE_CHECKING:
    from actors.launch.member import RoleProcesses  # imports Monarch

logger = logging.getLogger(__name__)

ROLE = "generator"
ENGINE = ("actors.generator", "actors.vllm.core")
"""Modules of a generator's process; the second one imports vLLM."""
VARIABLE = "RELAY_EARLY_START"
"""Environment variable; with 0 nothing starts before the config is known."""
OTHER_PROGRAMS = re.compile(r"(^| )(-h|--help\S*|--explain|--launch\.\S*)( |=|$)")
"""Options of programs that start no actors, or start them elsewhere or otherwise."""
START_LIMIT_S = 600.0
"""Time for the process to import vLLM from a cold disk; once it is taken, `timeouts.start_s`."""
BEGIN_LIMIT_S = 3.0
"""Longest wait for the process to begin its imports."""
BEGUN = "early"
"""File by which the process shows that it has begun."""
GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")
MAY_DIFFER = {"OMP_NUM_THREADS", "TMPDIR"}
"""Variables that do not decide whether a role takes the process: the thread that computes sets its
number of threads itself (`use_threads`), and the folder of temporary files is the same."""


class NetworkSettings(Protocol):
    """The part of `LaunchConfig` that decides on the actors' network."""

    isolate_network: bool | None

    @property
    def on_cluster(self) -> bool: ...


@dataclass(kw_only=True, slots=True, eq=False)
class _Early:
    processes: RoleProcesses
    env: Mapping[str, str]
    """Variables on top of this process's."""
    is_lost: bool = False


_early: _Early | None = None
"""The process that was started and not taken yet."""
_began = False


@contextlib.contextmanager
def start_early(argv: Sequence[str]) -> Iterator[None]:
    """Have a process import vLLM during the block, until a role takes it."""
    global _early, _began
    if _is_of_use(argv):
        with disable_collections():
            _early = _start()
        _began = _early is not None
    try:
        yield
    finally:
        end_early()


def _is_of_use(argv: Sequence[str]) -> bool:
    if os.environ.get(VARIABLE) == "0" or OTHER_PROGRAMS.search(" ".join(argv)):
        return False
    # On a single core the process would only delay this one.
    has_cores = sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1
    return has_cores and not any(map(os.path.exists, GPU_DEVICES))


def _start() -> _Early | None:
    """Start the process; return None if it could not have a network of its own."""
    # Monarch's sockets are there from its first use on; later uses get the same folder.
    with guard_temporary_files():
        from monarch.actor import this_host

        from actors.launch.compat import configure_monarch, hide_client_start
        from actors.launch.isolation import get_network_env, isolate_early, run_inside
        from actors.launch.member import allow_start, process_env, spawn_processes
        from actors.vllm.environment import ENVIRONMENT
        from rl.observability.logs import QUIET_ENVIRONMENT

        if not isolate_early():
            return None
        configure_monarch(_note_fault)
        allow_start(START_LIMIT_S)
        env = process_env(role=ROLE, threads=1) | get_network_env()
        # Monarch reads this process's environment when it starts the process, after this block.
        env |= QUIET_ENVIRONMENT | ENVIRONMENT | {"TMPDIR": os.environ["TMPDIR"]}
        with hide_client_start():
            host = run_inside(this_host)
        processes = spawn_processes(host, role=ROLE, env=env, bootstrap=import_engine)
        _wait_until_it_imports(Path(os.environ["TMPDIR"]))
        return _Early(processes=processes, env=env)


def _note_fault(failure: Any) -> None:
    if _early is not None:
        _early.is_lost = True
    logger.debug("the process that was started early: %s", failure.report())


def _wait_until_it_imports(folder: Path) -> None:
    """Wait for the process to begin, as this process will not answer it while it imports torch."""
    deadline_s = time.monotonic() + BEGIN_LIMIT_S
    while not (folder / BEGUN).exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)


def import_engine() -> None:
    """Import what a generator needs; called in its process before there are actors."""
    Path(os.environ["TMPDIR"], BEGUN).touch()
    # Only errors are shown: the run whose log gets the records has no folder yet.
    setup_logging(ROLE, console_level=logging.ERROR)
    # An import that fails is tried again by the role, and fails there with its message.
    with disable_collections(), contextlib.suppress(Exception):
        for module in ENGINE:
            import_module(module)


def take_early(role: str, *, env: Mapping[str, str], is_alone: bool) -> RoleProcesses | None:
    """Return the process if a role would start just such a one; end it if no role will.

    Args:
        env: variables of the role's processes on top of the controller's.
        is_alone: whether the role has one process, on this machine.
    """
    global _early
    if _early is None or not role.startswith(ROLE):  # generator_1: there are several
        return None
    differences = {name for name, _ in env.items() ^ _early.env.items()}
    if not is_alone or role != ROLE or differences - MAY_DIFFER or _early.is_lost:
        end_early()
        return None
    processes, _early = _early.processes, None
    return processes


def has_started_early() -> bool:
    """Return whether this program has started a process early, taken or not."""
    return _began


def suit_network(launch: NetworkSettings, *, needs_network: str | None) -> None:
    """Start this program anew, without an early process, if its actors need the machine's network.

    Monarch's sockets are in the namespace that the early process was started in, and stay there.

    Args:
        needs_network: what needs it in an actor, if anything does.
    """
    own_network = not launch.on_cluster and launch.isolate_network is not False
    if not _began or (own_network and needs_network is None):
        return
    end_early()
    sys.stdout.flush()
    sys.stderr.flush()
    os.environ[VARIABLE] = "0"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def end_early() -> None:
    """End the process if nobody has taken it."""
    global _early
    if _early is None:
        return
    # It has not answered yet, so that only its environment tells which one it is.
    for process in find_processes_of_role(ROLE, parents=[os.getpid()]):
        kill(process)
    _early = None
