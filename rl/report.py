"""Report of a run as one HTML file: `python -m rl.report outputs/x`, also while the run goes on.

Further runs are drawn over each other; of three or more, those that differ only by seed are one
band. The file needs no network.

Exit status: 0 if the file was written, 2 otherwise.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.observability.run_folder import CONFIG, METRICS, NO_RUNS, REPORT, STATUS
from rl.reporting.html.page import MANY, write_report
from rl.utils.compat import exit_after
from rl.utils.printing import print_error, print_text
from rl.utils.processes import disable_collections

OF_RUNS = (STATUS, METRICS, CONFIG)
"""Files of which every run has at least one."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    folders = select_runs([Path(folder).expanduser() for folder in options.folders])
    file = Path(options.output).expanduser() if options.output else folders[0] / REPORT
    try:
        # The data lives to the end, and the garbage collector would search it again and again.
        with disable_collections():
            named = dict(zip(_choose_names(folders), folders, strict=True))
            runs = write_report(named, file, written_s=time.time())
        _print_findings(runs, file)
    except ValueError as error:
        print_error(f"error: {error}")
        return 2
    except OSError as error:
        print_error(f"error: {file} cannot be written: {error.strerror or error}")
        return 2
    return 0


def select_runs(folders: Sequence[Path]) -> list[Path]:
    """Return the folders, each once; of many, as of `outputs/*`, only those that are runs'."""
    unique = {folder.resolve(): folder for folder in reversed(folders)}
    selected = [folder for folder in folders if unique[folder.resolve()] is folder]
    runs = []
    for folder in selected:
        # A folder that does not exist is a typo, and an error.
        is_run = any((folder / name).is_file() for name in OF_RUNS)
        may_be_other = len(selected) >= MANY or folder.name in NO_RUNS
        if folder.exists() and not is_run and may_be_other:
            print_error(f"note: {folder} is left out: it is not the folder of a run")
        else:
            runs.append(folder)
    return runs or selected


def _print_findings(runs: Sequence[Mapping[str, Any]], file: Path) -> None:
    # The exit status does not tell of findings, so they stand on the console too.
    for run in runs:
        for problem in run["problems"]:
            print_text(f"{run['name']}: {problem}")
        for finding in run["findings"]:
            since = f"{finding['title']}, since step {finding['since_step']}"
            print_text(f"{run['name']}: {since}: {finding['sentence']}")
    print_text(f"{file}: {file.stat().st_size / 1e6:.1f} MB")


def _choose_names(folders: Sequence[Path]) -> list[str]:
    """Return the names of the folders, with one parent, or all parents, where they are equal."""
    paths = [folder.resolve() for folder in folders]
    # Runs of two experiments may have the same name.
    for num_parts in (1, 2):
        names = ["/".join(path.parts[-num_parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return list(map(str, paths))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rl.report",
        description="Write a report of a run, or of several over each other, as one HTML file.",
    )
    parser.add_argument(
        "folders", nargs="+", metavar="folder", help="folders of runs, such as outputs/x"
    )
    parser.add_argument(
        "--output", metavar="FILE", help=f"the file; by default {REPORT} in the first folder"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    exit_after(main)
