"""Versions of the weights, on their way from trainer to generators.

    store = WeightStore.Config().build(dtype="bfloat16")          # controller
    await store.start(mesh)                                       # now it can be handed to actors

    shard = await store.push(version=3, state_dict=...)           # every trainer rank
    snapshot = store.announce(shards)                             # controller, with all shards
    await store.pull(snapshot, state_dict=...)                    # every generator rank, in place
    await store.prune()                                           # controller, after all pulls

A version is readable once it is announced, never overwritten, and kept in shared memory while a
process reads it. Trainer and generator may be sharded differently. A drawing of the whole way is in
docs/architecture.md.

    shared memory   processes of one host: written once, read in place
    messages        generators on other hosts, by Monarch's messages
    files           one file of each rank in a folder that all hosts see
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import uuid
from collections.abc import AsyncIterator, Awaitable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from monarch.actor import ActorError, ProcMesh
from torch import Tensor

from rl.config.configurable import Configurable
from rl.config.tree import check_bounds
from rl.observability.run_folder import WEIGHTS, remove_versions
from rl.observability.spans import span
from rl.types import BASE, BoxSum
from rl.utils.errors import RunError
from rl.utils.threads import run_in_thread
from rl.weights.boxes import (
    PackedPart,
    Part,
    Read,
    assign_offsets,
    list_parts,
    plan_reads,
    select_parts_to_push,
    split_reads,
)
from rl.weights.checksum import digest_sums
from rl.weights.copies import Copier, Copy
from rl.weights.monarch_private import LostProcessError
from rl.weights.shared_memory import SegmentMaps, SegmentRef, Volume, identify_host
from rl.weights.types import (
    AdapterInfo,
    VersionExistsError,
    VersionNotFoundError,
    WeightStoreError,
    WeightTimeoutError,
)

T = TypeVar("T")
Dtype = Literal["float32", "bfloat16", "float16"]

MAX_MESSAGE_BYTES = 16 * 2**20
"""Size of a message. Larger messages are slower: the allocator reuses memory up to this size, and
touches larger memory anew.
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
    adapter: AdapterInfo | None = None
    merge_lost: float | None = None
    """What the merge of adapters into these weights lost, of all ranks (`rl.training.merge`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """An announced version."""

    version: int
    shards: tuple[Shard, ...]

    @property
    def sums(self) -> list[BoxSum]:
        """Checksums of all trainer ranks."""
        sums: list[BoxSum] = []
        for shard in self.shards:
            sums += shard.sums
        return sums

    @property
    def num_bytes(self) -> int:
        """Bytes that all trainer ranks have pushed."""
        return sum(part.num_bytes for shard in self.shards for part in shard.parts)

    @property
    def merge_lost(self) -> float | None:
        """Share of its adapters' update that rounding lost; None without merged adapters."""
        return self.shards[0].merge_lost

    @property
    def base_id(self) -> int:
        """Checksum of all tensors, by which adapters name the base that they were trained on."""
        return digest_sums(self.sums)

    @property
    def adapter(self) -> AdapterInfo | None:
        """What the adapter is, if this is one; None for whole weights."""
        first = self.shards[0].adapter
        if first is None:
            return None
        infos = [shard.adapter for shard in self.shards]
        assert all(info is not None and info.lora == first.lora for info in infos)
        base_id = sum(info.base_id for info in infos if info is not None) % 2**64
        return replace(first, base_id=base_id)


