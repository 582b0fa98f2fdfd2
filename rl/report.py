"""The story of a run as one HTML file: `python -m rl.report outputs/x`, also while the run goes on.

Findings, curves, what each process did when, where the time went, what the model wrote down to the token,
faults and recoveries, options, environment. The file needs nothing else and asks nothing of any network.
With a second folder both runs are in it, side by side. It is report.html in the first folder, unless --output
says where; nothing else of the runs is changed.

Exit status: 0 when the file is written, 2 for what is no run or where the file cannot be written.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl.interpreter import without_collections
from rl.observability.activity import STATE_FOLDER
from rl.observability.environment import read_environment
from rl.observability.limits import bottleneck, typical
from rl.observability.process_state import ProcessState, read_states
from rl.observability.run_folder import ENVIRONMENT, REPORT
from rl.process_id import is_alive
from rl.reporting.findings import KINDS, find
from rl.reporting.html.build import ReportedRun, write_report
from rl.reporting.run_data import read_run

LOOKED_FOR = tuple(kind.replace("_", " ") for kind in KINDS)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    options = _parse(argv)
    folders = [Path(folder).expanduser() for folder in options.folders]
    file = Path(options.output).expanduser() if options.output else folders[0] / REPORT
    try:
        # What is read lives to the end, and a collector would look through it again and again.
        with without_collections():
            runs = [_reported(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
            write_report(runs, file, written_s=time.time(), looked_for=LOOKED_FOR)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {file} cannot be written: {error.strerror or error}", file=sys.stderr)
        return 2
    for run in runs:
        for problem in run.data.problems:
            _say(f"{run.name}: {problem}")
        for finding in run.findings:
            since = "" if finding.since_step is None else f", since step {finding.since_step}"
            _say(f"{run.name}: {finding.title}{since}: {finding.sentence}")
    _say(f"{file}: {file.stat().st_size / 1e6:.1f} MB")
    return 0


def _say(line: str) -> None:
    """What was written may have characters that the terminal lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    print(line.encode(encoding, errors="backslashreplace").decode(encoding))


def _reported(folder: Path, name: str) -> ReportedRun:
    data = read_run(folder)
    states = list(read_states(folder / "logs" / STATE_FOLDER))
    controller = next((state for state in states if state.role == "controller"), None)
    return ReportedRun(
        name=name,
        data=data,
        findings=find(data),
        environment=read_environment(folder / ENVIRONMENT),
        processes=[_process(state) for state in states],
        bottleneck=bottleneck(typical(data.steps), data.config.get("values")),
        is_alive=is_alive(controller.process) if controller is not None and controller.is_here else None,
    )


def _process(state: ProcessState) -> dict[str, Any]:
    return {"role": state.role, "rank": state.rank, "host": state.host, "pid": state.process.pid}


def _names(folders: Sequence[Path]) -> list[str]:
    """Of their folders; with those around them where that tells them apart."""
    paths = [folder.resolve() for folder in folders]
    for depth in range(1, 1 + max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rl.report", description="The story of a run as one HTML file."
    )
    parser.add_argument("folders", nargs="+", metavar="folder", help="folder of a run, such as outputs/x")
    parser.add_argument("--output", metavar="FILE", help=f"the file; by default {REPORT} in the first folder")
    options = parser.parse_args(argv)
    if len(options.folders) > 2:
        parser.error(f"{len(options.folders)} folders: a report is of one run, or compares two")
    return options


if __name__ == "__main__":
    sys.exit(main())
