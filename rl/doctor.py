"""What a run is doing, and whether it moves: `python -m rl.doctor outputs/x`.

It prints the run's status, its last step, what each process does and since when, what happened to it, and
the stacks of all processes of this machine. The run goes on undisturbed: its processes are only asked, by a
signal that they expect.

Exit status: 0 where the run moves or has finished, 1 where something is dead, stopped or waits for too long,
2 for what is no run.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rl.observability.activity import STATE_FOLDER
from rl.observability.health import RunHealth, examine
from rl.observability.stacks import ask


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
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
    states = [process.state for process in health.processes if process.lives is not False]
    folder = health.folder / "logs" / STATE_FOLDER
    texts = await asyncio.gather(*(ask(state, folder) for state in states))
    blocks = [f"\n==== {s.name}: {s.describe()}\n{t.rstrip()}" for s, t in zip(states, texts, strict=True)]
    return "\n".join(blocks)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rl.doctor", description="What a run is doing, and whether it moves."
    )
    parser.add_argument("folder", help="folder of the run, such as outputs/x")
    parser.add_argument("--brief", action="store_true", help="without the stacks")
    parser.add_argument(
        "--expected_s",
        type=_seconds,
        help="longest that the controller should wait for one thing; by default five times the longest step "
        "or evaluation so far, at least a minute",
    )
    return parser.parse_args(argv)


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if (value := float(text)) > 0:
            return value
    raise argparse.ArgumentTypeError(f"{text!r}: must be a number of seconds above 0")


if __name__ == "__main__":
    sys.exit(main())
