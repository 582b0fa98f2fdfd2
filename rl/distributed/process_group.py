"""Process groups: gloo on a CPU, NCCL on a GPU, none at all for a single process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rl.distributed import flight_recorder
from rl.distributed.gloo import use_one_worker
from rl.distributed.mesh import CP, fsdp_axis
from rl.errors import RunError


class CollectiveTimeoutError(RunError, TimeoutError):
    """Other ranks did not take part in a collective within the deadline of the process group."""


@dataclass(kw_only=True, slots=True)
class CommConfig:
    """How long ranks wait for each other."""

    init_timeout_s: float = 300.0
    """For all ranks to appear, build the model and load its weights."""
    train_timeout_s: float = 300.0
    """For every collective after that."""
    trace_buffer_size: int = 2000
    """Latest collectives that each rank remembers, with the code that called them; they are written
    to the run's folder when one fails. 0: none."""

    def __post_init__(self) -> None:
        if self.trace_buffer_size < 0:
            raise ValueError(f"trace_buffer_size={self.trace_buffer_size}: must be at least 0")
        for name in ("init_timeout_s", "train_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Which of how many processes this one is, and where they meet."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Place among the processes of this machine: which GPU to take."""
    master_addr: str = "127.0.0.1"
    master_port: int = 29500

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank={self.rank}: must be between 0 and world size - 1 = {self.size - 1}")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> World:
        """From RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun sets them.

        Raises:
            ValueError: if WORLD_SIZE is above 1 and one of the others is missing, or one of
                the numbers is none.
        """
        size = _int(environ, "WORLD_SIZE", 1)
        if size == 1:
            return cls(local_rank=_int(environ, "LOCAL_RANK", 0))
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environ]
        if missing:
            raise ValueError(f"WORLD_SIZE={size} is set in the environment, but {', '.join(missing)} is not")
        rank = _int(environ, "RANK", 0)
        return cls(
            rank=rank,
            size=size,
            local_rank=_int(environ, "LOCAL_RANK", rank),
            master_addr=environ["MASTER_ADDR"],
            master_port=_int(environ, "MASTER_PORT", 0),
        )

    def default_device(self) -> torch.device:
        """This process's GPU where there is one, else the CPU."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", self.local_rank % torch.cuda.device_count())


def _int(environ: Mapping[str, str], name: str, default: int) -> int:
    value = environ.get(name, str(default))
    try:
        return int(value)
    except ValueError as error:
        raise ValueError(f"environment variable {name}={value!r}: must be an integer") from error


def connect(*, world: World, device: torch.device, comm: CommConfig, always: bool = False) -> bool:
    """Join the other ranks; returns whether a group was made here (then `disconnect` it).

    A single process needs none. A group that exists already is used as it is.

    Args:
        always: make a group for a single process too.

    Raises:
        ValueError: the existing group is of another size.
        TimeoutError: not all ranks appeared within `init_timeout_s`.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    use_one_worker()
    if dist.is_initialized():
        if dist.get_world_size() != world.size:
            raise ValueError(
                f"world size {world.size} differs from the existing process group's {dist.get_world_size()}"
            )
        return False
    if world.size == 1 and not always:
        return False
    flight_recorder.configure(comm.trace_buffer_size)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if world.size == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]  # Public, though imported on a condition.
        dist.init_process_group(backend=backend, store=store, rank=0, world_size=1)
        return True
    address = f"{world.master_addr}:{world.master_port}"
    try:
        dist.init_process_group(
            backend=backend,
            init_method=f"tcp://{address}",
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=comm.init_timeout_s),
        )
    except dist.DistError as error:
        if "timed out" not in str(error).lower():
            raise
        raise TimeoutError(
            f"rank {world.rank}: not all {world.size} ranks of the trainer appeared at {address} "
            f"within {comm.init_timeout_s:g} s"
        ) from error
    return True


def disconnect() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def barrier() -> None:
    """Wait for all ranks; nothing in a single process without a group."""
    if dist.is_initialized():
        dist.barrier()


def everywhere(is_true: bool) -> bool:
    """Whether it is true on all ranks; collective."""
    if not dist.is_initialized():
        return is_true
    found = torch.tensor(int(is_true))
    if dist.get_backend() == "nccl":
        found = found.cuda()
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return bool(found.item())


def set_timeout(mesh: DeviceMesh | None, *, timeout_s: float) -> None:
    """Deadline of every later collective, in the default group and those of the mesh's axes."""
    if mesh is None:
        return
    timeout = timedelta(seconds=timeout_s)
    groups = [None, *mesh.get_all_groups()]
    if CP in (mesh.mesh_dim_names or ()):
        groups.append(fsdp_axis(mesh).get_group())
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


@contextmanager
def awaiting(what: str, *, record_in: str | None = None) -> Iterator[None]:
    """Add to the error of a failed collective which call it happened in, and on which rank.

    `record_in` is a folder that receives the latest collectives of this rank.

    Raises:
        CollectiveTimeoutError: what failed did so because of its deadline.
    """
    started = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if not dist.is_initialized():
            raise
        told = _late(error, what=what, waited_s=time.monotonic() - started) or error
        told.add_note(f"{_this_rank()}, in {what}")
        file = None if record_in is None else flight_recorder.write_collectives(record_in)
        if file is not None:
            told.add_note(f"the latest collectives of this rank are in {file}")
        if told is error:
            raise
        raise told from error


def _late(error: RuntimeError, *, what: str, waited_s: float) -> CollectiveTimeoutError | None:
    """What gloo raises as any other error, where it is one of a deadline."""
    if isinstance(error, RunError) or "timed out" not in str(error).lower():
        return None
    return CollectiveTimeoutError(
        f"{_this_rank()}: in {what} the other ranks did not take part within the deadline of a collective "
        f"(comm.train_timeout_s; {waited_s:.1f} s in all): {error}"
    )


def _this_rank() -> str:
    return f"rank {dist.get_rank()} of {dist.get_world_size()} of the trainer"
