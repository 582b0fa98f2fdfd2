"""Whether the shared memory of a host holds the versions that are kept, asked before the first is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl.weights.errors import SharedMemoryError


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What one rank wants to put into the memory of its host."""

    host: str
    box_bytes: Sequence[int]
    """Of each of its boxes; some of them other ranks may send."""
    num_versions: int
    """Kept, and the one that is being written."""
    free_bytes: int
    """On the host, now."""


class SharedMemoryRoom:
    """What the ranks of each host were promised. Memory counts as it was when the first of them asked:
    what is written afterwards would be counted twice."""

    def __init__(self) -> None:
        self._free_bytes: dict[str, int] = {}
        self._promised: dict[str, dict[int, int]] = {}

    def promise(self, room: Room, *, rank: int, num_bytes: int) -> None:
        """Keep room for so many bytes of each version.

        Raises:
            SharedMemoryError: says how much all ranks of the host need, what is free, and what to do.
        """
        free = self._free_bytes.setdefault(room.host, room.free_bytes)
        ranks = self._promised.setdefault(room.host, {})
        version_bytes = sum(ranks.values()) - ranks.get(rank, 0) + max(ranks.get(rank, 0), num_bytes)
        needed = room.num_versions * version_bytes
        if needed > free:
            raise SharedMemoryError(
                f"weights need {needed / 1e9:.3g} GB of shared memory ({room.num_versions} versions of "
                f"{version_bytes / 1e9:.3g} GB: those kept and the one being written), and "
                f"{free / 1e9:.3g} GB of memory are free: lower weights.keep_versions (now "
                f"{room.num_versions - 1}), or send them through files (weights.transport='files')"
            )
        ranks[rank] = max(ranks.get(rank, 0), num_bytes)
