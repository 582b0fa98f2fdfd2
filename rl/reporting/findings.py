"""Findings: what looks wrong in a run, since which step, and the evidence.

    for finding in find(read_run("outputs/try-1")):
        print(finding.since_step, finding.title, finding.sentence)

Each rule is a function from a run's data to a finding or None. Rules are cautious, since a healthy run must have no
finding. docs/troubleshooting.md describes what each rule looks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median

from rl.reporting.data import RunData
from rl.reporting.evidence import Finding, RolloutEvidence, metric, rollout_evidence, series, shown
from rl.reporting.generator_rules import find_stale_generator, step_of, stop_reason
from rl.reporting.length_rules import find_length_drift
from rl.reporting.reward_rules import find_reward_hacking

ENTROPY, EQUAL, CORRECT = "loss/entropy_mean", "reward/equal_groups", "reward/correct"
COLLAPSED = 0.1
"""Share of the first entropy that counts as collapsed."""
SOLVED = 0.9
"""Share of correct replies that counts as solved."""
NO_VARIANCE = 0.9
"""Share of groups with equal rewards that leaves too little to learn from."""
MIN_STEPS = 5
FAILED_SHARE = 0.02
"""Share of a step's rewards that may fail."""
MIN_FAILED_STEPS = 3
WAITS, SCORING = 0.85, 0.5
"""Shares of a step in which one role waits for another although they overlap, and in which all wait for rewards."""
WAITING = (
    (
        "time/score_s",
        "Trainer and generators wait for rewards",
        "More processes (reward.num_procs), async functions (docs/rewards.md), or a faster one.",
    ),
    (
        "time/trainer_idle_s",
        "The trainer waits for rollouts",
        "More generators (generator.num_replicas), or fewer devices for the trainer: generation is the limit.",
    ),
    (
        "time/generator_idle_s",
        "Generators wait for the trainer",
        "More devices for the trainer, or fewer generators: training is the limit. A higher "
        "loop.max_off_policy_steps does not help.",
    ),
)
"""Metric of a wait, and the title and the advice of its finding."""


def find_collapsed_entropy(run: RunData) -> Finding | None:
    """Find an entropy that has collapsed before the task was solved."""
    entropy = metric(run.steps, ENTROPY)
    if len(entropy) < 2 * MIN_STEPS or _is_solved(run):
        return None
    start = median(entropy.values[:3])
    since = entropy.lasting(lambda value: value <= COLLAPSED * start, hold=MIN_STEPS)
    if since is None or start <= 0:
        return None
    return Finding(
        kind="collapsed_entropy",
        title="The entropy has collapsed",
        since_step=since,
        sentence=(
            f"Since step {since} the entropy is below {COLLAPSED:.0%} of its start: it fell from {start:.3g} to "
            f"{entropy.last_level:.3g} nats a token. The replies of a group hardly differ, so there is little "
            "left to learn from."
        ),
        advice=(
            "A lower learning rate, a higher upper clip (`DAPOLoss`), an entropy bonus (its sign is plus), "
            "more samples of a prompt, or harder problems; continue from an earlier checkpoint."
        ),
        evidence=shown(entropy, metric(run.steps, CORRECT), rollouts=_last_group(run, since)),
    )


def find_no_variance(run: RunData) -> Finding | None:
    """Find a run in which nearly all groups have equal rewards although the task is not solved."""
    equal = metric(run.steps, EQUAL)
    since = equal.lasting(lambda value: value >= NO_VARIANCE, hold=MIN_STEPS)
    if since is None or len(equal.since(since)) < MIN_STEPS or _is_solved(run):
        return None
    return Finding(
        kind="no_reward_variance",
        title="Groups have equal rewards",
        since_step=since,
        sentence=(
            f"Since step {since} all replies of a group earn the same in {equal.since(since).last_level:.0%} of "
            "the groups: their advantages are 0, and they teach nothing."
        ),
        advice=(
            "Problems of another difficulty (docs/tasks.md, by pass rate), loop.drop_zero_advantage_groups, "
            "more samples of a prompt, or a reward with more levels between wrong and right."
        ),
        evidence=shown(
            equal,
            metric(run.steps, "reward/mean"),
            metric(run.steps, CORRECT),
            rollouts=_last_group(run, since),
        ),
    )


def _is_solved(run: RunData) -> bool:
    correct = metric(run.steps, CORRECT)
    return len(correct) > 0 and correct.last_level >= SOLVED


