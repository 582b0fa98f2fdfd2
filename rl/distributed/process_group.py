"""Process groups: gloo on a CPU, NCCL on a GPU, none for a single process; and their record.

PyTorch's flight recorder keeps the latest collectives of a process in a ring. It reads its size
from the environment, once in the life of a process.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

# Public, though imported on a condition, which a type checker does not follow.
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from rl.config.tree import check_bounds
from rl.distributed.compat import read_recorded_collectives, set_group_timeout, use_one_gloo_worker
from rl.distributed.mesh import (
    Degrees,
    build_expert_mesh,
    build_mesh,
    get_fsdp_axis,
    get_stage_group,
)
from rl.utils.errors import RunError, warn_unwritten
from rl.utils.files import replace_file

RECORDER_SIZE = "TORCH_FR_BUFFER_SIZE"
WATCHDOG_FILE = "TORCH_FR_DUMP_TEMP_FILE"
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
BACKLOG = 128
"""Connections that may wait at the ranks' store, besides one for each rank."""
DUMP_ON_TIMEOUT = "TORCH_NCCL_DUMP_ON_TIMEOUT"


class CollectiveTimeoutError(RunError, TimeoutError):
    """Other ranks did not take part in a collective within the process group's deadline."""


@dataclass(kw_only=True, slots=True)
class CommConfig:
    """Deadlines between ranks, and the record of their collectives."""

    init_timeout_s: float = 300.0
    """Seconds for all ranks to appear, build the model and load its weights."""
    train_timeout_s: float = 300.0
    """Seconds for every later collective."""
    trace_buffer_size: int = 2000
    """Number of latest collectives, with their call sites, that each rank remembers and writes to
    the run's folder when one fails; 0 for none."""

    def __post_init__(self) -> None:
        check_bounds(self, "trace_buffer_size", at_least=0)
        check_bounds(self, "init_timeout_s", "train_timeout_s", above=0)


@dataclass(kw_only=True, slots=True)
class RankInfo:
    """Meshes of one rank and its process group; several engines of a process can share them."""

    mesh: DeviceMesh | None
    expert_mesh: DeviceMesh | None
    joined: bool
    """True if the process group was created here and is left by `leave`."""

    @classmethod
    def join(
        cls,
        degrees: Degrees,
        *,
        world: World,
        device: torch.device,
        comm: CommConfig,
        always: bool,
        record_in: str | None = None,
    ) -> RankInfo:
        """Join the process group and build the meshes, as `connect`.

        Args:
            always: have a group and a mesh for a single process too.
            record_in: folder that receives the latest collectives of a rank that hangs.
        """
        if record_in is not None:
            # NCCL's watchdog writes its pickled record to this path and the rank.
            os.environ.setdefault(WATCHDOG_FILE, str(Path(record_in) / "collectives_rank"))
        joined = connect(world=world, device=device, comm=comm, always=always)
        mesh = build_mesh(degrees, device_type=device.type, always=always)
        return cls(mesh=mesh, expert_mesh=build_expert_mesh(mesh, degree=degrees.ep), joined=joined)

    def set_timeout(self, timeout_s: float) -> None:
        """Set the deadline of every later collective."""
        if self.mesh is None:
            return
        # Each group has a deadline of its own: the default group, and those of the meshes' axes.
        groups = [
            None,
            *self.mesh.get_all_groups(),
            get_fsdp_axis(self.mesh).get_group(),
            get_stage_group(self.mesh),
        ]
        if self.expert_mesh is not None:
            groups += self.expert_mesh.get_all_groups()
        for group in groups:
            set_group_timeout(timedelta(seconds=timeout_s), group)

    def leave(self) -> None:
        if self.joined and dist.is_initialized():
            dist.destroy_process_group()
        self.joined = False


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Rank of this process among all trainer processes, and their meeting point."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Rank among the processes of this machine, which selects the GPU."""
    master_addr: str = "127.0.0.1"
    master_port: int = 29500

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> World:
        """Read RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun sets them."""
        size = int(environ.get("WORLD_SIZE", 1))
        if size == 1:
            return cls(local_rank=int(environ.get("LOCAL_RANK", 0)))
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environ]
        if missing:
            raise ValueError(
                f"WORLD_SIZE={size} is set in the environment, but {', '.join(missing)} is not"
            )
        rank = int(environ["RANK"])
        return cls(
            rank=rank,
            size=size,
            local_rank=int(environ.get("LOCAL_RANK", rank)),
            master_addr=environ["MASTER_ADDR"],
            master_port=int(environ["MASTER_PORT"]),
        )

    def default_device(self) -> torch.device:
        """Return this process's GPU if there is one, else the CPU."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", self.local_rank % torch.cuda.device_count())


def connect(*, world: World, device: torch.device, comm: CommConfig, always: bool = False) -> bool:
    """Join the other ranks and return whether this call has created a group.

    A single process creates a group only if `always`.

    Raises:
        ValueError: if there is a group of another size.
        TimeoutError: if not all ranks appear within `init_timeout_s`.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    use_one_gloo_worker()
    if dist.is_initialized() and dist.get_world_size() != world.size:
        raise ValueError(
            f"world size {world.size} differs from the existing process group's "
            f"{dist.get_world_size()}"
        )
    if dist.is_initialized() or (world.size == 1 and not always):
        return False
    os.environ[RECORDER_SIZE] = str(comm.trace_buffer_size)
    # NCCL's watchdog ends a process whose collective timed out before Python could write anything.
    os.environ.setdefault(DUMP_ON_TIMEOUT, str(int(comm.trace_buffer_size > 0)))
    # On a GPU both, as objects travel by the CPU's backend.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if world.size == 1:
        # Public, though imported on a condition.
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend=backend, store=store, rank=0, world_size=1)
        return True
    address = f"{world.master_addr}:{world.master_port}"
    timeout = timedelta(seconds=comm.init_timeout_s)
    try:
        dist.init_process_group(
            backend=backend,
            store=open_store(world, timeout=timeout),
            rank=world.rank,
            world_size=world.size,
            timeout=timeout,
        )
    except dist.DistError as error:
        if "timed out" not in str(error).lower():
            raise
        raise TimeoutError(
            f"rank {world.rank}: not all {world.size} ranks of the trainer appeared at {address} "
            f"within {comm.init_timeout_s:g} s"
        ) from error
    return True


