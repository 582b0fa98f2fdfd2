"""Branches of a recorded episode: its conversations, with their roles and causes.

main         the conversation that works on the task, also after its history was rewritten
sub-agent    a conversation of its own, with another opening
auxiliary    one reply of the harness's own: a title, a summary
superseded   a reply that nothing continues: it was sampled again, a later request goes on without
             it, or no client has got it
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from rl.agents.endpoint.record import EpisodeRecord
from rl.agents.endpoint.turns import RecordedTurn
from rl.types import Branch, BranchRole, Turn

ROLES: tuple[BranchRole, ...] = get_args(BranchRole)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Conversations:
    """The turns of an episode in the order of their requests, and its branches."""

    turns: tuple[Turn, ...]
    branches: tuple[Branch, ...]


def list_conversations(record: EpisodeRecord, *, trained: Collection[BranchRole]) -> Conversations:
    """Return the turns and branches of a record; branches of the roles `trained` are trained on."""
    numbers = sorted(record.turns)
    if not numbers:
        return Conversations(turns=(), branches=())
    places = {number: place for place, number in enumerate(numbers)}
    roles = _assign_roles(record)
    causes = _name_causes(record)
    superseded = _find_superseded(record)
    # A conversation also ends where everything that continues it is superseded.
    used = [number for number in numbers if number not in superseded]
    ends = superseded | (set(used) - {record.turns[number].plan.parent for number in used})

    branches = []
    known: set[int] = set()
    for end in sorted(ends):
        path = _list_path(record, end)
        first_new = next(number for number in path if number not in known)
        known.update(path)
        role = "superseded" if end in superseded else roles[path[0]]
        branches.append(
            Branch(
                turns=tuple(places[number] for number in path),
                role=role,
                cause=causes[first_new],
                is_trained=role in trained,
            )
        )
    turns = tuple(record.turns[number].turn for number in numbers)
    return Conversations(turns=turns, branches=tuple(branches))


def _list_path(record: EpisodeRecord, leaf: int) -> list[int]:
    path = [leaf]
    while (parent := record.turns[path[-1]].plan.parent) is not None:
        path.append(parent)
    return path[::-1]


def _find_origins(record: EpisodeRecord) -> dict[int, int | None]:
    """Return for each turn that begins a conversation the turn of the one that it changed.

    A request that got no reply is no conversation: what was made beside it or after it, with the
    same opening, belongs to the first of these that got one.
    """
    origins: dict[int, int | None] = {}
    firsts: dict[tuple[str, bytes], int] = {}
    for number in sorted(record.turns):
        plan = record.turns[number].plan
        if plan.parent is not None:
            continue
        first = firsts.setdefault((plan.role, plan.digests.opening), number)
        origin = plan.origin
        if origin is not None and origin not in record.turns:
            origin = None if first == number else first
        origins[number] = origin
    return origins


def _list_siblings(record: EpisodeRecord) -> list[list[RecordedTurn]]:
    """Return the turns that ask the same of the same conversation, in the order of the requests."""
    siblings = defaultdict(list)
    for number in sorted(record.turns):
        recorded = record.turns[number]
        plan = recorded.plan
        # Conversations of two roles may begin alike.
        role = plan.role if plan.parent is None else ""
        siblings[plan.parent, role, plan.digests.full[-1]].append(recorded)
    return [*siblings.values()]


def _find_superseded(record: EpisodeRecord) -> set[int]:
    """Return the turns that nothing continues, and that the agent has not used.

    Where none of several samples was continued, the last one that a client has got counts. Samples
    that were under way at the same time as one that counts are alternatives to it, and count too.
    """
    continued = {recorded.plan.parent for recorded in record.turns.values()}
    places = _list_places(record)
    superseded = (record.undelivered | _find_rejected(record, places)) - continued
    for siblings in _list_siblings(record):
        chosen = [one for one in siblings if one.plan.number in continued]
        if not chosen:
            delivered = [one for one in siblings if one.plan.number not in record.undelivered]
            chosen = delivered[-1:]
        for one in siblings:
            if not any(_were_together(one, other, places) for other in chosen):
                superseded.add(one.plan.number)
    return superseded


def _were_together(one: RecordedTurn, other: RecordedTurn, places: Mapping[int, int]) -> bool:
    """Return whether two turns were under way at the same time, as a turn and itself were."""
    first, last = sorted((one.plan, other.plan), key=lambda plan: plan.number)
    return places[first.number] >= last.num_recorded


def _find_rejected(record: EpisodeRecord, places: Mapping[int, int]) -> set[int]:
    """Return the turns whose messages a later request repeats and goes on without the reply.

    Agents do so after a reply that they could not read: they say what is wrong, and ask again. What
    follows from the assistant or a tool says nothing: the reply was used in other words.
    """
    asked = defaultdict(list)
    for number, recorded in record.turns.items():
        asked[recorded.plan.digests.full[-1]].append(number)
    rejected: set[int] = set()
    for recorded in record.turns.values():
        plan = recorded.plan
        num_known = len(plan.digests.full) - len(plan.messages)
        for place, message in enumerate(plan.messages[1:], start=num_known):
            if message.role in ("user", "system"):
                for number in asked.get(plan.digests.full[place], ()):
                    if places[number] < plan.num_recorded:
                        rejected.add(number)
    return rejected


def _list_places(record: EpisodeRecord) -> dict[int, int]:
    """Return the place of each turn in the order in which they were answered."""
    return {number: place for place, number in enumerate(record.turns)}


def _name_causes(record: EpisodeRecord) -> dict[int, str]:
    """Return why each turn begins a branch; "" if it does not, or is the first."""
    causes: dict[int, str] = {}
    for siblings in _list_siblings(record):
        for recorded in siblings[1:]:
            causes[recorded.plan.number] = "again"

    origins = _find_origins(record)
    num_roots = 0
    children: set[int] = set()
    for number in sorted(record.turns):
        plan = record.turns[number].plan
        if plan.parent is None:
            # The first conversation needs no cause.
            other = "agent" if num_roots else ""
            causes.setdefault(number, other if origins[number] is None else plan.relation)
            num_roots += 1
        else:
            causes.setdefault(number, "fork" if plan.parent in children else "")
            children.add(plan.parent)
    return causes


def _assign_roles(record: EpisodeRecord) -> dict[int, BranchRole]:
    """Return the role of each conversation by the number of its first turn."""
    openings = _list_openings(record)
    main = _choose_main(record, openings)
    roles: dict[int, BranchRole] = {}
    for opening, numbers in openings.items():
        is_auxiliary = len(numbers) == 1 and _is_aside(record.turns[opening], record.turns[main])
        role: BranchRole = "auxiliary" if is_auxiliary else "sub-agent"
        for number in numbers:
            root = _list_path(record, number)[0]
            named = record.turns[root].plan.role
            if named in ROLES:
                roles[root] = named
            else:
                # A rewritten conversation has the role of the one that it rewrites.
                roles[root] = "main" if opening == main else role
    return roles


def _list_openings(record: EpisodeRecord) -> dict[int, list[int]]:
    """Return the turns of each conversation and of those that rewrite it, by its first turn."""
    openings: dict[int, list[int]] = {}
    opening_of: dict[int, int] = {}
    origins = _find_origins(record)
    for number in sorted(record.turns):
        parent = record.turns[number].plan.parent
        before = origins[number] if parent is None else parent
        opening = number if before is None else opening_of[before]
        opening_of[number] = opening
        openings.setdefault(opening, []).append(number)
    return openings


def _choose_main(record: EpisodeRecord, openings: Mapping[int, Sequence[int]]) -> int:
    """Return the first turn of the main conversation: of those that count, the one that ends last.

    Single replies do not count beside longer conversations, nor replies without tools beside those
    with tools: harnesses ask for titles, and judge at the end. Of single replies the first counts.
    """

    def weigh(opening: int) -> tuple[int, bool, bool, int]:
        plan, numbers = record.turns[opening].plan, openings[opening]
        named = {"main": 1, "": 0}.get(plan.role, -1)
        is_long = len(numbers) > 1
        return named, is_long, plan.has_tools, numbers[-1] if is_long else -opening

    return max(openings, key=weigh)


def _is_aside(one: RecordedTurn, main: RecordedTurn) -> bool:
    """Return whether a single reply is of the harness: without tools, or by another model."""
    offers_less = main.plan.has_tools and not one.plan.has_tools
    return offers_less or (not one.plan.has_tools and one.plan.model != main.plan.model)
