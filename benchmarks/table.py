"""All benchmarks in their quick modes, and one table of their ratios.

    python -m benchmarks.table busy startup weight_sync [--folder outputs/bench-quick] [--limit 240]

`make bench-quick` names every benchmark. Each runs in a process of its own, one after another, so
that no benchmark disturbs another. A benchmark that fails, or does not end within the limit, has
its error in the table, and the exit status is 1; the others run all the same.

The folder keeps what each benchmark printed in a log, and `figures.jsonl`, a line for each of them:
the JSON object that it printed last, with the `seconds` that it ran, or its `error`. The last line
printed here is such an object too: `ratio` has the ratios by benchmark.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from actors.launch.cleanup import find_by_environment
from benchmarks.processes import ROOT
from rl.utils.processes import kill

OWNER = "RELAY_BENCHMARK"
"""Environment variable by which all processes of a benchmark are found."""
LIMIT_S = 240.0
"""Longest time of a benchmark's quick mode; it is ended then."""
HEADER = ("ratio", "of", "value", "seconds")
MAX_ERROR = 100
"""Characters of an error in the table."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("benchmarks", nargs="+", help="names of files in this folder")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "bench-quick")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of each benchmark")
    args = parser.parse_args(arguments)
    args.folder.mkdir(parents=True, exist_ok=True)

    lines: list[dict[str, Any]] = []
    with (args.folder / "figures.jsonl").open("w") as file:
        for name in args.benchmarks:
            print(f"{name} ...", end=" ", flush=True)
            line = run_benchmark(name, log=args.folder / f"{name}.log", limit_s=args.limit)
            print(line.get("error") or f"{line['seconds']:.0f} s", flush=True)
            file.write(json.dumps(line) + "\n")
            file.flush()
            lines.append(line)

    print(f"\n{format_table(lines)}\n")
    print(json.dumps(summarize(lines)))
    return int(any("error" in line for line in lines))


def run_benchmark(name: str, *, log: Path, limit_s: float) -> dict[str, Any]:
    """Run a benchmark's quick mode and return its figures or its error, and its seconds.

    No process of the benchmark is left afterwards.
    """
    owner, started = f"{os.getpid()}-{name}", time.monotonic()
    error = None
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.{name}", "--quick"],
            cwd=ROOT,
            env=os.environ | {OWNER: owner},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        if status := process.wait(limit_s):
            error = f"ended with status {status}"
    except subprocess.TimeoutExpired:
        error = f"not ended after {limit_s:g} s"
    finally:
        # Its workers and actors too, some of which are no children of the process any more.
        for left in find_by_environment(OWNER, owner):
            kill(left)
        process.wait()
    seconds = round(time.monotonic() - started, 1)
    return read_figures(name, log.read_text(errors="replace"), error=error) | {"seconds": seconds}


def read_figures(name: str, text: str, *, error: str | None) -> dict[str, Any]:
    """Return the JSON object that a benchmark printed, or its error with the last line it printed.

    Args:
        error: what was wrong with the process; None if it ended well.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    if error is None:
        # Libraries may write more lines while the process ends.
        printed = [line for line in lines if line.startswith('{"benchmark"')]
        figures: dict[str, Any] = json.loads(printed[-1]) if printed else {}
        if "compared" in figures and flatten_ratios(name, figures.get("ratio", {})):
            return figures
        error = "printed no ratio"
    return {"benchmark": name, "error": ": ".join([error, *lines[-1:]])}


def flatten_ratios(name: str, ratio: Any) -> dict[str, float]:
    """Return the ratios of nested mappings by names with dots.

    Example:
        >>> flatten_ratios("busy", {"2": {"relay": 1.5, "trl": 20.0}})
        {'busy.2.relay': 1.5, 'busy.2.trl': 20.0}
    """
    if not isinstance(ratio, Mapping):
        return {name: float(ratio)}
    flat: dict[str, float] = {}
    for key, value in ratio.items():
        flat |= flatten_ratios(f"{name}.{key}", value)
    return flat


def format_table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return a row for each ratio, and one for each benchmark that has an error.

    What is compared and the seconds stand in the first row of a benchmark.
    """
    rows = [HEADER]
    for line in lines:
        name, seconds = line["benchmark"], f"{line['seconds']:.0f}"
        if "error" in line:
            rows.append((name, f"FAILED: {line['error'][:MAX_ERROR]}", "", seconds))
            continue
        compared = line["compared"]
        for ratio, value in flatten_ratios(name, line["ratio"]).items():
            rows.append((ratio, compared, f"{value:.3g}", seconds))
            compared = seconds = ""
    rows.append(("", "", "all", f"{sum(line['seconds'] for line in lines):.0f}"))

    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines_of_text = []
    for *words, number, duration in rows:
        cells = [word.ljust(width) for word, width in zip(words, widths[:2], strict=True)]
        cells += [number.rjust(widths[2]), duration.rjust(widths[3])]
        lines_of_text.append("  ".join(cells))
    return "\n".join(lines_of_text)


def summarize(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the last line: ratios and errors by benchmark, and all seconds."""
    return {
        "benchmark": "table",
        "seconds": round(sum(line["seconds"] for line in lines), 1),
        "errors": {line["benchmark"]: line["error"] for line in lines if "error" in line},
        "ratio": {line["benchmark"]: line["ratio"] for line in lines if "ratio" in line},
    }


if __name__ == "__main__":
    sys.exit(main())
