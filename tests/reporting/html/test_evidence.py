"""Findings as a page shows them."""

import math

from rl.reporting.evidence import Finding, MetricEvidence, RolloutEvidence
from rl.reporting.html.evidence import referred_lines, told_finding

FINDING = Finding(
    kind="length_drift",
    title="Replies grow",
    since_step=3,
    sentence="They grow.",
    advice="Look.",
    evidence=(
        MetricEvidence(name="completion/tokens_mean", steps=(1, 2, 3), values=(4.0, math.nan, 9.0)),
        RolloutEvidence(step=3, problem="p", sample=1, text="so long", note="nine tokens"),
    ),
)


def test_a_finding_has_its_curves_without_what_cannot_be_drawn_and_its_rollouts():
    assert told_finding(FINDING) == {
        "kind": "length_drift",
        "title": "Replies grow",
        "since_step": 3,
        "sentence": "They grow.",
        "advice": "Look.",
        "evidence": [
            {"series": "completion/tokens_mean", "x": [1, 3], "y": [4.0, 9.0]},
            {
                "rollout": {"step": 3, "problem": "p", "sample": 1, "excerpt": "so long"},
                "note": "nine tokens",
            },
        ],
    }


def test_the_rollouts_that_findings_refer_to_are_found_among_the_recorded_ones():
    lines = [{"step": step, "problem": "p", "sample": sample} for step in (2, 3) for sample in (0, 1)]
    assert referred_lines([FINDING], lines) == {3}
    assert referred_lines([], lines) == frozenset()
