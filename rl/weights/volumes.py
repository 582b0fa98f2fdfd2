"""The actors behind the weight store: torchstore's volume and controller, with batched endpoints.

torchstore costs a round trip per key. `BatchVolume` takes and gives the boxes of many keys in
one message, or has them written to its shared memory, and `VersionIndex` registers and finds all
keys of a version at once. Stored is what torchstore itself would store, so its own client reads
the same keys.

A version's life: every rank of the writer calls `VersionIndex.claim`, `BatchVolume.reserve` (then
it writes) or `put_batch`, and `VersionIndex.register`; then `announce`; readers `locate`, and map
what they found or `get_batch`; at last `remove` and `drop`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from monarch.actor import current_rank, endpoint

from rl.distributed.threads import use_threads
from rl.weights.errors import IncompleteVersionError, VersionExistsError, VersionNotFoundError
from rl.weights.monarch_compat import (
    AsyncController,
    MonarchTransportBuffer,
    Request,
    StorageVolume,
    TensorSlice,
    TorchStoreStrategy,
    plain,
)
from rl.weights.room import Room, SharedMemoryRoom
from rl.weights.segments import Segment, SegmentPool, SegmentRef, this_host
from rl.weights.shards import Message, Outgoing, PackedPart, empty_message


@dataclass(frozen=True, kw_only=True, slots=True)
class VolumeStats:
    num_boxes: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """Where one box of a tensor lies."""

    volume_id: str
    part: PackedPart
    segment: SegmentRef | None
    """The shared memory that it lies in, at the part's offset; None if it came in a message."""

    @property
    def box(self) -> TensorSlice:
        return self.part.box


class RankStrategy(TorchStoreStrategy):
    """A volume per process of the mesh that holds them; the ranks of a writer take turns.

    With the volumes on the trainer's own mesh every rank writes to its own process; with one
    volume all write to that one. (torchstore's LocalRankStrategy needs a volume per LOCAL_RANK
    and gives the ranks of different hosts the same one.)
    """

    @classmethod
    def get_volume_id(cls) -> str:
        return str(current_rank().rank)

    def get_client_id(self) -> str:
        return str(current_torch_rank() % len(self.volume_id_to_coord))


def current_torch_rank() -> int:
    """0 where there is no process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class BatchVolume(StorageVolume):
    """torchstore's in-memory volume; a version's boxes are views of the messages they came in, or of
    shared memory that the writers fill."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        use_threads(1)  # Its process may be a trainer's, which computes in another thread.
        super().__init__(*args, **kwargs)
        self._pool = SegmentPool()
        self._segments: dict[str, list[Segment]] = {}
        """In use, by prefix of the version's keys."""

    @endpoint
    async def host(self) -> str:
        """Writers and readers with the same `this_host` share its memory."""
        return this_host()

    @endpoint
    async def reserve(self, key_prefix: str, parts: Sequence[PackedPart], num_bytes: int) -> SegmentRef:
        """Shared memory for the boxes of one writer, which lie in it at their offsets.

        Raises:
            SharedMemoryError: there is not so much.
        """
        segment, ref = self._pool.take(num_bytes)
        self._segments.setdefault(key_prefix, []).append(segment)
        for part in parts:
            await self._keep(part, part.view(segment.data))
        return ref

    @endpoint
    async def put_batch(self, message: Message) -> None:
        """Store every box of the message; the index has seen to it that none is there."""
        for part, tensor in message.tensors():
            await self._keep(part, tensor)

    async def _keep(self, part: PackedPart, tensor: torch.Tensor) -> None:
        buffer = MonarchTransportBuffer()
        await buffer.write_from(tensor)
        await self.store.put(part.key, buffer, Request(tensor_slice=part.box))

    @endpoint
    async def get_batch(self, wanted: Sequence[tuple[str, TensorSlice]]) -> Message:
        """The boxes asked for, each of which must lie within one stored box.

        Raises:
            VersionNotFoundError: a key is not here (any more).
        """
        found: list[Outgoing] = []
        for key, box in wanted:
            if key not in self.store.kv:
                raise VersionNotFoundError(f"{key!r} was deleted while it was being pulled")
            buffer = await self.store.get(key, MonarchTransportBuffer(), Request(tensor_slice=box))
            found.append(Outgoing(key=key, box=box, local=buffer.tensor, dtype=buffer.tensor.dtype))
        message = empty_message(found)
        for (_, destination), box in zip(message.tensors(), found, strict=True):
            destination.copy_(box.local)
        return message

    @endpoint
    async def drop(self, key_prefix: str) -> int:
        """Delete all keys that start so; how many there were."""
        keys = [key for key in self.store.kv if key.startswith(key_prefix)]
        for key in keys:
            await self.store.delete(key)
        self._pool.give_back(self._segments.pop(key_prefix, []))
        return len(keys)

    @endpoint
    async def reset(self) -> None:
        """As torchstore's: forget everything."""
        self.store.reset()
        for segments in self._segments.values():
            for segment in segments:
                segment.close()
        self._segments = {}
        self._pool.close()

    @endpoint
    async def stats(self) -> VolumeStats:
        boxes = [shard["tensor"] for shards in self.store.kv.values() for shard in shards.values()]
        return VolumeStats(num_boxes=len(boxes), num_bytes=sum(box.nbytes for box in boxes))


