"""Roles on hosts and devices, drawn with characters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from actors.explain.explanation import RankPlace, RolePlace, Unknown

MOST_IN_ROW = 16
"""Ranks in one line."""


def drawn(layout: tuple[RolePlace, ...] | Unknown, *, here: str) -> Iterator[str]:
    """A box for each host, a row for each group of ranks; `here` is what the controller's host is called."""
    if isinstance(layout, Unknown):
        yield f"not known: {layout.why}"
        return
    boxes = _boxes(layout, here=here)
    width = max(len(line) for title, lines in boxes for line in (f" {title} ", *lines)) + 2
    for title, lines in boxes:
        yield f"+{f' {title} ':-<{width}}+"
        for line in lines:
            yield f"| {line:<{width - 2}} |"
    yield f"+{'-' * width}+"


def _boxes(layout: Sequence[RolePlace], *, here: str) -> list[tuple[str, list[str]]]:
    """Title and lines of each host; the controller's is the first."""
    boxes: dict[tuple[str | None, int], list[str]] = {(None, 0): ["controller"]}
    for role in layout:
        for host in range(role.num_hosts):
            ranks = [rank for rank in role.ranks if rank.host == host]
            boxes.setdefault((role.hosts, host), []).extend(_role(role, ranks))
    several = {group for group, host in boxes if host}
    return [
        (
            here if group is None else f"host {host} of {group}" if group in several else f"host of {group}",
            lines,
        )
        for (group, host), lines in boxes.items()
    ]


def _role(role: RolePlace, ranks: Sequence[RankPlace]) -> Iterator[str]:
    processes = (
        f"{len(ranks)} process{'es' * (len(ranks) > 1)} of {role.threads} thread{'s' * (role.threads > 1)}"
    )
    yield f"{role.role:<12} {processes}{f': {role.shape}' if role.shape else ''}"
    if len(ranks) == 1 and ranks[0].gpu is None:
        return
    rows = [(group, list(of_group)) for group, of_group in groupby(ranks, key=lambda rank: rank.group)]
    name = max(len(group) for group, _ in rows)
    gap = "  " if name else ""
    for group, of_group in rows:
        for start in range(0, len(of_group), MOST_IN_ROW):
            label = "" if start else group
            cells = _cells(of_group[start : start + MOST_IN_ROW])
            yield f"{'':<13}{label:<{name}}{gap}{cells}"


def _cells(ranks: Sequence[RankPlace]) -> str:
    numbers = _joined("rank", [rank.rank for rank in ranks])
    gpus = [rank.gpu for rank in ranks if rank.gpu is not None]
    return f"{numbers} on {_joined('GPU', gpus)}" if gpus else numbers


def _joined(name: str, numbers: Sequence[int]) -> str:
    """`rank 0`, `ranks 0-3`, or `ranks 0 2 5` where they do not follow one another."""
    if len(numbers) == 1:
        return f"{name} {numbers[0]}"
    if list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{name}s {numbers[0]}-{numbers[-1]}"
    return f"{name}s {' '.join(map(str, numbers))}"
