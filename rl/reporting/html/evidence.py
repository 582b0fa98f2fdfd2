"""Findings as a page shows them: each with the curves and the rollouts that it is seen in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from rl.reporting.findings import Evidence, Finding
from rl.reporting.html.rollouts import Line

MAX_POINTS = 400
"""Of a curve beside a finding: it shows that something changes, the page's own curve shows how."""


def told_finding(finding: Finding) -> dict[str, Any]:
    """As static/overview.js reads it."""
    return {
        "kind": finding.kind,
        "title": finding.title,
        "since_step": finding.since_step,
        "sentence": finding.sentence,
        "evidence": [_evidence(evidence) for evidence in finding.evidence],
    }


def referred_lines(findings: Iterable[Finding], lines: Sequence[Line]) -> frozenset[int]:
    """Numbers of the recorded rollouts that findings refer to."""
    wanted = {
        (e.step, e.problem, e.sample) for finding in findings for e in finding.evidence if e.series is None
    }
    if not wanted:
        return frozenset()
    return frozenset(
        n
        for n, line in enumerate(lines)
        if (line.get("step"), line.get("problem"), line.get("sample")) in wanted
    )


def _evidence(evidence: Evidence) -> dict[str, Any]:
    if evidence.series is None:
        rollout = {
            "step": evidence.step,
            "problem": evidence.problem,
            "sample": evidence.sample,
            "excerpt": evidence.text,
        }
        return {"rollout": rollout, "note": evidence.note}
    pairs = [(x, y) for x, y in zip(evidence.steps, evidence.values, strict=True) if math.isfinite(y)]
    every = max(1, math.ceil(len(pairs) / MAX_POINTS))
    shown = pairs[::every]
    return {
        "series": evidence.series,
        "x": [x for x, _ in shown],
        "y": [y for _, y in shown],
        "note": evidence.note,
    }
