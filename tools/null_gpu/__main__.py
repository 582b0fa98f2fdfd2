"""Build the null device, or run Python on it.

    python -m tools.null_gpu build
    python -m tools.null_gpu run --devices 2 -- -m rl.train --module sum_digits --config tiny

What follows `--` are arguments of Python.

The libraries are built from the headers of an environment with the GPU builds (--venv, .venv-gpu by
default) into build/null-gpu. `run` builds what is missing and replaces this process; all other
settings of the null device are variables, which docs/gpu.md lists.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.null_gpu.build import build
from tools.null_gpu.device import ROOT, NullGpu


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.null_gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("build", "run"))
    parser.add_argument(
        "--venv", type=Path, default=ROOT / ".venv-gpu", help="environment with the GPU builds"
    )
    parser.add_argument("--devices", type=int, help="number of GPUs (1)")
    parser.add_argument("--counters", type=Path, help="folder for the counters of each process")
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options, python = parser.parse_args(arguments[:end]), arguments[end + 1 :]
    gpu = NullGpu(venv=options.venv.absolute())
    try:
        build(gpu)
    except ValueError as error:
        sys.exit(f"null GPU: {error}")
    if options.action == "build":
        print(f"null GPU: {gpu.preloaded}")
        return
    if options.counters is not None:
        options.counters.mkdir(parents=True, exist_ok=True)
    settings = {} if options.devices is None else {"DEVICES": options.devices}
    env = gpu.environment(settings, counters=options.counters and options.counters.absolute())
    os.execve(gpu.python, [str(gpu.python), *python], env)


if __name__ == "__main__":
    main(sys.argv[1:])
