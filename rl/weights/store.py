"""Weights on their way from trainer to generators, under versions.

    store = WeightStore.Config().build(dtype="bfloat16")     # controller
    await store.start(mesh)                                  # now it can be handed to actors

    await store.push(version=3, state_dict=...)              # every trainer rank
    await store.announce(3)                                  # controller, after all of them
    await store.pull(version=3, state_dict=...)              # every generator rank, in place
    await store.prune()                                      # controller, after all of them

A version is never overwritten, cannot be read before it is announced, and is deleted only
when nobody reads it. Trainer and generator may be laid out differently: what travels are boxes
of tensors, and a reader takes the intersections with its own.

Every operation has the deadline `timeout_s`; its error names operation, version, rank, number
of tensors and what was awaited.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncIterator, Awaitable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError, ProcMesh
from torch import Tensor

from rl.config.configurable import Configurable
from rl.weights.errors import VersionNotFoundError, WeightMismatchError, WeightStoreError, WeightTimeoutError
from rl.weights.monarch_compat import LocalClient, TensorSlice, get_slice_intersection
from rl.weights.shards import Part, batches, num_elements, pack, parts_of, within_box
from rl.weights.volumes import (
    BatchVolume,
    RankStrategy,
    Stored,
    VersionIndex,
    VolumeStats,
    current_torch_rank,
)

T = TypeVar("T")

Dtype = Literal["float32", "bfloat16", "float16"]

MAX_MESSAGE_BYTES = 16 * 2**20
"""A version goes in as few messages as this allows. The allocator reuses memory of this size;
larger messages are slower, because every page of them is touched for the first time."""


@dataclass(kw_only=True, slots=True)
class _Progress:
    """What an operation is at, for the error of its deadline."""

    num_tensors: int = 0
    waiting_for: str = "the index"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    """One box to fetch, and where it goes."""

    key: str
    box: TensorSlice
    destination: Tensor


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
        transport: Literal["torchstore", "files"] = "torchstore"
        """files: through a folder, where all machines share a file system but cannot reach each other."""
        folder: str | None = None
        """Of the files, an absolute path; None is `weights` in the run's folder."""

        def __post_init__(self) -> None:
            if not self.timeout_s > 0:
                raise ValueError(f"timeout_s={self.timeout_s} must be positive")
            if self.keep_versions < 1:
                raise ValueError(f"keep_versions={self.keep_versions} must be at least 1")
            _check_place(self)

    def __init__(self, *, config: Config, dtype: Dtype = "float32") -> None:
        """`dtype` is what floating-point parameters are sent in: the generators'."""
        self.config = config
        self.dtype = dtype
        self._index: Any = None
        self._strategy: RankStrategy | None = None

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
            self._index = index

    async def stop(self) -> None:
        """Free everything that is stored; the actors end with their mesh. Idempotent."""
        if self._index is None:
            return
        index, self._index, self._strategy = self._index, None, None
        # What is dead or stuck frees its memory when its process ends.
        with contextlib.suppress(WeightStoreError):
            async with self._operation("stop"):
                await index.teardown.call_one()

    def discard(self) -> None:
        """Remove what would outlive the processes of a run that ended in whatever way: nothing, here."""

    async def push(
        self, *, version: int, state_dict: Mapping[str, Tensor], buffer_names: Collection[str] = ()
    ) -> int:
        """Send this rank's part of the weights; every rank of the trainer calls it with its own.

        Floating-point tensors are cast to `dtype`, except those in `buffer_names`. What several
        ranks hold is sent once, by the first of them. A tensor that is no DTensor counts as
        equal on all ranks.

        Returns:
            Bytes that this rank sent.

        Raises:
            VersionExistsError: this version was pushed before.
            ValueError: names a tensor whose layout cannot be sent.
            WeightTimeoutError: names version, number of tensors, rank and what was awaited.
        """
        index, strategy = self._started()
        dtype = getattr(torch, self.dtype)
        parts = [
            (
                self._key(version, part.name),
                part.box,
                part.local,
                part.dtype_to_send(dtype, buffer_names=buffer_names),
            )
            for part in parts_of(state_dict)
        ]
        volume, volume_id = strategy.select_storage_volume()
        num_bytes = 0
        async with self._operation("push", version=version, num_tensors=len(state_dict)) as progress:
            claimed = await index.claim.call_one(
                version, current_torch_rank(), [(key, box) for key, box, _, _ in parts]
            )
            parts = list(itertools.compress(parts, claimed))
            for batch in batches(parts, max_bytes=MAX_MESSAGE_BYTES):
                message = pack(batch)
                progress.waiting_for = f"volume {volume_id} to take {message.data.nbytes} bytes"
                await volume.put_batch.call_one(message)
                num_bytes += message.data.nbytes
            progress.waiting_for = "the index"
            await index.register.call_one(version, volume_id, [(key, box) for key, box, _, _ in parts])
        return num_bytes

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

    async def pull(self, *, version: int, state_dict: Mapping[str, Tensor]) -> int:
        """Fill this rank's tensors, DTensors or plain, in place; returns the bytes received.

        Names and shapes are checked before anything is written. If the transfer itself fails,
        some tensors are already new: do not use them, pull again.

        Raises:
            VersionNotFoundError: not announced, or deleted; lists the versions there are.
            WeightMismatchError: a name is missing on one side, or a shape differs; names both.
            WeightTimeoutError: names version, number of tensors, rank and what was awaited.
        """
        index, strategy = self._started()
        async with self._operation("pull", version=version, num_tensors=len(state_dict)) as progress:
            stored = await index.locate.call_one(version)
            reads = self._plan(version, stored, state_dict)
            progress.waiting_for = f"boxes from volumes {sorted(reads)}"
            return sum(
                await _all(
                    self._read(strategy.get_storage_volume(volume_id), boxes)
                    for volume_id, boxes in reads.items()
                )
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
        """What all volumes hold together."""
        _, strategy = self._started()
        async with self._operation("stats"):
            stats = [s for _, s in (await strategy.storage_volumes.stats.call()).items()]
        return VolumeStats(
            num_boxes=sum(s.num_boxes for s in stats), num_bytes=sum(s.num_bytes for s in stats)
        )

    def torchstore_client(self) -> LocalClient:
        """torchstore's own client, to look at the keys `<state_dict_key>/v<version>/<name>`."""
        index, strategy = self._started()
        return LocalClient(controller=index, strategy=strategy)

    def _key(self, version: int, name: str) -> str:
        return f"{self.config.state_dict_key}/v{version}/{name}"

    def _started(self) -> tuple[Any, RankStrategy]:
        if self._index is None or self._strategy is None:
            raise WeightStoreError("the weight store is not running: call start() first")
        return self._index, self._strategy

    def _plan(
        self,
        version: int,
        stored: Mapping[str, Sequence[Stored]],
        state_dict: Mapping[str, Tensor],
    ) -> dict[str, list[_Read]]:
        """What to read from which volume to fill the tensors."""
        names = {key.removeprefix(self._key(version, "")) for key in stored}
        check_names(version, stored=names, wanted=state_dict.keys())
        reads: dict[str, list[_Read]] = {}
        for part in parts_of(state_dict):
            key = self._key(version, part.name)
            for volume_id, read in _reads_of(key, part, stored[key]):
                reads.setdefault(volume_id, []).append(read)
        return reads

    async def _read(self, volume: Any, reads: Sequence[_Read]) -> int:
        num_bytes = 0
        parts = [(read.key, read.box, read.destination, read.destination.dtype) for read in reads]
        for batch in batches(parts, max_bytes=MAX_MESSAGE_BYTES):
            message = await volume.get_batch.call_one([(key, box) for key, box, _, _ in batch])
            for (_, received), (_, _, destination, _) in zip(message.tensors(), batch, strict=True):
                destination.copy_(received)
            num_bytes += message.data.nbytes
        return num_bytes

    @contextlib.asynccontextmanager
    async def _operation(
        self, name: str, *, version: int | None = None, num_tensors: int = 0
    ) -> AsyncIterator[_Progress]:
        """Hold the body to the deadline, and give remote errors their own type again."""
        progress = _Progress()
        try:
            async with asyncio.timeout(self.config.timeout_s):
                yield progress
        except TimeoutError as error:
            if isinstance(error, WeightStoreError):
                raise
            raise WeightTimeoutError(
                f"{_describe(name, version, num_tensors)} not finished within timeout_s="
                f"{self.config.timeout_s:g}: waited for {progress.waiting_for}"
            ) from error
        except ActorError as error:
            if isinstance(error.exception, WeightStoreError):
                raise error.exception from None
            raise
        except SupervisionError as error:
            raise WeightStoreError(
                f"{_describe(name, version, num_tensors)} failed: lost {progress.waiting_for}: {error}"
            ) from error


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


def check_names(version: int, *, stored: Set[str], wanted: Set[str]) -> None:
    """Raise WeightMismatchError unless the tensors of a version are those asked for."""
    if stored != wanted:
        raise WeightMismatchError(
            f"version {version} holds other tensors than asked for: "
            f"missing {_few(wanted - stored)}, not asked for {_few(stored - wanted)}"
        )


def _describe(operation: str, version: int | None, num_tensors: int) -> str:
    of_version = "" if version is None else f" of version {version}"
    of_tensors = f" ({num_tensors} tensors)" if num_tensors else ""
    return f"weight store: {operation}{of_version}{of_tensors} on rank {current_torch_rank()}"


def _reads_of(key: str, part: Part, stored: Sequence[Stored]) -> Iterator[tuple[str, _Read]]:
    """What of the stored boxes fills the part: volume id and read.

    Raises:
        WeightMismatchError: the global shapes differ, or the boxes do not cover the part.
    """
    num_covered = 0
    for source in stored:
        if source.box.global_shape != part.box.global_shape:
            raise WeightMismatchError(
                f"{part.name!r} has shape {tuple(source.box.global_shape)} in the store "
                f"and {tuple(part.box.global_shape)} here"
            )
        common = get_slice_intersection(source.box, part.box)
        if common is not None:
            num_covered += num_elements(common)
            destination = within_box(part.local, part.box, common)
            yield source.volume_id, _Read(key=key, box=common, destination=destination)
    if num_covered != num_elements(part.box):
        raise WeightMismatchError(
            f"{part.name!r}: the store covers {num_covered} of the {num_elements(part.box)} elements here"
        )


async def _all(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Their results, once all are done; the first error only then, so that none is left running."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


def _few(names: Iterable[str]) -> str:
    listed = sorted(names)
    return (
        ", ".join(map(repr, listed[:5])) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
        or "none"
    )
