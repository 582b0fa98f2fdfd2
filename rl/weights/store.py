"""Weights on their way from trainer to generators, under versions.

    store = WeightStore.Config().build(dtype="bfloat16")     # controller
    await store.start(mesh)                                  # now it can be handed to actors

    await store.push(version=3, state_dict=...)              # every trainer rank
    await store.announce(3)                                  # controller, after all of them
    await store.pull(version=3, state_dict=...)              # every generator rank, in place
    await store.prune()                                      # controller, after all of them

A version is never overwritten, cannot be read before it is announced, and is deleted only
when nobody reads it. Trainer and generator may be laid out differently: what travels are boxes
of tensors, and a reader takes the intersections with its own. Processes of one host hand them
over in shared memory (`rl/weights/segments.py`), others by torchstore's messages or RDMA. Push
and pull return checksums of what was sent and of what then was there, for the canary.

Every operation has the deadline `timeout_s`; its error names operation, version, rank, number
of tensors and what was awaited.
"""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from monarch.actor import ProcMesh
from torch import Tensor

from rl.config.configurable import Configurable
from rl.config.effect import unless
from rl.types import BoxSum
from rl.weights import messages
from rl.weights.box_sums import box_sum
from rl.weights.copying import Copier
from rl.weights.deadline import Progress, operation
from rl.weights.errors import VersionNotFoundError, WeightStoreError
from rl.weights.messages import all_of
from rl.weights.monarch_compat import has_rdma
from rl.weights.plan import Read, plan_reads
from rl.weights.room import Room
from rl.weights.segments import SegmentRef, free_memory, this_host
from rl.weights.shards import Outgoing, lay_out, outgoing_parts, parts_of
from rl.weights.shared_memory import SharedMemory
from rl.weights.volumes import (
    BatchVolume,
    RankStrategy,
    VersionIndex,
    VolumeStats,
    current_torch_rank,
)

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """What one rank sent or received."""

    num_bytes: int
    sums: tuple[BoxSum, ...]
    """One of each box."""


