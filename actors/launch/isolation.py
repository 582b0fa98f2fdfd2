"""Isolation of the actors: a network of their own, and no secrets in their environment.

Monarch's processes find each other by abstract unix sockets and TCP ports that ask nobody who they
are: a local user who reaches one runs code as this user. Such sockets belong to the network
namespace of the thread that opens them. So the threads of Monarch, and with them the actors, move
to a namespace of their own, while Python's threads stay where they are: downloads, metrics sinks
and servers of the controller use the network as before.

    line = isolate(isolate_network=None)   # once in a process, before Monarch is used
    host = run_inside(this_host)           # a call that opens sockets in its thread

The code that an actor runs can read its environment, and so can who gets into its process. The
controller keeps its own: it downloads models and writes metrics.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import psutil

from actors.launch.compat import is_client_started, list_monarch_threads
from rl.utils import secrets
from rl.utils.errors import RunError
from rl.utils.namespaces import (
    NETWORK,
    NEW_NET,
    drop_capabilities,
    get_network,
    is_network_allowed,
    load_libc,
    make_network,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOVE = signal.SIGRTMIN + 7
"""Signal on which a thread of Monarch enters the namespace."""
MOVE_LIMIT_S = 30.0
MAX_NAMED = 3
DOCS = "docs/running.md, Who can reach the actors"

_inside: ThreadPoolExecutor | None = None
"""The thread of this process's Python code in the namespace; None without a namespace."""


def run_inside(function: Callable[[], T]) -> T:
    """Call a function in the namespace, if there is one, so that Monarch's sockets are there."""
    return function() if _inside is None else _inside.submit(function).result()


def get_network_env() -> dict[str, str]:
    """Return the variables with which libraries use the namespace's only network device."""
    if _inside is None:
        return {}
    # They replace the user's, who may have named a device of the machine.
    devices = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    network = _inside.submit(os.readlink, "/proc/thread-self/ns/net").result()
    return {**devices, "VLLM_HOST_IP": "127.0.0.1", NETWORK: network}


def check_network() -> None:
    """End this process, an actor's, if it is in another network than the controller's sockets.

    It would wait for ever for a controller that it cannot reach.
    """
    expected = os.environ.get(NETWORK)
    # Only where there are namespaces, and with them these links, is one expected.
    if expected is not None and (found := os.readlink("/proc/self/ns/net")) != expected:
        raise SystemExit(f"the process is in the network {found}, but must be in {expected}")


def isolate(
    *, isolate_network: bool | None, cluster: str | None = None, needs_network: str | None = None
) -> str:
    """Make a network namespace for the actors if there can be one; return a line that says so.

    Monarch must not have been used by this process, unless it is in a namespace already.

    Args:
        isolate_network: `launch.isolate_network`; None: a namespace where there can be one.
        cluster: `launch.hosts` if these are other machines.
        needs_network: name of what needs the network in an actor, if anything does.

    Raises:
        ValueError: `launch.isolate_network` is True and there can be no namespace, or this
            process's actors have one and there is a `cluster`.
        RunError: a thread of Monarch did not move; sockets could be open to others.
    """
    if _inside is not None:
        if cluster is not None:
            raise ValueError(
                f"launch.hosts={cluster!r}: an earlier run of this process has put Monarch "
                "into a network namespace, which other hosts cannot reach: start a new process"
            )
        return _describe(None)

    against = _find_obstacle(
        isolate_network=isolate_network, cluster=cluster, needs_network=needs_network
    )
    is_possible = against is None
    if is_possible:
        against = _move_monarch()
    drop_capabilities()  # They were for this alone.
    if against is None:
        return _describe(None)
    if isolate_network:
        raise ValueError(
            f"launch.isolate_network=True: {against}; None starts the run without it ({DOCS})"
        )

    # Only where the system refused it: who has chosen to share the network needs no warning.
    others = _list_other_users() if is_possible else ()
    if others:
        named = ", ".join(others[:MAX_NAMED]) + (" ..." if len(others) > MAX_NAMED else "")
        logger.warning(
            "any user of this machine can run code as you through the actors' sockets while this "
            "run lasts, since %s; there are processes of other users: %s (%s)",
            against,
            named,
            DOCS,
        )
    return _describe(against)


