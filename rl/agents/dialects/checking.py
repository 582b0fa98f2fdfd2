"""Checks of a body's fields against the table of them (fields.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from rl.agents.dialects.fields import FIELDS, Dialect, RequestField
from rl.agents.types import BadRequestError
from rl.utils.nesting import MAX_VALUE_DEPTH, exceeds_depth
from rl.utils.printing import truncate

MAX_SHOWN = 80
"""Longest excerpt of a value in an error, in characters."""
MAX_ASKED_CHARS = 16_384
"""Longest JSON of an asked value, which is recorded."""
_CONTAINERS = {"text", "output_config", "sampling_params"}
"""Fields that are objects with fields of several classes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SortedFields:
    """The fields of a body that only need to be recorded."""

    asked: Mapping[str, Any]
    harmless: tuple[str, ...]


def check_fields(body: Mapping[str, Any], dialect: Dialect) -> SortedFields:
    """Return the asked and the harmless fields at the top of a body.

    Null is the same as a field that is left out. Raises BadRequestError for a field that is
    unknown, refused or out of bounds.
    """
    asked: dict[str, Any] = {}
    harmless: list[str] = []
    _sort(body, FIELDS[dialect], asked, harmless)
    return SortedFields(asked=asked, harmless=tuple(harmless))


def _sort(
    body: Mapping[str, Any],
    rows: Mapping[str, RequestField],
    asked: dict[str, Any],
    harmless: list[str],
    *,
    container: str = "",
) -> None:
    """Add the asked and the harmless fields of a body, or of an object in it."""
    for name, value in body.items():
        path = f"{container}{name}"
        row = rows.get(path)
        is_container = path in _CONTAINERS and path in _list_tops(rows)
        if row is None and not is_container:
            raise _make_unknown_error(path, rows)
        if value is None:
            continue
        if row is None:
            if not isinstance(value, dict):
                raise BadRequestError(f"{path}={show_value(value)} must be an object", field=path)
            _sort(value, rows, asked, harmless, container=f"{path}.")
        elif row.kind == "asked":
            if not row.bounds.hold(value):
                shown = show_value(value)
                raise BadRequestError(f"{path}={shown} must be {row.bounds.describe()}", field=path)
            _check_size(value, field=path)
            asked[name] = value
        elif row.kind == "harmless":
            harmless.append(path)
        elif row.kind == "refused":
            check_refused(value, row, field=path)


def _check_size(value: Any, *, field: str) -> None:
    """Raise BadRequestError for an asked value that is too long or too deep to be recorded."""
    if not isinstance(value, dict | list):
        return
    if exceeds_depth(value):
        raise BadRequestError(
            f"{field} is nested deeper than {MAX_VALUE_DEPTH} levels", field=field
        )
    num_chars = len(json.dumps(value))
    if num_chars > MAX_ASKED_CHARS:
        raise BadRequestError(
            f"{field} has {num_chars} characters of JSON, at most {MAX_ASKED_CHARS} are allowed",
            field=field,
        )


def check_refused(value: Any, row: RequestField, *, field: str) -> None:
    """Raise BadRequestError unless a value of a refused field asks for nothing."""
    if value is None:
        return
    for neutral in row.neutral:
        # True equals 1 in Python.
        if value == neutral and isinstance(value, bool) == isinstance(neutral, bool):
            return
    raise BadRequestError(f"{field}={show_value(value)} is not supported: {row.note}", field=field)


def show_value(value: Any) -> str:
    """Return a short excerpt of a value for an error."""
    return truncate(repr(value), most=MAX_SHOWN)


def show_name(name: str) -> str:
    """Return a client's name of a field for an error."""
    # It may be of any length, and hold halves of surrogate pairs.
    return truncate(name, most=MAX_SHOWN).encode(errors="replace").decode()


def _list_tops(rows: Mapping[str, RequestField]) -> set[str]:
    return {name.partition(".")[0] for name in rows}


def _make_unknown_error(name: str, rows: Mapping[str, RequestField]) -> BadRequestError:
    plain = [row for row in rows if "[" not in row]
    near = get_close_matches(name[:MAX_SHOWN], plain, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    shown = show_name(name)
    return BadRequestError(f"{shown} is not a known field of a request{hint}", field=shown)