class WeightStore(Configurable):
    """A handle on the store; after `start` it pickles, and works in any process of the run."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        timeout_s: float = 120.0
        """Longest that one push, pull or other operation may take."""
        keep_versions: int = 2
        """How many of the newest versions `prune` keeps."""
        state_dict_key: str = "policy"
        """Prefix of the stored keys: `<state_dict_key>/v<version>/<name>`."""
        transport: Literal["auto", "torchstore", "files"] = "auto"
        """auto: shared memory between processes of one host, torchstore's messages or RDMA between hosts;
        torchstore: that for all; files: through a folder, where all machines share a file system but
        cannot reach each other."""
        rdma: bool = field(default=True, metadata=unless("transport", "files"))
        """Let torchstore use RDMA between hosts that have the hardware."""
        num_threads: int = field(default=2, metadata=unless("transport", "files"))
        """With how many CPU threads each rank copies, beside those that it computes with."""
        folder: str | None = None
        """Of the files, an absolute path; None is `weights` in the run's folder."""

        def __post_init__(self) -> None:
            if not self.timeout_s > 0:
                raise ValueError(f"timeout_s={self.timeout_s} must be positive")
            if self.keep_versions < 1:
                raise ValueError(f"keep_versions={self.keep_versions} must be at least 1")
            if self.num_threads < 1:
                raise ValueError(f"num_threads={self.num_threads} must be at least 1")
            _check_place(self)

    is_collective: ClassVar[bool] = False
    """Whether ranks meet in a push, which then belongs into the thread of their collectives."""

    def __init__(self, *, config: Config, dtype: Dtype = "float32") -> None:
        """`dtype` is what floating-point parameters are sent in: the generators'."""
        self.config = config
        self.dtype = dtype
        self._index: Any = None
        self._strategy: RankStrategy | None = None
        self._hosts: dict[str, str] = {}
        """By volume."""
        self._local: _Local | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_local": None}

    async def start(self, mesh: ProcMesh) -> None:
        """Spawn a storage volume in each process of `mesh`, and the index in its first.

        On the trainer's mesh each rank's push stays within its process. On a mesh of its own
        (one process is enough) the weights outlive the trainer.
        """
        async with self._operation("start") as progress:
            strategy = RankStrategy()
            progress.waiting_for = "the volumes"
            volumes = await BatchVolume.spawn(mesh.size(), mesh, id_func=strategy.get_volume_id)
            first = mesh.slice(**dict.fromkeys(mesh.extent.labels, 0))
            index = first.spawn(f"weight_index_{uuid.uuid4().hex[:8]}", VersionIndex)
            await index.init.call_one(
                strategy=strategy, num_storage_volumes=mesh.size(), storage_volumes=volumes
            )
            self._strategy = await index.get_controller_strategy.call_one()
            if self.config.transport == "auto":
                hosts = await volumes.host.call()
                self._hosts = {
                    volume_id: host
                    for (_, volume_id), (_, host) in zip(
                        (await volumes.get_id.call()).items(), hosts.items(), strict=True
                    )
                }
            self._index = index

    async def stop(self) -> None:
        """Free everything that is stored; the actors end with their mesh. Idempotent."""
        index = self._index
        self.forget()
        if index is None:
            return
        # What is dead or stuck frees its memory when its process ends.
        with contextlib.suppress(WeightStoreError):
            async with self._operation("stop"):
                await index.teardown.call_one()

    def forget(self) -> None:
        """Let go of the store's actors without a word to them, as they may be dead, and of what this process
        keeps of it; `start` may follow. Idempotent."""
        if self._local is not None:
            self._local.close()
            self._local = None
        self._index, self._strategy, self._hosts = None, None, {}

    def discard(self) -> None:
        """Remove what would outlive the processes of a run that ended in whatever way: nothing, here."""

    async def push(
        self, *, version: int, state_dict: Mapping[str, Tensor], buffer_names: Collection[str] = ()
    ) -> Transfer:
        """Send this rank's part of the weights; every rank of the trainer calls it with its own.

        Floating-point tensors are cast to `dtype`, except those in `buffer_names`. What several
        ranks hold is sent once, by the first of them. A tensor that is no DTensor counts as
        equal on all ranks. The tensors must not change before it returns.

        Raises:
            VersionExistsError: this version was pushed before.
            SharedMemoryError: there is not enough for all versions; nothing was written.
            ValueError: names a tensor whose layout cannot be sent.
            WeightTimeoutError: names version, number of tensors, rank and what was awaited.
        """
        index, strategy = self._started()
        async with self._operation("push", version=version, num_tensors=len(state_dict)) as progress:
            prefix, dtype = self._key(version, ""), getattr(torch, self.dtype)
            outgoing = outgoing_parts(state_dict, key_prefix=prefix, dtype=dtype, buffer_names=buffer_names)
            volume, volume_id = strategy.select_storage_volume()
            is_near = self._hosts.get(volume_id) == this_host()
            room = _room(outgoing, config=self.config) if is_near else None
            boxes = [(part.key, part.box, part.is_first) for part in outgoing]
            mine = await index.claim.call_one(version, current_torch_rank(), boxes, room)
            outgoing = list(itertools.compress(outgoing, mine))
            progress.waiting_for = f"volume {volume_id}"
            segment: SegmentRef | None = None
            if is_near:
                segment, sums = await self._here().memory.send(volume, prefix, outgoing)
            else:
                sums = await messages.send(volume, outgoing, copier=self._here().copier, progress=progress)
            progress.waiting_for = "the index"
            await index.register.call_one(version, volume_id, lay_out(outgoing)[0], segment)
        return Transfer(
            num_bytes=sum(part.num_bytes for part in outgoing),
            sums=tuple(
                box_sum(part.key.removeprefix(prefix), part.box, dtype=part.dtype, value=value)
                for part, value in zip(outgoing, sums, strict=True)
            ),
        )

    async def announce(self, version: int) -> int:
        """Make a version readable, after every rank has pushed; returns its number of tensors.

        Raises:
            IncompleteVersionError: a rank's part is missing; names a tensor and the parts there are.
            VersionNotFoundError: nothing of the version was pushed.
            VersionExistsError: it is announced already.
        """
        index, _ = self._started()
        async with self._operation("announce", version=version):
            return await index.announce.call_one(version)

    async def versions(self) -> list[int]:
        """The readable versions, oldest first."""
        index, _ = self._started()
        async with self._operation("versions"):
            return await index.versions.call_one()

    async def pull(self, *, version: int, state_dict: Mapping[str, Tensor]) -> Transfer:
        """Fill this rank's tensors, DTensors or plain, in place.

        Names and shapes are checked before anything is written. If the transfer itself fails,
        some tensors are already new: do not use them, pull again.

        Raises:
            VersionNotFoundError: not announced, or deleted; lists the versions there are.
            WeightMismatchError: a name is missing on one side, or a shape differs; names both.
            WeightTimeoutError: names version, number of tensors, rank and what was awaited.
        """
        index, _ = self._started()
        async with self._operation("pull", version=version, num_tensors=len(state_dict)) as progress:
            by_key = await index.locate.call_one(version)
            stored = {key.removeprefix(self._key(version, "")): boxes for key, boxes in by_key.items()}
            reads = plan_reads(version, parts_of(state_dict), stored)
            progress.waiting_for = f"boxes from volumes {sorted(reads)}"
            sums = await all_of(self._fetch(volume_id, boxes) for volume_id, boxes in reads.items())
        done = list(itertools.chain.from_iterable(reads.values()))
        return Transfer(
            num_bytes=sum(read.destination.nbytes for read in done),
            sums=tuple(
                box_sum(read.name, read.box, dtype=read.destination.dtype, value=value)
                for read, value in zip(done, itertools.chain.from_iterable(sums), strict=True)
            ),
        )

    async def delete(self, version: int) -> None:
        """Forget a version, announced or half pushed, and free its memory; nobody may be pulling it.

        Raises:
            VersionNotFoundError: nothing of it is there; lists the versions there are.
        """
        index, strategy = self._started()
        async with self._operation("delete", version=version) as progress:
            known = await index.remove.call_one(version)
            progress.waiting_for = "the volumes"
            dropped = await strategy.storage_volumes.drop.call(self._key(version, ""))
            if not known and not any(num for _, num in dropped.items()):
                raise VersionNotFoundError(
                    f"version {version} is not in the store; announced are {await index.versions.call_one()}"
                )

    async def prune(self) -> list[int]:
        """Delete all announced versions but the `keep_versions` newest; returns the deleted ones."""
        old = (await self.versions())[: -self.config.keep_versions]
        for version in old:
            await self.delete(version)
        return old

    async def stats(self) -> VolumeStats:
        """What all volumes hold together; to see in tests that memory is given back."""
        _, strategy = self._started()
        async with self._operation("stats"):
            stats = [s for _, s in (await strategy.storage_volumes.stats.call()).items()]
        return VolumeStats(
            num_boxes=sum(s.num_boxes for s in stats), num_bytes=sum(s.num_bytes for s in stats)
        )

    def _key(self, version: int, name: str) -> str:
        return f"{self.config.state_dict_key}/v{version}/{name}"

    def _started(self) -> tuple[Any, RankStrategy]:
        if self._index is None or self._strategy is None:
            raise WeightStoreError("the weight store is not running: call start() first")
        return self._index, self._strategy

    def _here(self) -> _Local:
        if self._local is None:
            self._local = _Local(self.config)
        return self._local

    async def _fetch(self, volume_id: str, reads: Sequence[Read]) -> list[int]:
        _, strategy = self._started()
        volume, copier = strategy.get_storage_volume(volume_id), self._here().copier
        if self.config.transport == "auto" and self._here().memory.can_read(reads):
            return await self._here().memory.fetch(reads)
        if self.config.rdma and has_rdma():
            return await messages.fetch_by_pipe(volume, reads, copier=copier)
        return await messages.fetch(volume, reads, copier=copier)

    def _operation(
        self, name: str, *, version: int | None = None, num_tensors: int = 0
    ) -> contextlib.AbstractAsyncContextManager[Progress]:
        return operation(name, timeout_s=self.config.timeout_s, version=version, num_tensors=num_tensors)


