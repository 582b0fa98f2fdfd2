"""Report of one run, or of several to compare, as a single HTML file without network access.

    write_report({"try-1": Path("outputs/try-1")}, Path("report.html"), written_s=time.time())

The page's `Content-Security-Policy` allows only the scripts in it and no fetching. Data of a run
stands in blocks that no HTML parser looks into, and becomes text nodes. A block that is not needed
at once is compressed and unpacked by the browser on demand, so that a page with a million tokens
opens fast.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from rl.observability.machine import compute_typical_step, find_bottleneck
from rl.observability.spans import read_states
from rl.reporting.data import TOKENS_MB, RunData, read_run
from rl.reporting.findings import ENOUGH_STEPS, KINDS, find
from rl.reporting.html.groups import group_runs, name_group, pack_bands
from rl.reporting.html.overview import (
    MAX_POINTS,
    break_down,
    collect_facts,
    compare_configs,
    find_evidence_lines,
    list_config,
    pack_curves,
)
from rl.reporting.html.rollouts import format_json, open_token_texts, pack, pack_rollouts
from rl.reporting.html.timeline import MAX_BLOCKS, pack_timeline
from rl.utils.files import replace_file
from rl.utils.processes import is_alive

ROLLOUT_BYTES = 14_000_000
"""Size of the rollouts of a page, so that the page stays below 20 MB."""
MAX_EVENTS = 1000
"""Latest events of a run that are shown."""
MANY = 3
"""Number of runs from which on those that differ only by seed are one band."""
MIN_POINTS, MIN_TOKENS_MB = 200, 6.0
"""Least of each run's curves and tokens in a report of many runs."""
_HERE = Path(__file__).parent
_STYLES = ("vendor/uPlot.min.css", "static/report.css")
_SCRIPTS = (
    "vendor/uPlot.iife.min.js", "static/dom.js", "static/theme.js", "static/charts.js",
    "static/overview.js",
    "static/curves.js", "static/timeline.js", "static/time.js", "static/tokens.js",
    "static/rollouts.js",
    "static/tables.js", "static/main.js",
)  # fmt: skip
"""Scripts in the order in which they run."""
SECTIONS = (
    ("overview", "Overview"),
    ("findings", "Findings"),
    ("curves", "Curves"),
    ("timeline", "Timeline"),
    ("time", "Time and limits"),
    ("rollouts", "Rollouts"),
    ("events", "Faults and recoveries"),
    ("config", "Config"),
    ("environment", "Environment"),
)


def write_report(
    folders: Mapping[str, Path], file: Path, *, written_s: float
) -> list[dict[str, Any]]:
    """Write the page of some runs atomically; return what it shows of each run at once.

    Args:
        folders: folder of each run by the name that the page shows.
        written_s: time of writing, in seconds since 1970.

    Raises:
        ValueError: a folder is not a run's.
        OSError: the file cannot be written.
    """
    blocks: list[tuple[str, str]] = []
    shown: list[dict[str, Any]] = []
    curves: list[_Records] = []
    # Runs share the size of the page.
    share = 1 / len(folders)
    max_points = max(MIN_POINTS, int(MAX_POINTS * min(1.0, 2 * share)))
    for number, (name, folder) in enumerate(folders.items()):
        data = read_run(folder, tokens_mb=max(MIN_TOKENS_MB, TOKENS_MB * min(1.0, 2 * share)))
        shown.append(_collect_run(data, name, number, blocks, share=share, max_points=max_points))
        # Without the rollouts, which take most of the memory.
        curves.append(_Records(config=data.config, steps=data.steps, evaluations=data.evaluations))
    report = {
        "written": written_s,
        "looked_for": [kind.replace("_", " ") for kind in KINDS],
        "enough_steps": ENOUGH_STEPS,
        "runs": shown,
        "lines": _list_lines(shown, curves, blocks, max_points=max_points),
        "differences": compare_configs([run["config"] for run in shown]),
    }
    page = render(title=_make_title(list(folders)), report=report, blocks=blocks)
    with replace_file(file) as temporary:
        temporary.write_text(page, encoding="utf-8", errors="backslashreplace")
    return shown


@dataclass(frozen=True, kw_only=True, slots=True)
class _Records:
    """Parts of a run that bands are made of."""

    config: Mapping[str, Any]
    steps: Sequence[Mapping[str, float]]
    evaluations: Sequence[Mapping[str, float]]