class WeightStore(Configurable):
    """Handle on the store; after `start` it can be pickled and works in every process of a run."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Way of the weights between processes, its deadline, and the versions that are kept."""

        timeout_s: float = 120.0
        """Longest time of one push, pull or other operation."""
        keep_versions: int = 2
        """Number of the newest versions that `prune` keeps."""
        transport: Literal["auto", "torchstore", "files"] = "auto"
        """auto: shared memory between processes of one host, messages between hosts; torchstore:
        messages everywhere, as torchstore does without RDMA; files: the run's folder, which all
        machines must share, for machines that cannot reach each other's memory."""
        num_threads: int = 2
        """CPU threads of each rank that copy weights, besides the threads that compute."""

        def __post_init__(self) -> None:
            check_bounds(self, "timeout_s", above=0)
            check_bounds(self, "keep_versions", "num_threads", at_least=1)

    def __init__(
        self, *, config: Config, dtype: Dtype = "float32", run_folder: Path | None = None
    ) -> None:
        """Take the generators' `dtype`, to which a push casts floating-point parameters."""
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
        async with self._run_operation("start"):
            if self._folder is not None:
                await run_in_thread(self.discard, name="weight-files")
                # Only the controller creates the folder, so that a push raises an error on a host
                # that does not share it.
                self._folder.mkdir(parents=True, exist_ok=True)
                return
            self._volumes = mesh.spawn(f"weight_volumes_{uuid.uuid4().hex[:8]}", Volume)
            answers = await self._volumes.reset.call()
            self._coordinates = [dict(point) for point, _ in answers.items()]

    async def stop(self) -> None:
        """Free everything that is stored; the actors end with their mesh. Idempotent."""
        volumes = self._volumes
        self.forget()
        # A process that is lost or stuck frees its memory when it ends; `discard` removes files
        # that remain.
        with suppress(WeightStoreError):
            async with self._run_operation("stop"):
                await run_in_thread(self.discard, name="weight-files")
                if volumes is not None:
                    await volumes.reset.call()

    def forget(self) -> None:
        """Drop all versions and the store's actors, which may be lost. Idempotent.

        `start` may follow.
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
        self,
        *,
        version: int,
        state_dict: Mapping[str, Tensor],
        buffer_names: Collection[str] = (),
        adapter: AdapterInfo | None = None,
    ) -> Shard:
        """Store this rank's part of the weights; every trainer rank calls it with its own part.

        Of each tensor, this rank stores the box that `select_parts_to_push` gives it, in the
        generators' dtype: in shared memory that the volume of its process reserves
        (`Volume.reserve`, which refuses a version that is there), or in a file. The shard lists the
        boxes with their places and, summed while they are copied, their checksums. The tensors must
        not change before the call returns.

        Raises:
            VersionExistsError: this version was pushed before.
            SharedMemoryError: there is not enough memory for all versions.
            ValueError: names a tensor whose layout cannot be sent.
            WeightTimeoutError: see `_run_operation`.
        """
        rank = get_rank()
        parts = select_parts_to_push(
            state_dict, dtype=getattr(torch, self.dtype), buffer_names=buffer_names, rank=rank
        )
        packed, num_bytes = assign_offsets(parts)

        place: SegmentRef | Path | None = None
        sums: list[BoxSum] = []
        async with self._run_operation("push", version, len(state_dict)):
            if self._folder is not None:
                place = self._folder / f"v{version}" / f"rank{rank}.bin"
                data = np.empty(num_bytes, dtype=np.uint8)
                sums = await self._copy_to_flat(torch.from_numpy(data), parts, packed)
                await write_file(place, data)
            elif parts:
                # While a version is written, `keep_versions` others may be read; of bases none.
                num_versions = 1 if version == BASE else self.config.keep_versions + 1
                volume = self._get_volume(rank)
                ref: SegmentRef = await volume.reserve.call_one(
                    version, packed, num_bytes, num_versions
                )
                place = ref
                # The memory is the volume's; this rank maps it too, and writes without messages.
                self._maps.begin_operation()
                with self._maps.hold(ref) as memory:
                    await self._maps.prepare(ref, device=parts[0].local.device)
                    sums = await self._copy_to_flat(memory, parts, packed)
                if version == BASE:
                    self._maps.unmap(ref)
        return Shard(
            version=version,
            rank=rank,
            parts=tuple(packed),
            place=place,
            sums=tuple(sums),
            adapter=adapter,
        )

    async def _copy_to_flat(
        self, flat: Tensor, parts: Sequence[Part], packed: Sequence[PackedPart]
    ) -> list[BoxSum]:
        """Copy each part to its place in `flat`, [bytes] uint8; return the checksums."""
        copies = []
        for part, target in zip(parts, packed, strict=True):
            copies.append(Copy(part=part, source=part.local, destination=target.view(flat)))
        return await self._copier.run(copies)

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
        """Fill this rank's tensors, DTensors or plain, in place; return their new checksums.

        `plan_reads` finds the stored boxes that each tensor needs, whatever the sharding of the
        trainer. It checks names, shapes and that nothing is missing before anything is written. The
        checksums are those of the tensors themselves, summed after each piece is written. If the
        transfer fails, some tensors are already new: do not use them, pull again.

        Raises:
            VersionNotFoundError: the version was deleted, and its memory is used again.
            WeightMismatchError: a name is missing on one side, a shape differs, or a trainer rank
                has not pushed.
            WeightTimeoutError: see `_run_operation`.
        """
        version, shards = snapshot.version, snapshot.shards
        reads = plan_reads(version, list_parts(state_dict), [shard.parts for shard in shards])
        self._maps.begin_operation()
        async with self._run_operation("pull", version, len(state_dict)):
            sums = await _gather_all(
                self._fetch(shards[number], of_shard) for number, of_shard in reads.items()
            )
        for shard in shards:
            # A base is pulled once, and its memory goes when nobody maps it.
            if version == BASE and isinstance(shard.place, SegmentRef):
                self._maps.unmap(shard.place)
        return tuple(itertools.chain.from_iterable(sums))

    async def _fetch(self, shard: Shard, reads: Sequence[Read]) -> list[BoxSum]:
        """Fill the destinations from one shard's boxes, by the fastest way there is."""
        place = shard.place
        if isinstance(place, Path):
            stored = await _read_file(place, [read.stored for read in reads])
            return await self._receive(reads, stored)
        assert place is not None, "a shard that is read has boxes"

        if self.config.transport == "auto" and place.host == identify_host():
            # The trainer does not reuse the memory while it is held, so no read is torn.
            with self._maps.hold(place) as memory:
                await self._maps.prepare(place, device=reads[0].part.local.device)
                return await self._receive(reads, [read.stored.view(memory) for read in reads])
        return await self._fetch_by_messages(shard, reads)

    async def _fetch_by_messages(self, shard: Shard, reads: Sequence[Read]) -> list[BoxSum]:
        """Fill the destinations from a trainer process on another host, many boxes a message."""
        sums: list[BoxSum] = []
        for batch in split_reads(reads, max_bytes=MAX_MESSAGE_BYTES):
            packed, size = assign_offsets([read.part for read in batch])
            asked = []
            for read, part in zip(batch, packed, strict=True):
                asked.append((read.stored.box.offsets, part))
            volume = self._get_volume(shard.rank)
            message = await volume.read.call_one(shard.version, asked, size)

            # The message holds the boxes as they go to their destinations, not whole stored boxes.
            flat = torch.from_numpy(message)
            sums += await self._copy_to_destinations(batch, [part.view(flat) for part in packed])
        return sums

    async def _receive(self, reads: Sequence[Read], stored: Iterable[Tensor]) -> list[BoxSum]:
        """Copy from the stored boxes, each of which contains the box of its read."""
        sources = []
        for read, tensor in zip(reads, stored, strict=True):
            sources.append(read.slice_stored(tensor))
        return await self._copy_to_destinations(reads, sources)

    async def _copy_to_destinations(
        self, reads: Sequence[Read], sources: Iterable[Tensor]
    ) -> list[BoxSum]:
        """Copy boxes to their destinations; return their checksums."""
        copies = []
        for read, source in zip(reads, sources, strict=True):
            copies.append(Copy(part=read.part, source=source, destination=read.part.local))
        return await self._copier.run(copies)

    async def delete(self, version: int) -> None:
        """Delete a version, announced or half pushed, and free its memory. Idempotent."""
        self._snapshots.pop(version, None)
        async with self._run_operation("delete", version):
            if self._folder is not None:
                files = self._folder / f"v{version}"
                await run_in_thread(
                    partial(shutil.rmtree, files, ignore_errors=True), name="weight-files"
                )
            elif self._volumes is not None:
                await self._volumes.drop.call(version, version != BASE)

    async def prune(self) -> list[int]:
        """Delete all announced versions but the `keep_versions` newest; return those deleted."""
        versions = [version for version in self.versions() if version != BASE]
        old = versions[: -self.config.keep_versions]
        for version in old:
            await self.delete(version)
        return old

    def _get_volume(self, rank: int) -> Any:
        if self._volumes is None:
            raise WeightStoreError("the weight store is not running: call start() first")
        # The mesh may have fewer processes than there are ranks: these then share a volume.
        return self._volumes.slice(**self._coordinates[rank % len(self._coordinates)])

    @asynccontextmanager
    async def _run_operation(
        self, name: str, version: int | None = None, num_tensors: int = 0
    ) -> AsyncIterator[None]:
        """Run the body under the store's deadline, and re-raise remote errors with their own type.

        Raises:
            WeightTimeoutError: names operation, version, number of tensors and rank.
            WeightStoreError: an actor raised it, or an actor was lost.
        """
        awaited = "the trainer's processes" if self._folder is None else f"files in {self._folder}"
        of_version = "" if version is None else f" of version {version}"
        of_tensors = f" ({num_tensors} tensors)" if num_tensors else ""
        what = f"weight store: {name}{of_version}{of_tensors} on rank {get_rank()}"
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
            # Monarch wraps an error of another process; callers catch the store's own types.
            if isinstance(error.exception, WeightStoreError):
                raise error.exception from None
            raise
        except LostProcessError as error:
            raise WeightStoreError(f"{what} failed: lost {awaited}: {error}") from error


