"""Branches of a recorded episode: its conversations, with their roles and causes.

main         the conversation that works on the task, also after its history was rewritten
sub-agent    a conversation of its own, with another opening
auxiliary    one reply of the harness's own: a title, a summary
superseded   a reply that was sampled again and never continued
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import get_args

from rl.agents.record import EpisodeRecord, RecordedTurn
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
    places = {number: place for place, number in enumerate(numbers)}
    roles = _assign_roles(record)
    causes = _name_causes(record)
    superseded = _find_superseded(record)
    continued = {record.turns[number].plan.parent for number in numbers}

    branches = []
    known: set[int] = set()
    for leaf in numbers:
        if leaf in continued:
            continue
        path = _list_path(record, leaf)
        first_new = next(number for number in path if number not in known)
        known.update(path)
        role = "superseded" if leaf in superseded else roles[path[0]]
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


def _list_siblings(record: EpisodeRecord) -> list[list[RecordedTurn]]:
    """Return the turns that ask the same of the same conversation, in the order of the requests."""
    siblings = defaultdict(list)
    for number in sorted(record.turns):
        recorded = record.turns[number]
        siblings[recorded.plan.parent, recorded.plan.digests.full[-1]].append(recorded)
    return [*siblings.values()]


def _find_superseded(record: EpisodeRecord) -> set[int]:
    """Return the turns that were asked again and not continued.

    Where none of several was continued, the last one counts.
    """
    continued = {recorded.plan.parent for recorded in record.turns.values()}
    superseded: set[int] = set()
    for siblings in _list_siblings(record):
        numbers = [recorded.plan.number for recorded in siblings]
        chosen = continued.intersection(numbers) or {numbers[-1]}
        superseded.update(set(numbers) - chosen)
    return superseded


def _name_causes(record: EpisodeRecord) -> dict[int, str]:
    """Return why each turn begins a branch; "" if it does not, or is the first."""
    causes: dict[int, str] = {}
    for siblings in _list_siblings(record):
        for recorded in siblings[1:]:
            causes[recorded.plan.number] = "again"

    roots = 0
    children: set[int] = set()
    for number in sorted(record.turns):
        plan = record.turns[number].plan
        if plan.parent is None:
            # The first conversation needs no cause.
            causes.setdefault(number, plan.relation or ("agent" if roots else ""))
            roots += 1
        else:
            causes.setdefault(number, "fork" if plan.parent in children else "")
            children.add(plan.parent)
    return causes


def _assign_roles(record: EpisodeRecord) -> dict[int, BranchRole]:
    """Return the role of each conversation by the number of its first turn."""
    roots = [n for n in sorted(record.turns) if record.turns[n].plan.parent is None]
    openings = [number for number in roots if not record.turns[number].plan.relation]
    sizes = _count_turns(record)
    main = _choose_main([record.turns[n] for n in openings or roots[:1]], sizes)

    roles: dict[int, BranchRole] = {}
    for number in roots:
        plan = record.turns[number].plan
        if plan.role in ROLES:
            roles[number] = plan.role
        elif number == main:
            roles[number] = "main"
        elif plan.origin is not None:
            roles[number] = roles[_find_root(record, plan.origin)]
        else:
            is_single = sizes[number] == 1 and not plan.has_tools
            offers_tools = main is not None and record.turns[main].plan.has_tools
            other_model = main is not None and plan.model != record.turns[main].plan.model
            is_auxiliary = is_single and (offers_tools or other_model)
            roles[number] = "auxiliary" if is_auxiliary else "sub-agent"
    return roles


def _find_root(record: EpisodeRecord, number: int) -> int:
    # The turn that a conversation was related to may be without a reply, such as after an error.
    if number not in record.turns:
        return min(record.turns)
    return _list_path(record, number)[0]


def _count_turns(record: EpisodeRecord) -> dict[int, int]:
    """Return the number of turns that begin with each first turn, by its number."""
    counts: dict[int, int] = defaultdict(int)
    for number in record.turns:
        counts[_list_path(record, number)[0]] += 1
    return counts


def _choose_main(openings: Sequence[RecordedTurn], sizes: dict[int, int]) -> int | None:
    """Return the opening of the main conversation.

    The first one counts, unless it is a single reply without tools beside one with tools: harnesses
    ask for a title before they begin.
    """
    if not openings:
        return None
    named = [o.plan.number for o in openings if o.plan.role == "main"]
    if named:
        return named[0]
    with_tools = [o.plan.number for o in openings if o.plan.has_tools]
    first = openings[0].plan
    if with_tools and not first.has_tools and sizes[first.number] == 1:
        return with_tools[0]
    return first.number
