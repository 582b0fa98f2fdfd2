"""What every entry does: parse the command line, build the root component, run it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rl.config.cli import EXPLAIN, parse_cli
from rl.config.registry import ResolvedRun
from rl.errors import RunError
from rl.interpreter import without_collections


def main(argv: Sequence[str] | None = None, *, default_module: str, default_config: str, prog: str) -> int:
    """Returns the exit status: 0 after success, 1 after a run that stopped, 2 for a config that
    cannot run, 130 after Ctrl-C; with --explain 0, or 2 for a config that can run nowhere."""
    with without_collections():  # the config's module imports what a run is made of
        run = parse_cli(
            sys.argv[1:] if argv is None else argv,
            default_module=default_module,
            default_config=default_config,
            prog=prog,
        )
    try:
        if run.explain is not None:
            return _explained(run)
        run.config.build(run=run).run()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"error: the run stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return 130
    return 0


def _explained(run: ResolvedRun) -> int:
    """Show what the run would be; returns the exit status.

    Raises:
        ValueError: it is none that can be explained.
    """
    if not hasattr(run.config.owner, EXPLAIN):
        raise ValueError(f"--{EXPLAIN}: {run.module}.{run.function} is no training run: start it to see it")
    status: int = run.config.build(run=run).explain(run.explain)
    return status