def _room(outgoing: Sequence[Outgoing], *, config: WeightStore.Config) -> Room:
    return Room(
        host=this_host(),
        box_bytes=[part.num_bytes for part in outgoing],
        num_versions=config.keep_versions + 1,
        free_bytes=free_memory(),
    )


class _Local:
    """What a store keeps in one process: threads, and mapped memory."""

    def __init__(self, config: WeightStore.Config) -> None:
        self.copier = Copier(num_threads=config.num_threads)
        self.memory = SharedMemory(copier=self.copier, max_age=4 * (config.keep_versions + 1))

    def close(self) -> None:
        self.copier.close()
        self.memory.close()


def _check_place(config: WeightStore.Config) -> None:
    """Raise ValueError if the folder has no effect, or may not be the same one everywhere."""
    if config.folder is not None and config.transport != "files":
        raise ValueError(
            f"folder={config.folder!r} has no effect with transport={config.transport!r}: "
            "set transport='files' too"
        )
    if config.folder is not None and not Path(config.folder).expanduser().is_absolute():
        raise ValueError(
            f"folder={config.folder!r} must be an absolute path: every machine of the run opens it"
        )
    if not config.state_dict_key or "/" in config.state_dict_key or config.state_dict_key.startswith("."):
        raise ValueError(
            f"state_dict_key={config.state_dict_key!r} must be a name, not empty, without '/' and without "
            "'.' in front"
        )
