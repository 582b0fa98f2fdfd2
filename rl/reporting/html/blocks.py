"""Data inside a page: as text that no HTML parser takes for anything else.

A block that is needed at once is JSON; the others are packed, and unpacked by the browser when they are
looked at (`DecompressionStream`), so that a page with a million tokens opens like one with a hundred.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from typing import Any

_LEVEL = 6
"""Of gzip; 9 takes three times as long for 1% less."""


def inline_json(value: Any) -> str:
    """JSON that may stand in a `<script>` element: no character of it has a meaning in HTML.

    A number that JSON lacks is the text "nan", "inf" or "-inf", as in the files of a run.
    """
    text = _json(value)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def packed(value: Any) -> str:
    """JSON (as `inline_json`), gzip, base64; the same bytes for the same value."""
    return base64.b64encode(gzip.compress(_json(value).encode(), compresslevel=_LEVEL, mtime=0)).decode()


def unpacked(block: str) -> Any:
    """What `packed` was given, as JSON has it."""
    return json.loads(gzip.decompress(base64.b64decode(block)))


def _json(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:  # rare, so that it is not looked for in all of a run
        return json.dumps(_told(value), allow_nan=False, separators=(",", ":"))


def _told(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _told(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_told(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