def isolate_early() -> bool:
    """Isolate the actors before the config is known; return False if that cannot be.

    Then nothing has changed, and `isolate` finds the same obstacle.
    """
    if _inside is not None or is_client_started() or _move_monarch() is not None:
        return False
    drop_capabilities()
    return True


def _describe(against: str | None) -> str:
    if against is None:
        return "the actors have a network of their own (launch.isolate_network)"
    return f"the actors use this machine's network: {against}"


def _find_obstacle(
    *, isolate_network: bool | None, cluster: str | None, needs_network: str | None
) -> str | None:
    if cluster is not None:
        return f"launch.hosts={cluster!r}; who reaches their ports can run code as you ({DOCS})"
    if isolate_network is False:
        return "launch.isolate_network=False"
    if needs_network is not None:
        return f"{needs_network} needs it; reward.num_procs=0 keeps both"
    if is_client_started():
        return "this process has used Monarch before"
    return None


def _move_monarch() -> str | None:
    """Make the namespace and move Monarch's threads to it; return the reason if that fails."""
    global _inside
    if not Path("/proc/thread-self/ns/net").exists():
        return "this system has no network namespaces"
    if not is_network_allowed():
        return "this process may not make a network namespace"
    # The thread keeps the namespace alive, and runs the calls that open Monarch's sockets.
    thread = ThreadPoolExecutor(1, thread_name_prefix="monarch-network")
    try:
        descriptor = thread.submit(make_network).result()
    except OSError as error:  # Also for a limit of 0, or a kernel without namespaces.
        thread.shutdown()
        return f"the system does not permit a network namespace ({error.strerror})"
    thread.submit(_move, list_monarch_threads(), descriptor=descriptor).result()
    _inside = thread
    return None


def _move(threads: Sequence[int], *, descriptor: int) -> None:
    """Have the given threads follow this one into its namespace; close its descriptor.

    A thread can only move itself (setns), and no code of relay runs in Monarch's threads: so each
    gets a signal, whose handler moves it. The threads have nothing to do before Monarch is used, so
    that a handler in Python interrupts nothing.
    """
    here = os.readlink("/proc/thread-self/ns/net")

    def follow(_number: int) -> None:
        load_libc().setns(descriptor, NEW_NET)
        drop_capabilities()

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(follow)
    load_libc().signal(int(MOVE), handler)
    try:
        # tgkill, as a signal to the process would be handled by any of its threads.
        for thread in threads:
            load_libc().tgkill(os.getpid(), thread, int(MOVE))
        deadline = time.monotonic() + MOVE_LIMIT_S
        while any(get_network(thread) != here for thread in threads):
            if time.monotonic() > deadline:
                raise RunError(
                    "a thread of Monarch did not enter the network namespace within "
                    f"{MOVE_LIMIT_S:g} s: launch.isolate_network=False starts the run without one"
                )
            time.sleep(0.001)
    finally:
        load_libc().signal(int(MOVE), ctypes.c_void_p(signal.SIG_IGN))
        os.close(descriptor)
    drop_capabilities()


def _list_other_users() -> list[str]:
    """Return the names of users but root who have processes on this machine."""
    names = set()
    for process in psutil.process_iter(["uids", "username"]):
        uids = process.info["uids"]
        if uids is not None and uids.real not in (0, os.getuid()):
            names.add(process.info["username"] or str(uids.real))
    return sorted(names)


def find_secrets(keep: Collection[str] = ()) -> list[str]:
    """Return the names of this process's environment that hold a secret, by name or by value."""
    return secrets.find_secrets(os.environ, keep=keep)


def hide_secrets(keep: Collection[str] = ()) -> dict[str, str]:
    """Return empty values for the secrets in the environment of a process to be started.

    Monarch lets a process inherit the environment and can only replace values.
    `forget_empty_secrets` does the rest.
    """
    return dict.fromkeys(find_secrets(keep), "")


def forget_empty_secrets() -> None:
    """Remove the names that `hide_secrets` has left empty."""
    # An empty key is not the same as none: libraries would send it.
    for name in find_secrets():
        if not os.environ[name]:
            del os.environ[name]
