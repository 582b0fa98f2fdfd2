"""Timeline of a run for Perfetto: `python -m rl.timeline outputs/x`.

Writes outputs/x/timeline.json, also of a run that is running or was killed. Open the file at
ui.perfetto.dev or in chrome://tracing.

Exit status: 0, or 2 for a folder that is not a run's or has no spans.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rl.observability.run_folder import TIMELINE, RunFolder
from rl.observability.timeline import write_timeline
from rl.utils.compat import exit_after
from rl.utils.printing import print_error, print_text


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    folder = Path(options.folder).expanduser()
    destination = folder / TIMELINE if options.output is None else Path(options.output).expanduser()
    try:
        # An OSError is of a disk without room, or of a folder that may not be written.
        num_spans = write_timeline(RunFolder.to_read(folder).logs, destination)
        print_text(
            f"{destination}: {num_spans:,} spans; open it at https://ui.perfetto.dev or in "
            "chrome://tracing"
        )
    except (ValueError, OSError) as error:
        print_error(f"error: {error}")
        return 2
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rl.timeline", description="Write the timeline of a run for Perfetto."
    )
    parser.add_argument("folder", help="folder of the run, such as outputs/x")
    parser.add_argument(
        "--output", help="file to write; timeline.json in the run's folder when not given"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    exit_after(main)