def _last_group(run: RunData, since: int) -> list[RolloutEvidence]:
    """Return up to three replies to the problem that was recorded last."""
    lines = [r for r in run.rollouts if r["kind"] in ("train", "dropped") and r["step"] >= since]
    group = [
        r for r in lines if (r["step"], r.get("problem")) == (lines[-1]["step"], lines[-1].get("problem"))
    ]
    return [rollout_evidence(r, note=f"reward {r.get('reward')}") for r in group[:3]]


def find_failed_rewards(run: RunData) -> Finding | None:
    """Find rollouts that could not be scored, step after step."""
    failed = metric(run.steps, "reward/num_failed")
    drawn = run.setting("loop.groups_per_batch", 0) * run.setting("loop.group_size", 0)
    least = max(1.0, FAILED_SHARE * drawn)
    since = failed.lasting(lambda value: value >= least, hold=MIN_FAILED_STEPS, share=0.5)
    if since is None:
        return None
    after = failed.since(since).values
    failures = [r for r in run.rollouts if "failure" in r and r["step"] >= since]
    first = f" The first error: {str(failures[0]['failure'])[:200]}" if failures else ""
    return Finding(
        kind="failed_rewards",
        title="Many rewards fail",
        since_step=since,
        sentence=(
            f"Since step {since} {sum(after) / len(after):.3g}{f' of {drawn}' if drawn else ''} rollouts of a "
            f"step cannot be scored and are not trained on.{first}"
        ),
        advice="docs/rewards.md; loop.max_failed_rewards stops a run in which too many rewards fail.",
        evidence=shown(
            failed, rollouts=[rollout_evidence(r, note=str(r["failure"])[:200]) for r in failures[:3]]
        ),
    )


def find_not_finite(run: RunData) -> Finding | None:
    """Find a loss, gradient or reward that is NaN or infinite, in a record or as the reason of a stop."""
    reason = stop_reason(run, "NonFiniteLossError")
    for record in run.steps:
        names = [n for n, v in record.items() if n.startswith(("loss/", "reward/")) and not math.isfinite(v)]
        if names:
            since = int(record["step"])
            sentence = f"{', '.join(sorted(names))} of step {since} is not finite."
            break
    else:
        if reason is None:
            return None
        since, sentence = step_of(run, reason), f"The run stopped: {reason}"
    return Finding(
        kind="not_finite",
        title="Numbers of the loss are not finite",
        since_step=since,
        sentence=sentence,
        advice=(
            "docs/checkpoints.md: the batch is in nan_batch_version_<n>.npz. Look at the rewards and "
            "advantages of that step, then try a lower learning rate, trainer.training.max_norm, and "
            "float32 parameters."
        ),
        evidence=shown(metric(run.steps, "loss/grad_norm"), metric(run.steps, "loss/mean")),
    )


def find_idle_actor(run: RunData) -> Finding | None:
    """Find a role that waits for most of a step."""
    overlaps = run.setting("loop.max_off_policy_steps", 0) > 0
    for name, title, advice in WAITING if overlaps else WAITING[:1]:
        records = [r for r in run.steps if name in r and r.get("time/step_s", 0.0) > 0]
        shares = series(
            f"{name} / time/step_s", {int(r["step"]): r[name] / r["time/step_s"] for r in records}
        )
        least = SCORING if name == "time/score_s" else WAITS
        since = shares.lasting(lambda value: value >= least, hold=MIN_STEPS)  # noqa: B023  (called at once)
        if since is not None and len(shares.since(since)) >= MIN_STEPS:
            return Finding(
                kind="idle_actor",
                title=title,
                since_step=since,
                sentence=f"Since step {since} this wait takes {shares.since(since).last_level:.0%} of a step.",
                advice=advice,
                evidence=shown(shares),
            )
    return None


RULES: tuple[Callable[[RunData], Finding | None], ...] = (
    find_not_finite,
    find_stale_generator,
    find_reward_hacking,
    find_length_drift,
    find_collapsed_entropy,
    find_no_variance,
    find_failed_rewards,
    find_idle_actor,
)
KINDS = (
    "not_finite",
    "stale_generator",
    "logprob_difference",
    "reward_hacking",
    "reward_not_correct",
    "length_drift",
    "collapsed_entropy",
    "no_reward_variance",
    "failed_rewards",
    "idle_actor",
)


def find(run: RunData) -> list[Finding]:
    """Return the findings of all rules, the earliest first."""
    found = [finding for rule in RULES if (finding := rule(run)) is not None]
    return sorted(found, key=lambda finding: finding.since_step)
