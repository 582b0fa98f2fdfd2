"""The store's actors: volumes that hold boxes, and the index that knows the versions.

torchstore costs a round trip per key. `Volume` takes and gives the boxes of many keys in one message, or
has them written to its shared memory, and `VersionIndex` registers and finds all keys of a version at
once.

Every rank of the writer calls `VersionIndex.claim`, then `Volume.reserve` (and writes) or `put_batch`,
then `VersionIndex.register`. After `announce`, readers call `locate` and map the shared memory or call
`get_batch`. `remove` and `drop` delete the version.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from monarch.actor import Actor, current_rank, endpoint
from torchstore.storage_volume import StorageVolume
from torchstore.transport import TensorSlice

from rl.distributed.runtime import use_threads
from rl.weights.plan import Message, PackedPart, Part, Stored, within_box
from rl.weights.shared_memory import Segment, SegmentPool, SegmentRef, this_host
from rl.weights.types import IncompleteVersionError, VersionExistsError, VersionNotFoundError


def key_of(version: int, name: str) -> str:
    """Return torchstore's key of a tensor."""
    return f"v{version}/{name}"


class Volume(StorageVolume):
    """torchstore's in-memory volume with batched endpoints and shared memory.

    Stored tensors are views of the messages that brought them, or of shared memory that writers fill.
    """

    def __init__(self) -> None:
        use_threads(1)  # The process may be a trainer's, which computes in another thread.
        super().__init__(id_func=lambda: str(current_rank().rank))
        self._pool = SegmentPool()
        self._segments: dict[int, list[Segment]] = {}
        """Segments in use, by version."""

    @endpoint
    async def host(self) -> str:
        """Return `this_host()`, which is equal in processes that can share memory."""
        return this_host()

    @endpoint
    async def reserve(
        self, version: int, parts: Sequence[PackedPart], num_bytes: int, num_versions: int
    ) -> SegmentRef:
        """Reserve shared memory for one writer's boxes.

        Raises:
            SharedMemoryError: there is too little for `num_versions` versions.
        """
        segment, ref = self._pool.take(num_bytes, num_versions=num_versions)
        self._segments.setdefault(version, []).append(segment)
        for part in parts:
            self._keep(version, part, part.view(segment.data))
        return ref

    @endpoint
    async def put_batch(self, version: int, message: Message) -> None:
        """Store every box of the message; the index guarantees that they are new."""
        for part, tensor in zip(message.parts, message.tensors(), strict=True):
            self._keep(version, part, tensor)

    def _keep(self, version: int, part: PackedPart, tensor: torch.Tensor) -> None:
        boxes = self.store.kv.setdefault(key_of(version, part.name), {})
        boxes[part.box.coordinates] = {"slice": part.box, "tensor": tensor}

    @endpoint
    async def get_batch(self, version: int, wanted: Sequence[tuple[str, TensorSlice]]) -> Message:
        """Return the wanted boxes, each of which must lie within the stored box of equal coordinates.

        Raises:
            VersionNotFoundError: the version was deleted.
        """
        found: list[Part] = []
        for name, box in wanted:
            stored = self.store.kv.get(key_of(version, name), {}).get(box.coordinates)
            if stored is None:
                raise VersionNotFoundError(f"version {version} was deleted while it was being pulled")
            local = within_box(stored["tensor"], stored["slice"], box)
            found.append(Part(name=name, box=box, local=local, dtype=local.dtype))
        message = Message.empty(found)
        for destination, part in zip(message.tensors(), found, strict=True):
            destination.copy_(part.local)
        return message

    @endpoint
    async def drop(self, version: int) -> None:
        """Delete a version."""
        for key in [key for key in self.store.kv if key.startswith(key_of(version, ""))]:
            del self.store.kv[key]
        self._pool.give_back(self._segments.pop(version, []))

    @endpoint
    async def reset(self) -> None:
        """Delete everything."""
        self.store.reset()
        for segment in itertools.chain.from_iterable(self._segments.values()):
            segment.close()
        self._segments = {}
        self._pool.close()


