"""Roles on hosts and devices, drawn with characters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from actors.explain.explanation import RankPlace, RolePlace, Unknown

MOST_IN_ROW = 16
"""Ranks in one line."""


def drawn(layout: tuple[RolePlace, ...] | Unknown) -> Iterator[str]:
    """A box for each host, a row for each group of ranks."""
    if isinstance(layout, Unknown):
        yield f"not known: {layout.why}"
        return
    boxes = _boxes(layout)
    width = max(len(line) for title, lines in boxes for line in (f" {title} ", *lines)) + 2
    for title, lines in boxes:
        yield f"+{f' {title} ':-<{width}}+"
        for line in lines:
            yield f"| {line:<{width - 2}} |"
    yield f"+{'-' * width}+"


def _boxes(layout: Sequence[RolePlace]) -> list[tuple[str, list[str]]]:
    """Title and lines of each host; the controller's is the first."""
    boxes: dict[tuple[str | None, int], list[str]] = {(None, 0): ["controller"]}
    for role in layout:
        for host in range(role.num_hosts):
            ranks = [rank for rank in role.ranks if rank.host == host]
            boxes.setdefault((role.hosts, host), []).extend(_role(role, ranks))
    several = {group for group, host in boxes if host}
    return [(_title(group, host, several=group in several), lines) for (group, host), lines in boxes.items()]


def _title(group: str | None, host: int, *, several: bool) -> str:
    if group is None:
        return "this machine"
    return f"host {host} of {group}" if several else f"host of {group}"


def _role(role: RolePlace, ranks: Sequence[RankPlace]) -> Iterator[str]:
    processes = (
        f"{len(ranks)} process{'es' * (len(ranks) > 1)} of {role.threads} thread{'s' * (role.threads > 1)}"
    )
    yield f"{role.role:<12} {processes}{f': {role.shape}' if role.shape else ''}"
    if len(ranks) == 1 and ranks[0].gpu is None:
        return
    rows = [(group, list(of_group)) for group, of_group in groupby(ranks, key=lambda rank: rank.group)]
    name = max(len(group) for group, _ in rows)
    for group, of_group in rows:
        for start in range(0, len(of_group), MOST_IN_ROW):
            label = group if start == 0 else ""
            yield f"{'':<13}{label:<{name}}{'  ' if name else ''}{_cells(of_group[start : start + MOST_IN_ROW])}"


def _cells(ranks: Sequence[RankPlace]) -> str:
    if ranks[0].gpu is None:
        return f"ranks {_joined([rank.rank for rank in ranks])}"
    return f"ranks {_joined([rank.rank for rank in ranks])} on GPUs {_joined([r.gpu or 0 for r in ranks])}"


def _joined(numbers: Sequence[int]) -> str:
    """`0-3`, or `0 2 5` where they do not follow one another."""
    if len(numbers) > 1 and list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{numbers[0]}-{numbers[-1]}"
    return " ".join(map(str, numbers))
