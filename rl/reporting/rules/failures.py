"""What went wrong on the way: rewards that failed, numbers that are not finite, a run that began again."""

from __future__ import annotations

import math
import re

from rl.reporting.evidence import Evidence, Finding, MetricEvidence, metric_evidence, rollout_evidence
from rl.reporting.run_data import RunData
from rl.reporting.series import Series, first_lasting, metric

FAILED_SHARE = 0.02
"""Of the rewards of a step."""
MIN_FAILED = 3
"""Steps in a row."""
MIN_WENT_BACK = 3
"""Times that a run went back to a checkpoint."""
IN_STEP = re.compile(r"\bstep (\d+)\b")


def find_failed_rewards(run: RunData) -> list[Finding]:
    """Step after step some rollouts could not be scored."""
    failed = metric(run.steps, "reward/num_failed")
    drawn = run.setting("loop.num_prompts", 0) * run.setting("loop.num_samples", 0)
    least = max(1.0, FAILED_SHARE * drawn)
    place = first_lasting([value >= least for value in failed.values], hold=MIN_FAILED, share=0.5)
    if place is None:
        return []
    since = failed.steps[place]
    after = failed.since(since).values
    of = f" of {drawn}" if drawn else ""
    said = [r for r in run.rollouts if "failure" in r and r["step"] >= since]
    first = f" The first says: {str(said[0]['failure'])[:200]}" if said else ""
    return [
        Finding(
            kind="failed_rewards",
            title="Many rewards fail",
            since_step=since,
            sentence=(
                f"Since step {since} {sum(after) / len(after):.3g}{of} rollouts of a step cannot be "
                f"scored and are not trained on.{first}"
            ),
            advice=("docs/rewards.md; loop.max_failed_rewards stops a run in which too many fail."),
            evidence=(
                metric_evidence(failed),
                *(rollout_evidence(r, note=str(r["failure"])[:200]) for r in said[:3]),
            ),
        )
    ]


def find_not_finite(run: RunData) -> list[Finding]:
    """A loss, a gradient or a reward that is NaN or infinite, in a record or as why the run stopped."""
    bad = {
        int(record["step"]): [
            name
            for name, value in record.items()
            if name.startswith(("loss/", "reward/")) and not math.isfinite(value)
        ]
        for record in run.steps
    }
    steps = [step for step, names in bad.items() if names]
    reason = _stopped_by(run, "NonFiniteLossError")
    if not steps and reason is None:
        return []
    if steps:
        since = steps[0]
        sentence = f"{', '.join(sorted(bad[since]))} of step {since} is not finite"
        sentence += f", and so in {len(steps)} steps." if len(steps) > 1 else "."
    else:
        assert reason is not None
        match = IN_STEP.search(reason)
        since = int(match[1]) if match else int(run.steps[-1]["step"] if run.steps else 0) + 1
        sentence = f"The run stopped: {reason}"
    norms = metric(run.steps, "loss/grad_norm")
    evidence: list[Evidence] = [metric_evidence(s) for s in (norms, metric(run.steps, "loss/mean")) if len(s)]
    return [
        Finding(
            kind="not_finite",
            title="Numbers of the loss are not finite",
            since_step=since,
            sentence=sentence,
            advice=(
                "docs/stopped_runs.md: the batch is in nan_batch_version_<n>.npz. Look at rewards and "
                "advantages of that step, then at a lower learning rate, trainer.training.max_norm, and "
                "float32 for parameters."
            ),
            evidence=tuple(evidence),
        )
    ]


def find_went_back_often(run: RunData) -> list[Finding]:
    """A run that loses its trainer again and again does its steps twice."""
    backs = run.went_back
    if len(backs) < MIN_WENT_BACK:
        return []
    targets = [int(event.get("to_step", 0)) for event in backs]
    lost = [event for event in run.events if event["event"] == "lost"]
    reasons = f" The last loss: {lost[-1].get('role')}, {str(lost[-1].get('reason'))[:200]}." if lost else ""
    again = Series(name="went back to step", steps=range(1, len(targets) + 1), values=targets)
    return [
        Finding(
            kind="went_back_often",
            title="The run went back to a checkpoint again and again",
            since_step=targets[0],
            sentence=f"It went back {len(backs)} times, to the steps {_listed(targets)}.{reasons}",
            advice=(
                "The logs of the role that is lost say why (out of memory is the usual one); save more often "
                "(trainer.checkpoint.interval) meanwhile."
            ),
            evidence=(MetricEvidence(name=again.name, steps=tuple(again.steps), values=tuple(again.values)),),
        )
    ]


def _stopped_by(run: RunData, error: str) -> str | None:
    reasons = [str(event.get("reason", "")) for event in run.events if event["event"] == "stopped"]
    return next((reason for reason in reasons if reason.startswith(error)), None)


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown} ..." if len(numbers) > 8 else shown
