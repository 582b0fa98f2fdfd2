"""From what runs have left to the file that shows it.

write_report([ReportedRun(data=read_run(folder), ...)], Path("report.html"), written_s=...)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl.atomic_file import replacing
from rl.observability.limits import Bottleneck
from rl.reporting.evidence import Finding
from rl.reporting.html.blocks import packed
from rl.reporting.html.config_rows import config_rows
from rl.reporting.html.evidence import referred_lines, told_finding
from rl.reporting.html.facts import breakdown, facts
from rl.reporting.html.page import render
from rl.reporting.html.rollouts import pack_rollouts
from rl.reporting.html.series import curves
from rl.reporting.html.timeline import MAX_BLOCKS, pack_timeline
from rl.reporting.html.token_texts import open_token_texts
from rl.reporting.run_data import RunData

MOST_RUNS = 2
ROLLOUT_BYTES = 14_000_000
"""Of a page, all its runs together, so that the page is under 20 MB."""
MOST_EVENTS = 1000
"""The latest; a run that has more loses something all the time."""
Blocks = list[tuple[str, str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedRun:
    """One run and what was found out about it."""

    name: str
    """As the page calls it."""
    data: RunData
    findings: Sequence[Finding]
    environment: Mapping[str, Any]
    """As `rl.observability.environment` wrote it; empty where nothing is known."""
    processes: Sequence[Mapping[str, Any]]
    """Role, rank, host and pid of each."""
    is_alive: bool | None
    """Whether its controller lives; None where that cannot be told."""
    bottleneck: Bottleneck | None = None
    """What a step waits for most."""


def write_report(
    runs: Sequence[ReportedRun], file: Path, *, written_s: float, looked_for: Sequence[str] = ()
) -> None:
    """Write the page, whole or not at all.

    Args:
        runs: one, or two to be compared.
        written_s: the wall clock's, seconds since 1970: it is shown.
        looked_for: kinds of findings, named where there is none.

    Raises:
        ValueError: there are none, or more than two.
        OSError: the file cannot be written.
    """
    if not 1 <= len(runs) <= MOST_RUNS:
        raise ValueError(f"{len(runs)} runs: a report is of one, or compares {MOST_RUNS}")
    blocks: Blocks = []
    told = [_run(run, number, blocks, share=1 / len(runs)) for number, run in enumerate(runs)]
    report = {
        "written": written_s,
        "looked_for": list(looked_for),
        "runs": told,
        "differences": _differences([run["config"] for run in told]),
    }
    page = render(title=" and ".join(run.name for run in runs), report=report, blocks=blocks)
    with replacing(file) as temporary:
        temporary.write_text(page, encoding="utf-8", errors="backslashreplace")


def _run(run: ReportedRun, number: int, blocks: Blocks, *, share: float) -> dict[str, Any]:
    """What is shown at once; the rest is added to the blocks. `share`: of the page's room."""
    data = run.data
    texts, no_texts = open_token_texts(data.folder, data.config.get("values") or {})
    options, config_note = config_rows(data.config) if data.config else ([], None)
    rollouts = pack_rollouts(
        data.rollouts,
        texts,
        most_bytes=int(share * ROLLOUT_BYTES),
        keep=referred_lines(run.findings, data.rollouts),
    )
    timeline = pack_timeline(data.spans, data.events[-MOST_EVENTS:], max_blocks=int(share * MAX_BLOCKS))
    names = {part: f"{part}-{number}" for part in ("curves", "timeline", "rollouts")}
    chunk = f"chunk-{number}-"
    blocks += [
        (names["curves"], packed(curves(data.steps, data.evaluations))),
        (names["timeline"], packed(timeline)),
        (names["rollouts"], packed(rollouts.index)),
        *((f"{chunk}{i}", block) for i, block in enumerate(rollouts.chunks)),
    ]
    has_tokens = any("token_ids" in turn for rollout in data.rollouts for turn in rollout["turns"])
    return {
        "name": run.name,
        "folder": str(data.folder),
        "facts": facts(data, is_alive=run.is_alive),
        "breakdown": breakdown(data),
        "bottleneck": None if run.bottleneck is None else asdict(run.bottleneck),
        "findings": [told_finding(finding) for finding in run.findings],
        "problems": [*data.problems, *([no_texts] if no_texts and has_tokens else [])],
        "events": data.events[-MOST_EVENTS:],
        "num_events": len(data.events),
        "config": options,
        "config_note": config_note,
        "environment": dict(run.environment),
        "processes": [dict(process) for process in run.processes],
        "blocks": names | {"chunk": chunk, "chunks": len(rollouts.chunks)},
    }


def _differences(configs: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Options that the runs do not have in common, with the value of each; None where one has it not."""
    values = [{row["path"]: row["value"] for row in rows} for rows in configs]
    paths = dict.fromkeys(path for of in values for path in of)
    rows = [{"path": path, "values": [of.get(path) for of in values]} for path in paths]
    return [row for row in rows if len(set(row["values"])) > 1]