def _make_title(names: Sequence[str]) -> str:
    if len(names) > MANY:
        return f"{names[0]}, {names[1]} and {len(names) - 2} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _list_lines(
    shown: Sequence[Mapping[str, Any]],
    curves: Sequence[_Records],
    blocks: list[tuple[str, str]],
    *,
    max_points: int,
) -> list[dict[str, Any]]:
    """Return the lines of a chart: of a run, or of runs that differ only by seed.

    A line has `name`, `block` with its curves, and the numbers of its `runs`; blocks of bands are
    appended.
    """
    groups = [[number] for number in range(len(shown))]
    if len(shown) >= MANY:
        groups = group_runs([run.config for run in curves])
    lines = []
    for group in groups:
        members = [curves[number] for number in group]
        name, block = shown[group[0]]["name"], shown[group[0]]["blocks"]["curves"]
        if len(group) > 1:
            name = name_group(
                [shown[number]["name"] for number in group], [run.config for run in members]
            )
            block = f"band-{group[0]}"
            bands = pack_bands(
                [run.steps for run in members],
                [run.evaluations for run in members],
                max_points=max_points,
            )
            blocks.append((block, pack(bands)))
        lines.append({"name": name, "block": block, "runs": group})
    return lines


def _collect_run(
    data: RunData,
    name: str,
    number: int,
    blocks: list[tuple[str, str]],
    *,
    share: float,
    max_points: int,
) -> dict[str, Any]:
    """Return what is shown at once; append the rest to the blocks, within a share of the page."""
    folder = data.folder
    values = data.config.get("values") or {}
    findings = find(data)
    found = find_bottleneck(compute_typical_step(data.steps), values)
    states = list(read_states(folder / "logs"))
    # Without its process a controller that was killed would look like a running one.
    controller = next((s for s in states if s.role == "controller" and s.is_here), None)
    texts, no_texts = open_token_texts(folder, values)
    options, config_note = list_config(data.config, defaults=data.defaults)
    rollouts = pack_rollouts(
        data.rollouts,
        texts,
        max_bytes=int(share * ROLLOUT_BYTES),
        keep=find_evidence_lines(findings, data.rollouts),
    )
    timeline = pack_timeline(
        data.spans, data.events[-MAX_EVENTS:], max_blocks=int(share * MAX_BLOCKS)
    )
    names = {part: f"{part}-{number}" for part in ("curves", "timeline", "rollouts")}
    chunk = f"chunk-{number}-"
    blocks.append(
        (names["curves"], pack(pack_curves(data.steps, data.evaluations, max_points=max_points)))
    )
    blocks.append((names["timeline"], pack(timeline)))
    blocks.append((names["rollouts"], pack(rollouts.index)))
    for i, block in enumerate(rollouts.chunks):
        blocks.append((f"{chunk}{i}", block))
    problems = [*data.problems]
    if no_texts and _has_tokens(data):
        problems.append(no_texts)
    return {
        "name": name,
        "folder": str(folder),
        "facts": collect_facts(
            data, is_alive=None if controller is None else is_alive(controller.process)
        ),
        "breakdown": break_down(data),
        "bottleneck": found and asdict(found),
        "findings": [asdict(finding) for finding in findings],
        "problems": problems,
        "events": data.events[-MAX_EVENTS:],
        "num_events": len(data.events),
        "config": options,
        "config_note": config_note,
        "environment": data.environment,
        "processes": [
            {"role": s.role, "rank": s.rank, "host": s.host, "pid": s.process.pid} for s in states
        ],
        "blocks": names | {"chunk": chunk, "chunks": len(rollouts.chunks)},
    }


def _has_tokens(data: RunData) -> bool:
    turns = chain.from_iterable(rollout["turns"] for rollout in data.rollouts)
    return any("token_ids" in turn for turn in turns)


def render(*, title: str, report: Mapping[str, Any], blocks: Iterable[tuple[str, str]]) -> str:
    """Return the page.

    Args:
        report: what static/*.js shows at once.
        blocks: identifier and packed data of each block.
    """
    scripts = [_read(name) for name in _SCRIPTS]
    environment = Environment(
        loader=FileSystemLoader(_HERE / "static"), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("page.html.jinja").render(
        title=title,
        sections=SECTIONS,
        styles=[Markup(_read(name)) for name in _STYLES],
        scripts=[Markup(script) for script in scripts],
        # Only these scripts run, so data of a run cannot pass for one.
        script_hashes=Markup(" ".join(_hash(script) for script in scripts)),
        report=Markup(embed_json(report)),
        blocks=[(id_, Markup(block)) for id_, block in blocks],
    )


def embed_json(value: Any) -> str:
    """Return JSON for a `<script>` element; numbers that are not finite become strings."""
    text = format_json(value)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _read(name: str) -> str:
    text = (_HERE / name).read_text(encoding="utf-8")
    assert "</script" not in text.lower(), name
    assert "</style" not in text.lower(), name
    return text


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
