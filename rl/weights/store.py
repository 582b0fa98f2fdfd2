"""Versions of the weights, on their way from trainer to generators.

    store = WeightStore.Config().build(dtype="bfloat16")          # controller
    await store.start(mesh)                                       # now it can be handed to actors

    shard = await store.push(version=3, state_dict=...)           # every trainer rank
    snapshot = store.announce(shards)                             # controller, with the shards of all of them
    await store.pull(snapshot, state_dict=...)                    # every generator rank, in place
    await store.prune()                                           # controller, after all of them

A version is readable once it is announced, never overwritten, and kept in shared memory while a
process reads it. Trainer and generator may be sharded differently. A drawing of the whole way is in
docs/architecture.md.

    shared memory   processes of one host: written once, read in place
    messages        generators on other hosts, by Monarch's messages
    RDMA            the same, by torchstore's transport where there is hardware
    files           one file of each rank in a folder that all hosts see
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import uuid
import warnings
from collections.abc import AsyncIterator, Awaitable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError, ProcMesh
from torch import Tensor
from torchstore.transport import Request
from torchstore.transport.buffers import rdma_available
from torchstore.transport.pipe import Pipe

from rl.config.configurable import Configurable
from rl.config.tree import check_bounds
from rl.observability.run_folder import WEIGHTS, remove_versions
from rl.observability.spans import span
from rl.types import BoxSum
from rl.utils.errors import RunError
from rl.utils.threads import run_aside
from rl.weights.boxes import (
    Copier,
    Copy,
    PackedPart,
    Part,
    Read,
    batches,
    lay_out,
    num_bytes,
    outgoing_parts,
    parts_of,
    plan_reads,
)
from rl.weights.shared_memory import SegmentMaps, SegmentRef, Volume, key_of, this_host
from rl.weights.types import (
    VersionExistsError,
    VersionNotFoundError,
    WeightStoreError,
    WeightTimeoutError,
)

T = TypeVar("T")
Dtype = Literal["float32", "bfloat16", "float16"]

MAX_MESSAGE_BYTES = 16 * 2**20
"""Larger messages are slower: the allocator reuses memory of this size, and touches larger memory
anew.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """The part of a version that one trainer rank has stored."""

    version: int
    rank: int
    parts: tuple[PackedPart, ...]
    place: SegmentRef | Path | None
    """The shared memory or the file that holds the boxes; None if there are none."""
    sums: tuple[BoxSum, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """An announced version."""

    version: int
    shards: tuple[Shard, ...]

    @property
    def sums(self) -> list[BoxSum]:
        return [box for shard in self.shards for box in shard.sums]


class WeightStore(Configurable):
    """A handle on the store. After `start` it can be pickled and works in every process of the
    run.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        timeout_s: float = 120.0
        """Longest time of one push, pull or other operation."""
        keep_versions: int = 2
        """Number of the newest versions that `prune` keeps."""
        transport: Literal["auto", "torchstore", "files"] = "auto"
        """auto: shared memory between processes of one host, torchstore's messages or RDMA between
        hosts; torchstore: messages or RDMA everywhere; files: the run's folder, which all machines
        must share, for machines that cannot reach each other's memory."""
        num_threads: int = 2
        """CPU threads of each rank that copy weights, besides the threads that compute."""

        def __post_init__(self) -> None:
            check_bounds(self, "timeout_s", above=0)
            check_bounds(self, "keep_versions", "num_threads", at_least=1)

    def __init__(
        self, *, config: Config, dtype: Dtype = "float32", run_folder: Path | None = None
    ) -> None:
        """`dtype` is the generators': floating-point parameters are cast to it when they are
        pushed.
        """
        self.config = config
        self.dtype = dtype
        self._snapshots: dict[int, Snapshot] = {}
        """The announced versions, oldest announcement first; in the controller only."""
        self._volumes: Any = None
        self._coordinates: list[dict[str, int]] = []
        """Place of each volume in the mesh."""
        self._folder: Path | None = None
        """Folder of the versions' files; None for the other transports."""
        if config.transport == "files":
            assert run_folder is not None, "files need the folder of a run"
            self._folder = run_folder / WEIGHTS
        self._copier = Copier(num_threads=config.num_threads)
        self._maps = SegmentMaps(max_age=4 * (config.keep_versions + 1))

    def __getstate__(self) -> dict[str, Any]:
        # Threads and mapped memory belong to a process, and the versions to the controller.
        return self.__dict__ | {
            "_snapshots": {},
            "_copier": Copier(num_threads=self.config.num_threads),
            "_maps": SegmentMaps(max_age=self._maps.max_age),
        }

    async def start(self, mesh: ProcMesh) -> None:
        """Prepare the trainer's mesh for pushes, or empty the folder of the versions' files."""
        async with self._operation("start"):
            if self._folder is not None:
                await run_aside(self.discard, name="weight-files")
                # Ranks do not create the folder, so that a host that does not share it raises an
                # error.
                self._folder.mkdir(parents=True, exist_ok=True)
                return
            self._volumes = mesh.spawn(f"weight_volumes_{uuid.uuid4().hex[:8]}", Volume)
            started = await self._volumes.reset.call()
            self._coordinates = [dict(point) for point, _ in started.items()]

    async def stop(self) -> None:
        """Free everything that is stored; the actors end with their mesh. Idempotent."""
        volumes = self._volumes
        self.forget()
        # A process that is dead or stuck frees its memory when it ends; `discard` removes files
        # that are left.
        with suppress(WeightStoreError):
            async with self._operation("stop"):
                await run_aside(self.discard, name="weight-files")
                if volumes is not None:
                    await volumes.reset.call()

    def forget(self) -> None:
        """Drop all versions and the store's actors, which may be dead; `start` may follow.
        Idempotent.
        """
        self._copier.close()
        self._maps.close()
        self._snapshots = {}
        self._volumes = None

    def discard(self) -> None:
        """Remove the files, which would outlive the processes of a run. Idempotent."""
        if self._folder is not None:
            remove_versions(self._folder)

    async def push(
        self, *, version: int, state_dict: Mapping[str, Tensor], buffer_names: Collection[str] = ()
    ) -> Shard:
        """Store this rank's part of the weights; every rank of the trainer calls it with its own
        part.

        `outgoing_parts` says which boxes are sent, and in which dtype. The tensors must not change
        before the call returns.

        Raises:
            VersionExistsError: this version was pushed before.
            SharedMemoryError: there is not enough memory for all versions.
            ValueError: names a tensor whose layout cannot be sent.
            WeightTimeoutError: see `_operation`.
        """
        rank = current_torch_rank()
        outgoing = outgoing_parts(
            state_dict, dtype=getattr(torch, self.dtype), buffer_names=buffer_names, rank=rank
        )
        parts, size = lay_out(outgoing)

        async def copy_to(data: Tensor) -> list[BoxSum]:
            pairs = zip(outgoing, parts, strict=True)
            return await self._copier.run(
                [Copy(part=p, source=p.local, destination=packed.view(data)) for p, packed in pairs]
            )

        place: SegmentRef | Path | None = None
        sums: list[BoxSum] = []
        async with self._operation("push", version, len(state_dict)):
            if self._folder is not None:
                place = self._folder / f"v{version}" / f"rank{rank}.bin"
                data = np.empty(size, dtype=np.uint8)
                sums = await copy_to(torch.from_numpy(data))
                await write_file(place, data)
            elif outgoing:
                num_versions = self.config.keep_versions + 1
                volume = self._volume(rank)
                ref: SegmentRef = await volume.reserve.call_one(version, parts, size, num_versions)
                place = ref
                self._maps.begin_operation()
                with self._maps.holding(ref) as memory:
                    await self._maps.prepare(ref, device=outgoing[0].local.device)
                    sums = await copy_to(memory)
        return Shard(version=version, rank=rank, parts=tuple(parts), place=place, sums=tuple(sums))

    def announce(self, shards: Sequence[Shard]) -> Snapshot:
        """Make a version readable, given the shards of every trainer rank; controller only."""
        (version,) = {shard.version for shard in shards}
        if version in self._snapshots:
            raise VersionExistsError(f"version {version} is already announced")
        snapshot = self._snapshots[version] = Snapshot(version=version, shards=tuple(shards))
        return snapshot

    def versions(self) -> list[int]:
        """Return the readable versions, oldest announcement first; controller only."""
        return list(self._snapshots)

    def snapshot(self, version: int) -> Snapshot:
        """Return a readable version, or raise VersionNotFoundError; controller only."""
        if version not in self._snapshots:
            raise VersionNotFoundError(
                f"version {version} is not in the store; there are {self.versions()}"
            )
        return self._snapshots[version]

    async def pull(
        self, snapshot: Snapshot, *, state_dict: Mapping[str, Tensor]
    ) -> tuple[BoxSum, ...]:
        """Fill this rank's tensors, DTensors or plain, in place; return the checksums of what is
        then there.

        Names and shapes are checked before anything is written. If the transfer fails, some tensors
        are already new: do not use them, pull again.

        Raises:
            VersionNotFoundError: the version was deleted, and its memory is used again.
            WeightMismatchError: a name is missing on one side, a shape differs, or a trainer rank
                has not pushed.
            WeightTimeoutError: see `_operation`.
        """
        version, shards = snapshot.version, snapshot.shards
        reads = plan_reads(version, parts_of(state_dict), [shard.parts for shard in shards])
        self._maps.begin_operation()
        async with self._operation("pull", version, len(state_dict)):
            sums = await _gather_all(
                self._fetch(shards[number], some) for number, some in reads.items()
            )
        return tuple(itertools.chain.from_iterable(sums))

    async def _fetch(self, shard: Shard, reads: Sequence[Read]) -> list[BoxSum]:
        """Fill the destinations from one shard's boxes, by the fastest way there is."""
        place = shard.place
        if isinstance(place, Path):
            stored = await _read_file(place, [read.stored for read in reads])
            return await self._receive(reads, map(Read.within, reads, stored))
        assert place is not None, "a shard that is read has boxes"
        if self.config.transport == "auto" and place.host == this_host():
            with self._maps.holding(place) as memory:
                await self._maps.prepare(place, device=reads[0].part.local.device)
                return await self._receive(
                    reads, [read.within(read.stored.view(memory)) for read in reads]
                )
        if _has_rdma():
            return await self._fetch_by_rdma(shard, reads)
        sums: list[BoxSum] = []
        for batch in batches(reads, max_bytes=MAX_MESSAGE_BYTES):
            packed, size = lay_out([read.part for read in batch])
            wanted = [
                (read.stored.box.offsets, part) for read, part in zip(batch, packed, strict=True)
            ]
            message = await self._volume(shard.rank).read.call_one(shard.version, wanted, size)
            flat = torch.from_numpy(message)
            sums += await self._receive(batch, [part.view(flat) for part in packed])
        return sums

    async def _fetch_by_rdma(self, shard: Shard, reads: Sequence[Read]) -> list[BoxSum]:
        """Fill the destinations by torchstore's own transport, box by box."""
        pipe = Pipe(self._volume(shard.rank))

        async def get(part: Part) -> Tensor:
            # torchstore writes into contiguous memory of the stored dtype.
            received = torch.empty(part.box.local_shape, dtype=part.dtype)
            request = Request(tensor_val=received, tensor_slice=part.box)
            return await pipe.get_from_storage_volume(key_of(shard.version, part.name), request)

        return await self._receive(reads, await _gather_all(get(read.part) for read in reads))

    async def _receive(self, reads: Sequence[Read], sources: Iterable[Tensor]) -> list[BoxSum]:
        """Copy boxes to their destinations; return their checksums."""
        pairs = zip(reads, sources, strict=True)
        return await self._copier.run(
            [Copy(part=r.part, source=source, destination=r.part.local) for r, source in pairs]
        )

    async def delete(self, version: int) -> None:
        """Delete a version, announced or half pushed, and free its memory. Idempotent."""
        self._snapshots.pop(version, None)
        async with self._operation("delete", version):
            if self._folder is not None:
                files = self._folder / f"v{version}"
                await run_aside(
                    partial(shutil.rmtree, files, ignore_errors=True), name="weight-files"
                )
            elif self._volumes is not None:
                await self._volumes.drop.call(version)

    async def prune(self) -> list[int]:
        """Delete all announced versions but the `keep_versions` newest; return the deleted
        versions.
        """
        old = self.versions()[: -self.config.keep_versions]
        for version in old:
            await self.delete(version)
        return old

    def _volume(self, rank: int) -> Any:
        if self._volumes is None:
            raise WeightStoreError("the weight store is not running: call start() first")
        return self._volumes.slice(**self._coordinates[rank % len(self._coordinates)])

    @asynccontextmanager
    async def _operation(
        self, name: str, version: int | None = None, num_tensors: int = 0
    ) -> AsyncIterator[None]:
        """Run the body under the store's deadline, and re-raise remote errors with their own type.

        Raises:
            WeightTimeoutError: names operation, version, number of tensors, rank and what was
                awaited.
            WeightStoreError: an actor raised it, or an actor was lost.
        """
        awaited = "the trainer's processes" if self._folder is None else f"files in {self._folder}"
        of_version = "" if version is None else f" of version {version}"
        of_tensors = f" ({num_tensors} tensors)" if num_tensors else ""
        what = f"weight store: {name}{of_version}{of_tensors} on rank {current_torch_rank()}"
        try:
            with span(f"waits for the weight store ({name})", version=version):
                async with asyncio.timeout(self.config.timeout_s):
                    yield
        except TimeoutError as error:
            if isinstance(error, RunError):
                raise  # An inner deadline, with its own message.
            raise WeightTimeoutError(
                f"{what} not finished within timeout_s={self.config.timeout_s:g}: waited for "
                f"{awaited}"
            ) from error
        except ActorError as error:
            if isinstance(error.exception, WeightStoreError):
                raise error.exception from None
            raise
        except SupervisionError as error:
            raise WeightStoreError(f"{what} failed: lost {awaited}: {error}") from error


async def write_file(file: Path, data: np.ndarray) -> None:
    """Write [bytes] uint8 to a new file; raise VersionExistsError if the file exists."""

    def write() -> None:
        file.parent.mkdir(exist_ok=True)
        with file.open("xb") as opened:
            data.tofile(opened)

    try:
        await run_aside(write, name="weight-file")
    except OSError as error:
        if isinstance(error, FileExistsError) and file.exists():
            raise VersionExistsError(f"the version is already pushed: {file} exists") from error
        raise WeightStoreError(f"weights were not written to {file}: {error}") from error


async def _read_file(file: Path, parts: Sequence[PackedPart]) -> list[Tensor]:
    """Return some of a file's boxes; raise VersionNotFoundError if the file was deleted."""

    def load(part: PackedPart) -> Tensor:
        data = np.fromfile(file, dtype=np.uint8, count=num_bytes(part), offset=part.offset)
        return torch.from_numpy(data).view(part.dtype).view(part.box.local_shape)

    try:
        return await run_aside(lambda: [load(part) for part in parts], name="weight-file")
    except FileNotFoundError as error:
        raise VersionNotFoundError(f"the version was deleted: there is no {file}") from error
    except (OSError, RuntimeError) as error:
        raise WeightStoreError(f"the files of a version cannot be read: {error}") from error


def current_torch_rank() -> int:
    """Return this process's rank, 0 where there is no process group."""
    return dist.get_rank() if dist.is_initialized() else 0


async def _gather_all(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Return all results; raise the first error only after everything has ended."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in tasks]


@cache
def _has_rdma() -> bool:
    """Return whether torchstore uses RDMA on this machine; TORCHSTORE_RDMA_ENABLED=0 switches it
    off.
    """
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # torchstore calls a renamed function of Monarch
        return rdma_available()
