"""Runs the cases of a client, each with the address and key of an episode of its own.

It runs in the environment of the client's package, so it imports nothing but the standard library.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import json
import os
import traceback
from collections.abc import Callable, Mapping
from typing import Any

CASES = "RELAY_CASES"
"""Environment variable with the variables of each case by its name, as JSON."""
FIRST, SECOND, SUM = 2, 3, 5
QUESTION = f"What is {FIRST} + {SECOND}?"
"""The scripted model calls the tool `add` with these numbers and says what the tool returned."""
ADD_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def run_cases(cases: Mapping[str, Callable[[], Any]]) -> None:
    """Run the cases that are asked for and print a JSON line about each.

    What a case returns is `seen`; what it raises is `error`, the text of the traceback. All cases
    share one event loop, as packages keep connections.
    """
    with asyncio.Runner() as runner:
        for name, variables in json.loads(os.environ[CASES]).items():
            os.environ.update(variables)
            line: dict[str, Any] = {"case": name}
            # Packages print what their agents do.
            with contextlib.redirect_stdout(io.StringIO()):
                try:
                    seen = cases[name]()
                    line["seen"] = runner.run(seen) if inspect.iscoroutine(seen) else seen
                except Exception:  # noqa: BLE001 - whatever a package raises is a finding
                    line["error"] = traceback.format_exc()
            print(json.dumps(line), flush=True)
