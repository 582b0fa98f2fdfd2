"""Random states of a run's generators and reward processes, by calls to them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from itertools import chain

from actors.calls import Group
from rl.errors import RunError

logger = logging.getLogger(__name__)


class ActorRandomStates:
    """`rl.random_states.RandomStates` of actors; a rank's name is `<group>-<rank>`."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups

    async def random_states(self) -> dict[str, bytes]:
        """Of the groups that answer; one that does not is no reason to stop."""
        of_groups = await asyncio.gather(*map(self._states_of, self.groups))
        return dict(chain.from_iterable(states.items() for states in of_groups))

    async def restore_random_states(self, states: Mapping[str, bytes]) -> None:
        await asyncio.gather(*(self._restore(group, states) for group in self.groups))

    async def _states_of(self, group: Group) -> dict[str, bytes]:
        try:
            ranks = await group.call("random_states", limit="close_s")
        except RunError as error:
            logger.warning("random states of %s are not saved: %s", group.name, error)
            return {}
        return {f"{group.name}-{rank}": states for rank, states in enumerate(ranks)}

    async def _restore(self, group: Group, states: Mapping[str, bytes]) -> None:
        prefix = f"{group.name}-"
        of_group = {int(n.removeprefix(prefix)): s for n, s in states.items() if n.startswith(prefix)}
        if not of_group:
            return
        try:
            await group.call("restore_random_states", of_group, limit="close_s")
        except RunError as error:
            logger.warning("random states of %s are not restored: %s", group.name, error)
