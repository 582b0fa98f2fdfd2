"""Measurements in processes of their own: each side imports, allocates and compiles for itself.

Run as `python -m benchmarks.processes MODULE FUNCTION JSON`, it prints what the function returns.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 600


def in_process_of_its_own(
    function: Callable[..., dict[str, float]], *, threads: int, **arguments: Any
) -> dict[str, float]:
    """`function(**arguments)` of a module of this package; what it prints is dropped.

    Args:
        threads: that the process may compute with, if it does not say otherwise itself.
        arguments: of JSON's types.

    Raises:
        RuntimeError: it failed, with the end of what it printed.
    """
    module = function.__module__
    if module == "__main__":
        module = sys.modules["__main__"].__spec__.name  # type: ignore[union-attr]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.processes", module, function.__name__, json.dumps(arguments)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"{function.__name__}({arguments}) failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def whole_run(folder: Path, name: str, *options: str, timeout_s: float) -> list[dict[str, float]]:
    """A run as a user starts it, to its end; returns its metrics, in order.

    Raises:
        RuntimeError: it failed, with the end of what it printed.
    """
    # Not above: what is measured in a process of its own imports for itself.
    from rl.observability.metrics import read_metrics

    done = subprocess.run(
        [sys.executable, "-m", "rl.train", "--dump_folder", str(folder), "--name", name, *options],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    if done.returncode:
        raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    path = folder / name / "metrics.jsonl"
    return read_metrics(path) if path.exists() else []


if __name__ == "__main__":
    measure = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])
    print(json.dumps(measure(**json.loads(sys.argv[3]))))
