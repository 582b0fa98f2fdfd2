"""Weights through memory that two processes of a host share: written once, read in place."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from rl.weights.copying import Copier
from rl.weights.errors import StaleSegmentError, VersionNotFoundError
from rl.weights.plan import Read, copy_of
from rl.weights.segments import MappedSegment, SegmentMaps, SegmentRef, this_host
from rl.weights.shards import Outgoing, lay_out


class SharedMemory:
    """Of one process."""

    def __init__(self, *, copier: Copier, max_age: int) -> None:
        """`max_age` is how many pushes or pulls a segment stays mapped without being used."""
        self._copier = copier
        self._maps = SegmentMaps(max_age=max_age)

    async def send(
        self, volume: Any, key_prefix: str, outgoing: Sequence[Outgoing]
    ) -> tuple[SegmentRef | None, list[int]]:
        """Have the volume reserve memory and fill it; which it is, and the checksums of the boxes."""
        if not outgoing:
            return None, []
        self._maps.begin_operation()
        parts, num_bytes = lay_out(outgoing)
        ref: SegmentRef = await volume.reserve.call_one(key_prefix, parts, num_bytes)
        segment = self._open(ref, outgoing[0].local)
        with segment.holding(ref) as data:
            copies = [
                copy_of(part.box, source=part.local, destination=place.view(data))
                for part, place in zip(outgoing, parts, strict=True)
            ]
            return ref, await self._copier.run(copies)

    def can_read(self, reads: Sequence[Read]) -> bool:
        """Whether this process can map what these lie in, as far as their host tells."""
        segments = [read.stored.segment for read in reads]
        return all(ref is not None and ref.host == this_host() for ref in segments)

    async def fetch(self, reads: Sequence[Read]) -> list[int]:
        """Fill the destinations; the checksums of what they then hold.

        Raises:
            VersionNotFoundError: the version was deleted since it was located.
        """
        self._maps.begin_operation()
        data: dict[SegmentRef, torch.Tensor] = {}
        with ExitStack() as held:
            for read in reads:
                ref = read.stored.segment
                assert ref is not None
                if ref not in data:
                    try:
                        segment = self._open(ref, read.destination)
                        data[ref] = held.enter_context(segment.holding(ref))
                    except StaleSegmentError as error:
                        raise VersionNotFoundError(
                            f"{read.stored.part.key!r} was deleted while it was being pulled: {error}"
                        ) from error
            copies = [read.copy_from(read.within(_view(read, data))) for read in reads]
            return await self._copier.run(copies)

    def close(self) -> None:
        self._maps.close()

    def _open(self, ref: SegmentRef, local: torch.Tensor) -> MappedSegment:
        segment = self._maps.open(ref)
        if local.device.type == "cuda":
            segment.register()
        return segment


def _view(read: Read, data: dict[SegmentRef, torch.Tensor]) -> torch.Tensor:
    assert read.stored.segment is not None
    return read.stored.part.view(data[read.stored.segment])
