"""The explanation of the tiny config on a laptop, kept as text.

    python -m tests.actors.explain.golden

writes it anew, after a change that is meant to change it: a new option is a new line.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from actors.explain.explain import explain
from actors.explain.machine import Machine
from actors.explain.text import as_text
from rl.config.cli import parse_cli

FILE = Path(__file__).with_name("tiny.txt")
LAPTOP = Machine(num_gpus=0, gpu_bytes=None, num_cores=8, memory_bytes=16 * 10**9)


@functools.cache
def explained(*options: str, here: Machine = LAPTOP) -> Any:
    """Of a command line of `rl.train`."""
    run = parse_cli(options, default_module="sum_digits", default_config="tiny")
    return explain(run, here=here)


def text() -> str:
    return as_text(explained()) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
    print(f"written: {FILE}")
