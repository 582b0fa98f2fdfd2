"""Diagnosis of a run: `python -m rl.doctor outputs/x`.

Prints the run's status, its last step, the open spans of each process, the latest events, and the stacks of all
processes of this machine. The run is not disturbed: its processes handle the signal that requests the stacks.

Exit status: 0 for a healthy or finished run, 1 if something is dead, stopped or waits for too long, 2 for a folder
that is not a run's.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from rl.observability.health import RunHealth, examine
from rl.observability.stacks import request_stacks


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    options = _parse(argv)
    folder = Path(options.folder).expanduser()
    try:
        health = examine(folder, expected_s=options.expected_s)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(health.describe(), flush=True)
    if not options.brief:
        print(asyncio.run(_stacks(health)))
    return 1 if health.problems else 0


async def _stacks(health: RunHealth) -> str:
    states = [process.state for process in health.processes if process.is_alive is not False]
    texts = await asyncio.gather(*(request_stacks(state, health.folder / "logs") for state in states))
    blocks = [f"\n==== {s.name}: {s.describe()}\n{t.rstrip()}" for s, t in zip(states, texts, strict=True)]
    return "\n".join(blocks)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rl.doctor", description="What a run is doing, and whether it makes progress."
    )
    parser.add_argument("folder", help="folder of the run, such as outputs/x")
    parser.add_argument("--brief", action="store_true", help="without the stacks")
    parser.add_argument(
        "--expected_s",
        type=float,
        help="longest time that the controller should wait for one thing; by default five times the longest "
        "step or evaluation so far, at least a minute",
    )
    options = parser.parse_args(argv)
    if options.expected_s is not None and not options.expected_s > 0:
        parser.error(f"--expected_s {options.expected_s}: must be a number of seconds above 0")
    return options


if __name__ == "__main__":
    sys.exit(main())
