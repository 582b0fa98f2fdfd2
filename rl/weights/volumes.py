"""The actors behind the weight store: torchstore's volume and controller, with batched endpoints.

torchstore costs a round trip per key. `BatchVolume` takes and gives the boxes of many keys in
one message, `VersionIndex` registers and finds all keys of a version at once. Stored is what
torchstore itself would store, so its own client reads the same keys.

A version's life: every rank of the writer calls `VersionIndex.claim`, `BatchVolume.put_batch`
and `VersionIndex.register`; then `announce`; readers `locate` and `get_batch`; at last `remove`
and `drop`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
from rl.weights.shards import Message, pack


@dataclass(frozen=True, kw_only=True, slots=True)
class VolumeStats:
    num_boxes: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """Where one box of a tensor lies."""

    volume_id: str
    box: TensorSlice


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
    """torchstore's in-memory volume; a version's boxes are views of the messages they came in."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        use_threads(1)  # Its process may be a trainer's, which computes in another thread.
        super().__init__(*args, **kwargs)

    @endpoint
    async def put_batch(self, message: Message) -> None:
        """Store every box of the message; the index has seen to it that none is there."""
        for part, tensor in message.tensors():
            buffer = MonarchTransportBuffer()
            await buffer.write_from(tensor)
            await self.store.put(part.key, buffer, Request(tensor_slice=part.box))

    @endpoint
    async def get_batch(self, wanted: Sequence[tuple[str, TensorSlice]]) -> Message:
        """The boxes asked for, each of which must lie within one stored box.

        Raises:
            VersionNotFoundError: a key is not here (any more).
        """
        found: list[tuple[str, TensorSlice, torch.Tensor, torch.dtype]] = []
        for key, box in wanted:
            if key not in self.store.kv:
                raise VersionNotFoundError(f"{key!r} was deleted while it was being pulled")
            buffer = await self.store.get(key, MonarchTransportBuffer(), Request(tensor_slice=box))
            found.append((key, box, buffer.tensor, buffer.tensor.dtype))
        return pack(found)

    @endpoint
    async def drop(self, key_prefix: str) -> int:
        """Delete all keys that start so; how many there were."""
        keys = [key for key in self.store.kv if key.startswith(key_prefix)]
        for key in keys:
            await self.store.delete(key)
        return len(keys)

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
    announced: bool = False


class VersionIndex(AsyncController):
    """torchstore's controller, which also knows the versions and which of them may be read."""

    def __init__(self) -> None:
        super().__init__()
        self._versions: dict[int, _Version] = {}

    @endpoint
    async def claim(self, version: int, rank: int, boxes: Sequence[tuple[str, TensorSlice]]) -> list[bool]:
        """Which of its (key, box) the rank has to send: those that no other rank sends already.

        Raises:
            VersionExistsError: the version is announced, this rank has pushed it before, or
                another rank has the tensor in another shape or on a mesh of another shape.
        """
        state = self._versions.setdefault(version, _Version())
        if state.announced or rank in state.ranks:
            what = "announced" if state.announced else f"pushed by rank {rank}"
            raise VersionExistsError(
                f"version {version} is already {what}: push a new one, or delete this one first"
            )
        for key, box in boxes:
            first = state.keys.setdefault(key, box)
            if (first.mesh_shape, first.global_shape) != (box.mesh_shape, box.global_shape):
                raise VersionExistsError(
                    f"{key!r} was pushed as {first.global_shape} from a mesh of {first.mesh_shape}, and by "
                    f"rank {rank} as {box.global_shape} from {box.mesh_shape}: delete the version first"
                )
        state.ranks.add(rank)
        return [state.claims.setdefault((key, box.coordinates), rank) == rank for key, box in boxes]

    @endpoint
    async def register(self, version: int, volume_id: str, boxes: Sequence[tuple[str, TensorSlice]]) -> None:
        """Note that the volume now holds these (key, box) of the version.

        Raises:
            VersionNotFoundError: the version was deleted since they were claimed.
        """
        if version not in self._versions:
            raise VersionNotFoundError(f"version {version} was deleted while it was being pushed")
        for key, box in boxes:
            plain(AsyncController.notify_put)(self, key, Request(tensor_slice=box), volume_id)

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
            there = sorted(stored.box.coordinates for stored in self._stored(partial[0]))
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
        return {key: self._stored(key) for key in self._versions[version].keys}

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

    def _stored(self, key: str) -> list[Stored]:
        return [
            Stored(volume_id=volume_id, box=box)
            for volume_id, info in self.keys_to_storage_volumes.get(key, {}).items()
            for box in info.tensor_slices
        ]
