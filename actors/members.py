"""What launch puts into every process of a role: an actor that settles its environment."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from monarch.actor import Actor, concurrent_endpoint, current_rank, endpoint

from actors.client import RUN, RUN_VARIABLE
from actors.watching import FAULT_VARIABLE, be_watched
from rl.interpreter import without_collections
from rl.observability.activity import STATE_FOLDER
from rl.observability.logs import setup_logging
from rl.observability.process_state import read_state
from rl.observability.span_file import TimelineConfig
from rl.observability.stacks import ask
from rl.weights.monarch_env import SETTINGS

MEMBER_NAME = "relay_member"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessInfo:
    """One process of a role, as it describes itself."""

    rank: int
    pid: int
    hostname: str


class Member(Actor):
    """Sits in every process of a role and settles its environment."""

    @endpoint
    async def info(self) -> ProcessInfo:
        return ProcessInfo(rank=current_rank().rank, pid=os.getpid(), hostname=socket.gethostname())

    @endpoint
    async def listen_address(self, one_host: bool) -> tuple[str, int]:
        """Where this process can be reached by its group: an address and a free port."""
        return "127.0.0.1" if one_host else outward_address(), free_port()

    @endpoint
    async def set_up_logs(
        self, role: str, folder: Path, console_level: str, timeline: TimelineConfig | None
    ) -> None:
        rank = current_rank().rank
        setup_logging(role, rank=rank, folder=folder, console_level=console_level)
        be_watched(folder, role=role, rank=rank, timeline=timeline)
        self._state = folder / STATE_FOLDER / f"{role}-{rank}.json"

    @concurrent_endpoint
    async def stacks(self) -> str:
        """Of this process, for who is on another host; after `set_up_logs`."""
        return await ask(read_state(self._state), self._state.parent)

    @endpoint
    async def import_modules(self, modules: Sequence[str]) -> None:
        # What fails here fails again where it is used, and is told there.
        with without_collections(), contextlib.suppress(Exception):
            for module in modules:
                importlib.import_module(module)

    @endpoint
    async def set_env(self, env_of_rank: Sequence[Mapping[str, str]]) -> None:
        os.environ.update(env_of_rank[current_rank().rank])


def process_group_envs(hostnames: Sequence[str], *, address: str, port: int) -> list[dict[str, str]]:
    """What `torch.distributed.init_process_group` reads, for each rank; `hostnames` by rank."""
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(hostnames)),
            "LOCAL_RANK": str(hostnames[:rank].count(hostname)),
            "LOCAL_WORLD_SIZE": str(hostnames.count(hostname)),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        for rank, hostname in enumerate(hostnames)
    ]


def outward_address() -> str:
    """This host's address for other hosts.

    Its name may resolve to the loopback address (Debian's /etc/hosts); then it is the address from
    which a packet to elsewhere would leave.
    """
    address = socket.gethostbyname(socket.gethostname())
    if not address.startswith("127."):
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        # Nothing is sent; 192.0.2.0/24 is reserved for documents.
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return address


def free_port() -> int:
    """A port that nothing on this host listens on, below the range that the system hands out.

    Ports of that range may be taken by any outgoing connection between this call and the use.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def import_torch() -> None:
    """Once, before there are actors: Monarch unpickles on several threads, which race to import it.

    Not in `process_main`: Monarch gives up on a process that is not up within 30 s, and on a busy
    machine or a network file system this import alone may take that long.
    """
    with without_collections():
        import torch  # noqa: F401


def process_env(role: str, threads: int, gpus: Sequence[int] | None) -> dict[str, str]:
    """What a role's processes get on whatever host, on top of that host's own environment."""
    env = {
        "RELAY_ROLE": role,
        RUN_VARIABLE: RUN,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": import_path(),
    }
    # Of this process, which `rl.weights.monarch_env` has set: hosts elsewhere have none of it.
    env |= {name: os.environ[name] for name in SETTINGS}
    if FAULT_VARIABLE in os.environ:
        env[FAULT_VARIABLE] = os.environ[FAULT_VARIABLE]
    if gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    return env


def import_path() -> str:
    """What the controller can import, its actors can: also modules beside a user's script."""
    paths = [os.getcwd(), str(Path(__file__).resolve().parent.parent), *sys.path]
    outside = [p for p in dict.fromkeys(paths) if p and not p.startswith((sys.prefix, sys.base_prefix))]
    return os.pathsep.join(outside)