async def write_file(file: Path, data: np.ndarray) -> None:
    """Write [bytes] uint8 to a new file; raise VersionExistsError if the file exists."""

    def write() -> None:
        file.parent.mkdir(exist_ok=True)
        # "x" refuses a file that exists: a version is never overwritten.
        with file.open("xb") as output:
            data.tofile(output)

    try:
        await run_in_thread(write, name="weight-file")
    except OSError as error:
        # The error may also mean that the version's folder is a file.
        if isinstance(error, FileExistsError) and file.exists():
            raise VersionExistsError(f"the version is already pushed: {file} exists") from error
        raise WeightStoreError(f"weights were not written to {file}: {error}") from error


async def _read_file(file: Path, parts: Sequence[PackedPart]) -> list[Tensor]:
    """Return some of a file's boxes; raise VersionNotFoundError if the file was deleted."""

    def load() -> list[Tensor]:
        boxes = []
        for part in parts:
            data = np.fromfile(file, dtype=np.uint8, count=part.num_bytes, offset=part.offset)
            boxes.append(torch.from_numpy(data).view(part.dtype).view(part.box.shape))
        return boxes

    try:
        return await run_in_thread(load, name="weight-file")
    except FileNotFoundError as error:
        raise VersionNotFoundError(f"the version was deleted: there is no {file}") from error
    except (OSError, RuntimeError) as error:
        raise WeightStoreError(f"the files of a version cannot be read: {error}") from error


def get_rank() -> int:
    """Return this process's rank, 0 where there is no process group."""
    return dist.get_rank() if dist.is_initialized() else 0


async def _gather_all(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Return all results; raise the first error only after everything has ended."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in tasks]
