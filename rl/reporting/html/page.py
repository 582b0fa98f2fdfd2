"""One HTML file that holds all it needs: styles, scripts, data. It asks nothing of any network.

The page's own policy (`Content-Security-Policy`) lets no script run but those put here, and lets nothing be
fetched; what a run wrote is data, in blocks that no parser looks into, and becomes text nodes.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from rl.reporting.html.blocks import inline_json

_HERE = Path(__file__).parent
_STYLES = ("vendor/uPlot.min.css", "static/report.css")
_SCRIPTS = (
    "vendor/uPlot.iife.min.js", "static/dom.js", "static/theme.js", "static/charts.js", "static/overview.js",
    "static/curves.js", "static/timeline.js", "static/time.js", "static/tokens.js", "static/rollouts.js",
    "static/tables.js", "static/main.js",
)  # fmt: skip
"""In the order in which they run: uPlot, then what others use, then the page."""
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


def render(*, title: str, report: Mapping[str, Any], blocks: Iterable[tuple[str, str]]) -> str:
    """The page.

    Args:
        report: what is shown at once, as static/*.js reads it.
        blocks: identifier and text of each of `rl.reporting.html.blocks.packed`.
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
        # Known text, so nothing of a run can pass for a script.
        script_hashes=Markup(" ".join(_hash(script) for script in scripts)),
        report=Markup(inline_json(report)),
        blocks=[(id_, Markup(block)) for id_, block in blocks],
    )


def _read(name: str) -> str:
    text = (_HERE / name).read_text(encoding="utf-8")
    assert "</script" not in text.lower(), name
    assert "</style" not in text.lower(), name
    return text


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
