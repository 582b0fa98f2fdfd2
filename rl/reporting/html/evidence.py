"""Findings as a page shows them: each with the curves and the rollouts that it is seen in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from rl.reporting.evidence import Evidence, Finding, RolloutEvidence
from rl.reporting.html.rollouts import Line


def told_finding(finding: Finding) -> dict[str, Any]:
    """As static/overview.js reads it."""
    return {
        "kind": finding.kind,
        "title": finding.title,
        "since_step": finding.since_step,
        "sentence": finding.sentence,
        "advice": finding.advice,
        "evidence": [_told(evidence) for evidence in finding.evidence],
    }


def referred_lines(findings: Iterable[Finding], lines: Sequence[Line]) -> frozenset[int]:
    """Numbers of the recorded rollouts that findings refer to."""
    wanted = {
        (evidence.step, evidence.problem, evidence.sample)
        for finding in findings
        for evidence in finding.evidence
        if isinstance(evidence, RolloutEvidence)
    }
    if not wanted:
        return frozenset()
    return frozenset(
        number
        for number, line in enumerate(lines)
        if (line.get("step"), line.get("problem"), line.get("sample")) in wanted
    )


def _told(evidence: Evidence) -> dict[str, Any]:
    if isinstance(evidence, RolloutEvidence):
        rollout = {
            "step": evidence.step,
            "problem": evidence.problem,
            "sample": evidence.sample,
            "excerpt": evidence.text,
        }
        return {"rollout": rollout, "note": evidence.note}
    pairs = zip(evidence.steps, evidence.values, strict=True)
    finite = [(step, value) for step, value in pairs if math.isfinite(value)]
    return {"series": evidence.name, "x": [step for step, _ in finite], "y": [value for _, value in finite]}
