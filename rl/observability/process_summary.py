"""What the processes of a run are doing, in few lines: those of a role that do the same are one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rl.observability.process_state import ProcessState

MAX_WHATS = 3
"""Activities of a process that are named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessLine:
    """Processes of a role that do the same."""

    who: str
    """Such as "trainer 0-3"; without ranks where the role has one process."""
    does: str
    for_: str
    """How long the first of them has done so, such as "0.4 s"."""
    is_idle: bool


def summarise(states: Iterable[ProcessState]) -> list[ProcessLine]:
    """In the order of the roles' first process; within a role those of lower ranks first."""
    groups: dict[tuple[str, str], list[ProcessState]] = {}
    for state in states:
        groups.setdefault((state.role, _does(state)), []).append(state)
    num_of_role: dict[str, int] = {}
    for (role, _), members in groups.items():
        num_of_role[role] = num_of_role.get(role, 0) + len(members)
    order = {role: place for place, role in enumerate(num_of_role)}
    return [
        ProcessLine(
            who=role if num_of_role[role] == 1 else f"{role} {rank_ranges([m.rank for m in members])}",
            does=does,
            for_=f"{max(map(_for_s, members)):.1f} s",
            is_idle=not members[0].doing,
        )
        for (role, does), members in sorted(groups.items(), key=lambda group: order[group[0][0]])
    ]


def rank_ranges(ranks: Sequence[int]) -> str:
    """0, 1, 2, 5 as "0-2,5"."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def _does(state: ProcessState) -> str:
    if not state.doing:
        return "waits to be asked"
    whats = [
        f"{d.what}{'' if d.num == 1 else f' ({d.num} times)'}"
        f"{'' if d.version is None else f' of version {d.version}'}"
        for d in state.doing
    ]
    more = len(whats) - MAX_WHATS
    return ", ".join(whats[:MAX_WHATS]) + (f" and {more} more" if more > 0 else "")


def _for_s(state: ProcessState) -> float:
    return state.ago_s(state.doing[-1].since if state.doing else state.idle)
