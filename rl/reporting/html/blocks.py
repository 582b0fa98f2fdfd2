"""Data inside a page: as text that no HTML parser takes for anything else.

A block that is needed at once is JSON; the others are packed, and unpacked by the browser when they are
looked at (`DecompressionStream`), so that a page with a million tokens opens like one with a hundred.
"""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

_LEVEL = 6
"""Of gzip; 9 takes three times as long for 1% less."""


def inline_json(value: Any) -> str:
    """JSON that may stand in a `<script>` element: no character of it has a meaning in HTML.

    Raises:
        ValueError: a number in it is not finite; JSON has none.
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def packed(value: Any) -> str:
    """JSON, gzip, base64; the same bytes for the same value. Raises ValueError as `inline_json`."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=_LEVEL, mtime=0)).decode()


def unpacked(block: str) -> Any:
    """What `packed` was given, as JSON has it."""
    return json.loads(gzip.decompress(base64.b64decode(block)))