@dataclass(kw_only=True, slots=True)
class _Version:
    boxes: dict[str, TensorSlice] = field(default_factory=dict)
    """Every tensor's name with the first box that was claimed of it."""
    claims: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)
    """The rank that sends the box at (name, mesh coordinates)."""
    ranks: set[int] = field(default_factory=set)
    """Ranks that have claimed their boxes."""
    stored: dict[str, list[Stored]] = field(default_factory=dict)
    announced: bool = False

    def lacks(self, name: str) -> int:
        """Return the number of the tensor's boxes that no rank has stored."""
        return math.prod(self.boxes[name].mesh_shape) - len(self.stored.get(name, ()))


class VersionIndex(Actor):
    """The versions, where their boxes lie, and which versions are readable."""

    def __init__(self) -> None:
        self._versions: dict[int, _Version] = {}

    @endpoint
    async def claim(self, version: int, rank: int, boxes: Sequence[tuple[str, TensorSlice]]) -> list[bool]:
        """Return for each of the rank's (name, box) whether it has to send the box: no other rank does.

        Raises:
            VersionExistsError: the version is announced, this rank has pushed the version before, or
                another rank has the tensor in another shape or on a mesh of another shape.
        """
        state = self._versions.setdefault(version, _Version())
        if state.announced or rank in state.ranks:
            what = "announced" if state.announced else f"pushed by rank {rank}"
            raise VersionExistsError(
                f"version {version} is already {what}: push a new one, or delete this one first"
            )
        mine = []
        for name, box in boxes:
            first = state.boxes.setdefault(name, box)
            if (first.mesh_shape, first.global_shape) != (box.mesh_shape, box.global_shape):
                raise VersionExistsError(
                    f"{name!r} was pushed as {first.global_shape} from a mesh of {first.mesh_shape}, and by "
                    f"rank {rank} as {box.global_shape} from {box.mesh_shape}: delete the version first"
                )
            mine.append(state.claims.setdefault((name, box.coordinates), rank) == rank)
        state.ranks.add(rank)
        return mine

    @endpoint
    async def register(
        self, version: int, volume: int, parts: Sequence[PackedPart], place: SegmentRef | Path | None
    ) -> None:
        """Record that the volume holds these boxes, or that they are in `place`.

        Raises:
            VersionNotFoundError: the version was deleted after the boxes were claimed.
        """
        if version not in self._versions:
            raise VersionNotFoundError(f"version {version} was deleted while it was being pushed")
        stored = self._versions[version].stored
        for part in parts:
            stored.setdefault(part.name, []).append(Stored(volume=volume, part=part, place=place))

    @endpoint
    async def announce(self, version: int) -> int:
        """Make a complete version readable; return its number of tensors.

        Raises:
            VersionNotFoundError: nothing of the version was pushed.
            IncompleteVersionError: names the first tensor that lacks a rank's part.
            VersionExistsError: the version is already announced.
        """
        state = self._versions.get(version)
        if state is None or not state.boxes:
            raise VersionNotFoundError(f"nothing of version {version} was pushed; {self._listing()}")
        if state.announced:
            raise VersionExistsError(f"version {version} is already announced")
        partial = [name for name in state.boxes if state.lacks(name)]
        if partial:
            raise IncompleteVersionError(
                f"version {version} is incomplete: {len(partial)} of {len(state.boxes)} tensors lack a rank's "
                f"part, such as {partial[0]!r}"
            )
        state.announced = True
        # The newest announcement comes last, whatever its number.
        self._versions[version] = self._versions.pop(version)
        return len(state.boxes)

    @endpoint
    async def versions(self) -> list[int]:
        """Return the readable versions, oldest announcement first."""
        return self._announced()

    @endpoint
    async def locate(self, version: int) -> dict[str, list[Stored]]:
        """Return where the boxes of each tensor of a readable version lie, by name.

        Raises:
            VersionNotFoundError: the version is not announced; lists the versions there are.
        """
        if version not in self._announced():
            raise VersionNotFoundError(f"version {version} is not in the store; {self._listing()}")
        return self._versions[version].stored

    @endpoint
    async def remove(self, version: int) -> None:
        """Forget the version, so that no reader finds it.

        Raises:
            VersionNotFoundError: nothing of the version was pushed; lists the versions there are.
        """
        if self._versions.pop(version, None) is None:
            raise VersionNotFoundError(f"version {version} is not in the store; {self._listing()}")

    def _announced(self) -> list[int]:
        return [version for version, state in self._versions.items() if state.announced]

    def _listing(self) -> str:
        pending = sorted(self._versions.keys() - set(self._announced()))
        return f"announced are {self._announced()}, pushed and not announced are {pending}"
