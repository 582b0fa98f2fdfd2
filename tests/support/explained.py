"""Explanations of command lines on a laptop."""

from __future__ import annotations

import functools
from typing import Any

from actors.preflight.checks import Machine
from actors.preflight.explain import explain
from rl.config.cli import parse_cli

LAPTOP = Machine(num_gpus=0, gpu_bytes=None, num_cores=8, memory_bytes=16 * 10**9)


@functools.cache
def explained(*options: str, here: Machine = LAPTOP) -> Any:
    """Explain a command line of `rl.train` on a laptop."""
    run = parse_cli(options, default_module="sum_digits", default_config="tiny")
    return explain(run, here=here)