def open_store(world: World, *, timeout: timedelta, wait: bool = True) -> TCPStore:
    """Return the store in which the ranks find each other; rank 0 serves it.

    It listens on the master address only: PyTorch's own listens on every network, and asks nobody
    who they are.

    Args:
        wait: return only when all ranks have connected.
    """
    # Under torchrun its agent may serve the store.
    serves = world.rank == 0 and os.environ.get(AGENT_STORE) != "True"
    return TCPStore(
        world.master_addr,
        world.master_port,
        world.size if wait else None,
        serves,
        timeout=timeout,
        wait_for_workers=wait,
        master_listen_fd=_listen(world) if serves else None,
    )


def _listen(world: World) -> int | None:
    """Return a socket that listens on the master address.

    None if other hosts may know this host by another address: PyTorch then listens on all.
    """
    family, _, _, _, address = socket.getaddrinfo(
        world.master_addr, world.master_port, type=socket.SOCK_STREAM
    )[0]
    is_name = world.master_addr not in ("localhost", address[0])
    if is_name and ipaddress.ip_address(address[0]).is_loopback:
        return None  # Debian's name of this host.
    try:
        return socket.create_server(
            address[:2], family=family, backlog=world.size + BACKLOG
        ).detach()
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return None  # An address that is translated on the way.


def barrier() -> None:
    """Wait for all ranks; return at once without a group."""
    if dist.is_initialized():
        dist.barrier()


@contextmanager
def await_ranks(what: str, *, record_in: str | None = None) -> Iterator[None]:
    """Add the call and the rank to the error of a failed collective.

    The folder `record_in` receives the latest collectives of this rank.

    Raises:
        CollectiveTimeoutError: the other ranks did not take part in time.
    """
    started = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if not dist.is_initialized():
            raise
        this_rank = f"rank {dist.get_rank()} of {dist.get_world_size()} of the trainer"
        raised = error
        # gloo has no type for it, and raises a RuntimeError.
        if not isinstance(error, RunError) and "timed out" in str(error).lower():
            raised = CollectiveTimeoutError(
                f"{this_rank}: in {what} the other ranks did not take part within the deadline of "
                f"a collective (comm.train_timeout_s; {time.monotonic() - started:.1f} s in all): "
                f"{error}"
            )
        raised.add_note(f"{this_rank}, in {what}")
        file = None if record_in is None else write_collectives(record_in)
        if file is not None:
            raised.add_note(f"the latest collectives of this rank are in {file}")
        if raised is error:
            raise
        raise raised from error


def write_collectives(folder: str | Path) -> Path | None:
    """Write the recorded collectives, oldest first, as `collectives_rank<r>.json`; return the file.

    Each entry has the name, group, sequence number, sizes, state and call site of a collective.
    Returns None if nothing was recorded or the disk has no room.
    """
    entries = read_recorded_collectives() if dist.is_initialized() else []
    if not entries:
        return None
    file = Path(folder) / f"collectives_rank{dist.get_rank()}.json"
    with warn_unwritten(file):  # An OSError must not hide the error of the collective.
        file.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(file) as temporary:
            temporary.write_text(json.dumps(entries, indent=1) + "\n")
        return file
    return None
