"""Which adapters an engine keeps in memory: rank 0's decisions, which all ranks carry out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from actors.vllm.requests import GeneratorError


class MissingAdapterError(GeneratorError):
    """A request names an adapter that the engine does not hold: it must be pulled, again."""


class AdapterRoomError(GeneratorError):
    """An adapter does not fit beside those that requests use."""


@dataclass(kw_only=True, slots=True)
class _Kept:
    num_bytes: int
    last_use: int


class AdapterShelf:
    """Sizes and uses of the loaded adapters.

    An adapter is dropped when it is not wanted any more, or when another one needs its memory and
    it is the one that was not used for longest; never while a request uses it.
    """

    def __init__(self, *, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept: dict[int, _Kept] = {}
        self._unwanted: set[int] = set()
        self._clock = 0
        self.newest: int | None = None
        """Adapter of requests that name none, which is kept; None: the weights alone."""

    @property
    def versions(self) -> list[int]:
        return list(self._kept)

    def use(self, version: int) -> None:
        """Note that a request names an adapter; raise MissingAdapterError if it is not there."""
        if version not in self._kept:
            raise MissingAdapterError(
                f"adapter {version} is not loaded here: it must be pulled first; loaded are "
                f"{self.versions or 'none'}"
            )
        self._clock += 1
        self._kept[version].last_use = self._clock
        self._unwanted.discard(version)

    def add(self, version: int, *, num_bytes: int, is_newest: bool) -> None:
        self._clock += 1
        self._kept[version] = _Kept(num_bytes=num_bytes, last_use=self._clock)
        self._unwanted.discard(version)
        if is_newest:
            # New requests do not follow the adapter before; those that run keep it.
            before, self.newest = self.newest, version
            if before is not None and before != version:
                self._unwanted.add(before)

    def give_up(self, version: int) -> None:
        """Note that an adapter is not needed once the requests that use it have ended."""
        if version in self._kept:
            self._unwanted.add(version)
            if self.newest == version:
                self.newest = None

    def clear(self) -> None:
        """Forget all adapters."""
        self._kept, self._unwanted, self.newest = {}, set(), None

    def take_unwanted(self, users: Counter[int]) -> tuple[int, ...]:
        """Return adapters that nobody wants or uses, to be dropped now."""
        dropped = tuple(sorted(version for version in self._unwanted if not users[version]))
        for version in dropped:
            self._drop(version)
        return dropped

    def make_room(self, version: int, num_bytes: int, users: Counter[int]) -> tuple[int, ...]:
        """Return the adapters to drop now so that one of `num_bytes` fits.

        Raises:
            AdapterRoomError: names the limit, and the adapters that requests use.
        """
        dropped: list[int] = []
        if version in self._kept:
            # The same number with other bits, such as after a trainer was lost.
            if users[version]:
                raise AdapterRoomError(
                    f"adapter {version} cannot be replaced: {users[version]} requests use it"
                )
            dropped.append(version)
        others = [one for one in self._kept if one != version]
        unused = [one for one in others if not users[one] and one != self.newest]
        unused.sort(key=lambda one: self._kept[one].last_use)
        total = num_bytes + sum(self._kept[one].num_bytes for one in others)
        # Rank 0 alone knows which requests wait for their first step: the turn tells the others.
        for one in unused:
            if total <= self._limit_bytes:
                break
            total -= self._kept[one].num_bytes
            dropped.append(one)
        if total > self._limit_bytes:
            raise AdapterRoomError(self._explain(version, num_bytes, users))
        # Only now: of a load that is refused nothing is dropped.
        for one in dropped:
            self._drop(one)
        return tuple(dropped)

    def _explain(self, version: int, num_bytes: int, users: Counter[int]) -> str:
        held: list[str] = []
        for one in self._kept:
            if not users[one] and one != self.newest:
                continue  # It would have made room.
            who = f"{users[one]} requests" if users[one] else "requests to come"
            held.append(f"{one} ({self._kept[one].num_bytes / 2**20:.4g} MiB, used by {who})")
        return (
            f"adapter {version} of {num_bytes / 2**20:.4g} MiB does not fit into "
            f"generator.adapter_memory_gib={self._limit_bytes / 2**30:g} beside "
            f"{', '.join(held) or 'nothing'}: raise the limit, or let requests end first"
        )

    def _drop(self, version: int) -> None:
        del self._kept[version]
        self._unwanted.discard(version)
        if self.newest == version:
            self.newest = None
