"""What the processes of a run did and when, for Perfetto: `python -m rl.timeline outputs/x`.

It writes outputs/x/timeline.json, also of a run that goes on, or was killed; open it at ui.perfetto.dev or in
chrome://tracing, or let `--output` name another file.

Exit status: 0, or 2 for what is no run, or one of which nothing was kept.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rl.observability.run_folder import STATUS, TIMELINE, read_status
from rl.observability.timeline import write_timeline


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    options = _parse(argv)
    folder = Path(options.folder).expanduser()
    destination = folder / TIMELINE if options.output is None else Path(options.output).expanduser()
    try:
        if not folder.is_dir() or read_status(folder) is None:
            raise ValueError(f"{folder} is not the folder of a run: it has no {STATUS}")
        num_spans = write_timeline(folder / "logs", destination)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{destination}: {num_spans:,} spans; open it at https://ui.perfetto.dev or in chrome://tracing")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rl.timeline", description="What the processes of a run did and when, for Perfetto."
    )
    parser.add_argument("folder", help="folder of the run, such as outputs/x")
    parser.add_argument("--output", help="file to write; timeline.json in the run's folder when not given")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
