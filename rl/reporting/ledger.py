"""Links from the recorded rollouts to a run's ledger: in which file and rows each of them is.

A linked rollout has `ledger`, with `file` and the `command` that prints all of it; each of its
turns has a line of what the ledger says:

    row 34 · request 5d0c.0 of generator-0 · minibatch 0 · tokens: 20 trained, 3 too long

pyarrow is imported when it is needed: it takes a quarter of a second.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl.ledger.files import LedgerFile, list_files, read_columns
from rl.observability.run_folder import LEDGER
from rl.rollouts.trained import REASONS

COLUMNS = ("group", "member", "turn", "role", "minibatch", "generator", "request", "mask")
"""Columns that a line is made of: small ones, as no list of numbers is compressed better than that
of the mask."""


def add_ledger(rollouts: Sequence[dict[str, Any]], folder: Path, problems: list[str]) -> None:
    """Add to each trained rollout where the ledger has it; without a ledger add nothing.

    Files that cannot be read are named in the problems.
    """
    files = {file.step: file for file in list_files(folder / LEDGER)}
    by_step: dict[int, list[dict[str, Any]]] = {}
    for rollout in rollouts:
        # Of older versions no line has a place.
        has_place = all(isinstance(rollout.get(name), int) for name in ("group", "member"))
        if has_place and rollout["step"] in files:
            by_step.setdefault(rollout["step"], []).append(rollout)
    unread: list[str] = []
    for step, of_step in by_step.items():
        try:
            _add_step(of_step, files[step], folder)
        # Damaged, which is a ValueError, or written by somebody else.
        except (OSError, ValueError, LookupError, TypeError) as error:
            unread.append(f"{files[step].path.name}: {error}")
    if unread:
        problems.append(
            f"{len(unread)} files of the ledger cannot be read (python -m rl.ledger checks them "
            f"all): {unread[0]}"
        )


def _add_step(rollouts: Iterable[dict[str, Any]], file: LedgerFile, folder: Path) -> None:
    columns = read_columns(file, COLUMNS)
    places = zip(columns["group"], columns["member"], strict=True)
    rows: dict[tuple[int, int], list[int]] = {}
    for row, place in enumerate(places):
        rows.setdefault(place, []).append(row)
    for rollout in rollouts:
        of_rollout = rows.get((rollout["group"], rollout["member"]), [])
        # The tokens of a group may not be recorded (ledger.share).
        if not of_rollout:
            continue
        words = (str(file.step), str(rollout.get("problem")), str(rollout.get("sample")))
        rollout["ledger"] = {
            "file": f"{LEDGER}/{file.path.name}",
            "command": shlex.join(["python", "-m", "rl.ledger", str(folder), "--show", *words]),
        }
        for row in of_rollout:
            turn = rollout["turns"][columns["turn"][row]]
            turn["ledger"] = _describe(columns, row)


def _describe(columns: Mapping[str, Sequence[Any]], row: int) -> str:
    """Return what the ledger says of a turn."""
    counts = np.bincount(columns["mask"][row], minlength=len(REASONS))
    tokens = [f"{num} {reason}" for num, reason in zip(counts, REASONS, strict=True) if num]
    minibatch = columns["minibatch"][row]
    parts = [
        f"row {row}",
        f"request {columns['request'][row]} of {columns['generator'][row]}",
        "in no minibatch" if minibatch < 0 else f"minibatch {minibatch}",
        f"tokens: {', '.join(tokens)}",
    ]
    return " · ".join(parts)