@dataclass(kw_only=True, slots=True)
class _Version:
    keys: dict[str, TensorSlice] = field(default_factory=dict)
    """Every key with the first box that was claimed of it."""
    claims: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)
    """Which rank sends the box at (key, mesh coordinates)."""
    ranks: set[int] = field(default_factory=set)
    """Those that have claimed."""
    stored: dict[str, list[Stored]] = field(default_factory=dict)
    announced: bool = False


class VersionIndex(AsyncController):
    """torchstore's controller, which also knows the versions and which of them may be read."""

    def __init__(self) -> None:
        super().__init__()
        self._versions: dict[int, _Version] = {}
        self._room = SharedMemoryRoom()

    @endpoint
    async def claim(
        self,
        version: int,
        rank: int,
        boxes: Sequence[tuple[str, TensorSlice, bool]],
        room: Room | None = None,
    ) -> list[bool]:
        """Which of its (key, box, whether it is the first to hold it) the rank has to send.

        Not those that another rank sends already, whose mesh has the same box. `room` is of a rank that
        sends them through shared memory.

        Raises:
            SharedMemoryError: there is not enough for the versions that are kept.
            VersionExistsError: the version is announced, this rank has pushed it before, or
                another rank has the tensor in another shape or on a mesh of another shape.
        """
        state = self._versions.setdefault(version, _Version())
        if state.announced or rank in state.ranks:
            what = "announced" if state.announced else f"pushed by rank {rank}"
            raise VersionExistsError(
                f"version {version} is already {what}: push a new one, or delete this one first"
            )
        for key, box, _ in boxes:
            first = state.keys.setdefault(key, box)
            if (first.mesh_shape, first.global_shape) != (box.mesh_shape, box.global_shape):
                raise VersionExistsError(
                    f"{key!r} was pushed as {first.global_shape} from a mesh of {first.mesh_shape}, and by "
                    f"rank {rank} as {box.global_shape} from {box.mesh_shape}: delete the version first"
                )
        mine = [
            is_first and state.claims.get((key, box.coordinates), rank) == rank
            for key, box, is_first in boxes
        ]
        if room is not None:
            self._room.promise(room, rank=rank, num_bytes=sum(compress(room.box_bytes, mine)))
        state.ranks.add(rank)
        for key, box, _ in compress(boxes, mine):
            state.claims[key, box.coordinates] = rank
        return mine

    @endpoint
    async def register(
        self, version: int, volume_id: str, parts: Sequence[PackedPart], segment: SegmentRef | None
    ) -> None:
        """Note that the volume now holds these boxes of the version, in shared memory or its own.

        Raises:
            VersionNotFoundError: the version was deleted since they were claimed.
        """
        if version not in self._versions:
            raise VersionNotFoundError(f"version {version} was deleted while it was being pushed")
        stored = self._versions[version].stored
        for part in parts:
            plain(AsyncController.notify_put)(self, part.key, Request(tensor_slice=part.box), volume_id)
            stored.setdefault(part.key, []).append(Stored(volume_id=volume_id, part=part, segment=segment))

    @endpoint
    async def announce(self, version: int) -> int:
        """Make the version readable, if all of it is there; returns its number of keys.

        Raises:
            VersionNotFoundError: nothing of it was pushed.
            IncompleteVersionError: names the first tensor that lacks a rank's part.
            VersionExistsError: it is announced already.
        """
        state = self._versions.get(version)
        if state is None or not state.keys:
            raise VersionNotFoundError(f"nothing of version {version} was pushed; {self._listing()}")
        if state.announced:
            raise VersionExistsError(f"version {version} is already announced")
        partial = [key for key in state.keys if not self._is_complete(key)]
        if partial:
            first = state.keys[partial[0]]
            there = sorted(stored.box.coordinates for stored in state.stored.get(partial[0], ()))
            raise IncompleteVersionError(
                f"version {version} is incomplete: {len(partial)} of {len(state.keys)} tensors lack a rank's "
                f"part; of {partial[0]!r} there are mesh coordinates {there} of a mesh of {first.mesh_shape}"
            )
        state.announced = True
        # The newest announcement comes last, whatever its number.
        self._versions[version] = self._versions.pop(version)
        return len(state.keys)

    @endpoint
    async def versions(self) -> list[int]:
        """Readable versions, oldest announcement first."""
        return self._announced()

    @endpoint
    async def locate(self, version: int) -> dict[str, list[Stored]]:
        """Where the boxes of each key of the version lie.

        Raises:
            VersionNotFoundError: the version is not announced; says which are.
        """
        if version not in self._announced():
            raise VersionNotFoundError(f"version {version} is not in the store; {self._listing()}")
        return self._versions[version].stored

    @endpoint
    async def remove(self, version: int) -> bool:
        """Forget the version, so that nobody starts to read it; whether there was one."""
        state = self._versions.pop(version, None)
        for key in state.keys if state else ():
            self.keys_to_storage_volumes.pop(key, None)
        return state is not None

    def _announced(self) -> list[int]:
        return [version for version, state in self._versions.items() if state.announced]

    def _listing(self) -> str:
        pending = sorted(self._versions.keys() - set(self._announced()))
        return f"announced are {self._announced()}, pushed and not announced are {pending}"

    def _is_complete(self, key: str) -> bool:
        volumes = self.keys_to_storage_volumes.get(key)
        return volumes is not None and self._is_dtensor_fully_committed(key, volumes)
