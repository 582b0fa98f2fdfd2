"""Linux namespaces and capabilities of this process, on which `actors.launch.isolation` is built.

Network namespaces belong to a thread, user namespaces to a whole process. Making a network
namespace takes the capability CAP_SYS_ADMIN. A process without privileges gets it by a user
namespace of its own, which it can enter only while it has one thread.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Any

from rl.utils.compat import exit_at_once
from rl.utils.errors import list_causes

NEW_USER, NEW_NET = 0x1000_0000, 0x4000_0000
"""CLONE_NEWUSER and CLONE_NEWNET of <linux/sched.h>."""
NET_ADMIN, SYS_ADMIN = 1 << 12, 1 << 21
"""Capabilities of <linux/capability.h>, as bits."""
CAPABILITY_VERSION = 0x2008_0522
SET_FLAGS, IS_UP = 0x8914, 0x1
"""SIOCSIFFLAGS and IFF_UP of <linux/if.h>."""
NETWORK = "RELAY_NETWORK"
"""Environment variable of actor processes: the namespace in which the controller's sockets are."""
NETWORK_ERRORS = {
    "APIConnectionError", "ClientConnectorError", "ConnectError", "ConnectTimeout",
    "ConnectionError", "ConnectionRefusedError", "URLError", "gaierror",
}  # fmt: skip
"""Names of the errors, of Python and of clients, that mean that a server cannot be reached. Not a
BrokenPipeError, which a process of the reward's own may cause."""


@functools.cache
def load_libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


_entered = False


def enter_user_namespace() -> None:
    """Make this process able to make a network namespace, if it is not and the system permits it.

    Users, groups and files keep their owners; every other user is shown as nobody, and programs
    that change the user, such as sudo, do not work in this process and its children. Call it first
    of all in a program: it does nothing in a process that has a second thread.
    """
    if sys.platform != "linux" or os.geteuid() == 0 or is_network_allowed():
        return
    # The kernel refuses a process with several threads.
    if len(os.listdir("/proc/self/task")) > 1 or not _is_permitted():
        return
    _enter()
    global _entered
    _entered = True


def _enter() -> None:
    user, group = os.geteuid(), os.getegid()
    _check(load_libc().unshare(NEW_USER))
    # Otherwise the kernel refuses the map of groups.
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _set_capabilities(NET_ADMIN | SYS_ADMIN)


def _is_permitted() -> bool:
    """Try in a child whether the system permits both namespaces."""
    # Where it permits only the first, this process would be stuck in the user namespace.
    child = os.fork()
    if child == 0:
        try:
            _enter()
            make_network()
            exit_at_once(0)
        except BaseException:  # noqa: BLE001  (nothing of the parent's program runs in the child)
            exit_at_once(1)
    return os.waitpid(child, 0)[1] == 0


def is_network_allowed() -> bool:
    """Return whether this thread has CAP_SYS_ADMIN."""
    lines = Path("/proc/thread-self/status").read_text().splitlines()
    (effective,) = (line.split()[1] for line in lines if line.startswith("CapEff:"))
    return bool(int(effective, 16) & SYS_ADMIN)


def drop_capabilities() -> None:
    """Give up what `enter_user_namespace` has given to this thread; otherwise do nothing."""
    if _entered:
        _set_capabilities(0)


def _set_capabilities(bits: int) -> None:
    header = struct.pack("Ii", CAPABILITY_VERSION, 0)
    _check(load_libc().capset(header, struct.pack("6I", bits, bits, 0, 0, 0, 0)))


def make_network() -> int:
    """Put this thread into a new network namespace that has only a loopback device.

    Returns its descriptor.

    Raises:
        OSError: it is not permitted.
    """
    _check(load_libc().unshare(NEW_NET))
    _start_loopback()
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _start_loopback() -> None:
    # A new namespace has the device, but it is down. Any socket takes the request.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sh14x", b"lo", IS_UP))


def describe_missing_network(error: BaseException) -> str:
    """Return what to do if an error may come from the network that actors do not have, or ""."""
    if NETWORK not in os.environ:
        return ""
    for cause in list_causes(error):
        is_unreachable = getattr(cause, "errno", None) == errno.ENETUNREACH
        is_known = type(cause).__name__ in NETWORK_ERRORS
        if is_known or is_unreachable:
            return (
                "; rewards are computed without a network: a function that needs one says so with "
                "`needs_network = True` (docs/own_data.md)"
            )
    return ""


def get_network(thread: int | str) -> str:
    """Return the identity of the network namespace of a thread of this process."""
    return os.readlink(f"/proc/self/task/{thread}/ns/net")


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
