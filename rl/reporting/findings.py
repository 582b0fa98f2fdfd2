"""Findings: what looks wrong in a run, since which step, and the evidence.

    for finding in find(read_run("outputs/try-1")):
        print(finding.since_step, finding.title, finding.sentence)

Each rule is a function from a run's data to a finding or None. Rules are cautious, since a healthy
run must have no finding. docs/troubleshooting.md describes what each rule looks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from statistics import median
from typing import Any

from rl.reporting.data import RunData
from rl.reporting.evidence import (
    Finding,
    RolloutEvidence,
    Series,
    get_reward,
    make_series,
    pick_evenly,
    read_series,
    select_kind,
    show,
    show_rollout,
)
from rl.reporting.generator_rules import find_stale_generator, find_stop
from rl.reporting.learning_rules import find_no_signal, find_no_update, is_solved, show_last_group
from rl.reporting.reward_rules import find_reward_hacking

ENOUGH_STEPS = 10
"""Steps after which every rule can tell; a shorter run may be too short for a finding."""
ENTROPY, CORRECT = "loss/entropy_mean", "reward/correct"
COLLAPSED = 0.1
"""Share of the first entropy that counts as collapsed."""
MIN_STEPS = 5
FAILED_SHARE = 0.02
"""Share of a step's rewards that may fail."""
MIN_FAILED_STEPS = 3
LENGTH_TIMES = 1.5
"""Factor by which the length changes."""
LENGTH_SUCCESS = 0.03
"""Rise of the share of right replies that justifies a change of length."""
MIN_LENGTH_STEPS = 10
PAYS = 0.8
"""Agreement of length and reward, -1 to 1, from which on length is paid for."""
MIN_DIFFERENT = 0.1
"""Share of a step's pairs that must have different rewards."""
MAX_PAIRS = 2000
"""Pairs of a step that are compared."""
SLOW_SCORE = 0.4
"""Share of a step that scoring takes if it is slow, and the largest part of the step."""
SLOW_SCORE_S = 0.5
"""Seconds of scoring in a step below which nobody waits for it."""
NUM_FIRST_STEPS = 2
"""First steps of a run, in which the reward functions are imported and everything compiles."""


def find_collapsed_entropy(run: RunData) -> Finding | None:
    """Find an entropy that has collapsed before the task was solved."""
    entropy = read_series(run.steps, ENTROPY)
    if len(entropy) < 2 * MIN_STEPS or is_solved(run):
        return None
    # A single first value is noisy.
    start = median(entropy.values[:3])
    since = entropy.find_lasting(lambda value: value <= COLLAPSED * start, hold=MIN_STEPS)
    if since is None or start <= 0:
        return None
    return Finding(
        kind="collapsed_entropy",
        title="The entropy has collapsed",
        since_step=since,
        sentence=(
            f"Since step {since} the entropy is below {COLLAPSED:.0%} of its start: it fell from "
            f"{start:.3g} to {entropy.last_level:.3g} nats a token. The replies of a group hardly "
            "differ, so there is little left to learn from."
        ),
        advice=(
            "A lower learning rate, a higher upper clip (`DAPOLoss`), an entropy bonus (its sign "
            "is plus), more samples of a prompt, or harder problems; continue from an earlier "
            "checkpoint."
        ),
        evidence=show(
            entropy, read_series(run.steps, CORRECT), rollouts=show_last_group(run, since)
        ),
    )


def find_failed_rewards(run: RunData) -> Finding | None:
    """Find rollouts that could not be scored, step after step."""
    failed = read_series(run.steps, "reward/num_failed")
    drawn = run.get_number("loop.groups_per_batch", 0) * run.get_number("loop.group_size", 0)
    # A failure now and then is normal where rewards ask other machines.
    least = max(1.0, FAILED_SHARE * drawn)
    since = failed.find_lasting(lambda value: value >= least, hold=MIN_FAILED_STEPS, share=0.5)
    if since is None:
        return None
    after = failed.select_from(since).values
    failures = [r for r in run.rollouts if "failure" in r and r["step"] >= since]
    examples = [show_rollout(r, note=str(r["failure"])[:200]) for r in failures[:3]]
    first = f" The first error: {str(failures[0]['failure'])[:200]}" if failures else ""
    return Finding(
        kind="failed_rewards",
        title="Many rewards fail",
        since_step=since,
        sentence=(
            f"Since step {since} {sum(after) / len(after):.3g}{f' of {drawn}' if drawn else ''} "
            f"rollouts of a step cannot be scored and are not trained on.{first}"
        ),
        advice=(
            "docs/rewards.md; loop.max_failed_rewards stops a run in which too many rewards fail."
        ),
        evidence=show(failed, rollouts=examples),
    )


def find_slow_reward(run: RunData) -> Finding | None:
    """Find scoring that takes most of a step's time."""
    seconds = read_series(run.steps[NUM_FIRST_STEPS:], "time/score_s")
    share_of_step = {}
    for record in run.steps[NUM_FIRST_STEPS:]:
        score_s, step_s = record.get("time/score_s", 0.0), record.get("time/step_s", math.nan)
        others = [record.get(f"time/{part}_s", 0.0) for part in ("generate", "train", "publish")]
        if score_s >= max(*others, SLOW_SCORE_S) and step_s > 0:
            share_of_step[int(record["step"])] = score_s / step_s
        else:
            share_of_step[int(record["step"])] = 0.0
    shares = make_series("share of a step in which the loop waits for rewards", share_of_step)
    since = shares.find_lasting(lambda share: share >= SLOW_SCORE, hold=3)
    if since is None or len(shares.select_from(since)) < 3:
        return None
    num_procs = run.get_number("reward.num_procs", 0)
    value = f" {2 * max(1, num_procs):.0f}" if "reward" in run.config.get("values", {}) else ""
    return Finding(
        kind="slow_reward",
        title="The reward is slow",
        since_step=since,
        sentence=(
            f"Since step {since} the run waits {seconds.select_from(since).last_level:.3g} s of "
            f"each step for rewards, {shares.select_from(since).last_level:.0%} of it."
        ),
        advice=(
            f"`--reward.num_procs{value}` scores more replies at a time; an async function "
            "overlaps the calls of a judge or another server (docs/rewards.md)."
        ),
        evidence=show(
            shares,
            seconds,
            read_series(run.steps, "time/generate_s"),
            read_series(run.steps, "time/train_s"),
        ),
    )


def find_not_finite(run: RunData) -> Finding | None:
    """Find a loss, gradient or reward that is NaN or infinite, recorded or as cause of a stop."""
    first = find_stop(run, "NonFiniteLossError")
    # Backwards, so that the first such step is what remains.
    for record in reversed(run.steps):
        names = []
        for name, value in record.items():
            if name.startswith(("loss/", "reward/")) and not math.isfinite(value):
                names.append(name)
        if names:
            step = int(record["step"])
            first = (step, f"{', '.join(sorted(names))} of step {step} is not finite.")
    if first is None:
        return None
    since, sentence = first
    return Finding(
        kind="not_finite",
        title="Numbers of the loss are not finite",
        since_step=since,
        sentence=sentence,
        advice=(
            "docs/checkpoints.md: the batch is in nan_batch_version_<n>.npz. Look at the rewards "
            "and advantages of that step, then try a lower learning rate, "
            "trainer.training.max_norm, and float32 parameters."
        ),
        evidence=show(
            read_series(run.steps, "loss/grad_norm"), read_series(run.steps, "loss/mean")
        ),
    )


def find_length_drift(run: RunData) -> Finding | None:
    """Find replies that get longer or shorter for no good reason."""
    lengths = read_series(run.steps, "completion/tokens_mean")
    success = read_series(run.steps, "reward/correct")
    if len(lengths) < MIN_LENGTH_STEPS:
        return None

    # Length may drift because it is paid for, or because nothing holds it back.
    paid = _measure_pay_for_length(run.rollouts)
    found = _find_drift_without_success(lengths, success)
    paid_since = paid.find_lasting(lambda value: value >= PAYS, hold=3, share=0.6)
    if found is None:
        # Longer replies that are right more often are fine, unless length itself earns.
        if paid_since is None or not _grows(lengths, since=paid_since):
            return None
        drift, began = 1, lengths.steps[0]
    else:
        drift, began = found
        if drift < 0:
            paid_since = paid.find_lasting(lambda value: value <= -PAYS, hold=3, share=0.6)
    # What the sentence says of success has to be true of the part in which the drift was found.
    since = paid_since or max(began, _find_start_of_drift(lengths, drift))

    before, right = lengths.select_before(since), success.select_from(since)
    how = "longer" if drift > 0 else "shorter"
    was = (before if len(before) else lengths).last_level
    now = lengths.select_from(since).last_level
    sentence = f"Since step {since} replies go from {was:.4g} to {now:.4g} tokens"
    if len(right):
        sentence += f", and right replies go from {right.first_level:.0%} to {right.last_level:.0%}"
    if paid_since:
        sentence += f"; of equally right replies the {how} one earns more"
    why = "without getting better" if drift > 0 else "and are right less often"
    if paid_since:
        why = "because they are paid for it"
    return Finding(
        kind="length_drift",
        title=f"Replies get {how} {why}",
        since_step=since,
        sentence=f"{sentence}.",
        advice=(
            "Look at the sign and the size of whatever in the reward depends on length "
            "(loop.overlong, a part of the rubric), and at loop.sampling.max_tokens; a loss that "
            "divides by the length of each reply (docs/losses.md) also favours long wrong ones."
        ),
        evidence=show(
            lengths,
            success,
            read_series(run.steps, "completion/cut_off"),
            paid,
            rollouts=_show_replies_around(run, since),
        ),
    )


def _find_drift_without_success(lengths: Series, success: Series) -> tuple[int, int] | None:
    """Return the direction of a drift, and the first step of the part in which it was found.

    The direction is 1 if replies get longer without being right more often, and -1 if they get
    shorter and are right less often.
    """
    if len(success) != len(lengths):
        return None
    # The drift may begin late, after a part in which length and success rose together.
    for start in range(0, len(lengths) - MIN_LENGTH_STEPS + 1, max(1, len(lengths) // 10)):
        part = lengths.select_from(lengths.steps[start])
        right = success.select_from(success.steps[start])
        change = math.log(max(part.last_level, 1e-3) / max(part.first_level, 1e-3))
        if (
            change >= math.log(LENGTH_TIMES)
            and right.last_level - right.first_level < LENGTH_SUCCESS
        ):
            return 1, part.steps[0]

    # Shorter replies that are right as often are a gain. So success is compared with what it was
    # before the drift: in a part of the run it may fall by chance.
    since = _find_start_of_drift(lengths, -1)
    change = math.log(max(lengths.last_level, 1e-3) / max(lengths.first_level, 1e-3))
    before = success.select_before(since)
    fell = len(before) > 0 and success.last_level - before.last_level <= -LENGTH_SUCCESS
    return (-1, since) if fell and change <= -math.log(LENGTH_TIMES) else None


def _grows(lengths: Series, *, since: int) -> bool:
    # Compared with the steps before, as a run that continues may begin anywhere.
    before = lengths.select_before(since + 1).values[-5:] or lengths.values[:1]
    return lengths.last_level >= 1.3 * sum(before) / len(before)


def _find_start_of_drift(lengths: Series, drift: int) -> int:
    """Return the step from which the length has left its first level for good."""
    # In logarithms, so that half and double count alike.
    level = math.log(max(lengths.first_level, 1e-3))
    since = lengths.find_lasting(
        lambda value: drift * (math.log(max(value, 1e-3)) - level) >= math.log(1.2), hold=3
    )
    return since or lengths.steps[0]


def _measure_pay_for_length(rollouts: Iterable[dict[str, Any]]) -> Series:
    """Return by step how far longer replies earn more (1) or less (-1) than equally right ones.

    Pairs of recorded replies to one problem are compared that are both right or both wrong and earn
    different rewards. The value is 0 if hardly any rewards differ; steps without pairs are left
    out.
    """
    groups: dict[tuple[int, object, object], list[tuple[int, float]]] = {}
    for rollout in select_kind(rollouts, "train"):
        if get_reward(rollout) is not None and rollout.get("correct"):
            key = (rollout["step"], rollout.get("problem"), rollout.get("correct"))
            groups.setdefault(key, []).append((_count_length(rollout), _sum_rewards(rollout)))

    signs: dict[int, list[int]] = {}
    for (step, _, _), members in groups.items():
        signs_of_step = signs.setdefault(step, [])
        # Groups of thousands would have millions of pairs.
        for (length, reward), (other_length, other) in combinations(members, 2):
            if length != other_length and len(signs_of_step) < MAX_PAIRS:
                signs_of_step.append(_sign(length - other_length) * _sign(reward - other))

    agreements = {}
    for step, signs_of_step in signs.items():
        if signs_of_step:
            agreements[step] = _average_signs(signs_of_step)
    return make_series("reward for length, -1 to 1", agreements)


def _average_signs(signs: Sequence[int]) -> float:
    """Return the mean of the nonzero signs, or 0 if they are few."""
    num = sum(map(abs, signs))
    return sum(signs) / num if num >= max(2, MIN_DIFFERENT * len(signs)) else 0.0


def _count_length(rollout: dict[str, Any]) -> int:
    """Return the number of tokens, or of characters if tokens were not recorded."""
    length = 0
    for turn in rollout["turns"]:
        length += len(turn.get("token_ids") or str(turn.get("reply", "")))
    return length


def _sum_rewards(rollout: dict[str, Any]) -> float:
    """Return the reward including the penalty for length (`loop.overlong`)."""
    return float(rollout["reward"]) + float(rollout.get("parts", {}).get("overlong", 0.0))


def _sign(difference: float) -> int:
    # Rewards that differ by rounding only are equal.
    return 0 if abs(difference) < 1e-9 else 1 if difference > 0 else -1


def _show_replies_around(run: RunData, since: int) -> Iterable[RolloutEvidence]:
    trained = [r for r in select_kind(run.rollouts, "train") if get_reward(r) is not None]
    before = [r for r in trained if r["step"] < since]
    after = [r for r in trained if r["step"] >= since]
    for part in (before, after):
        for rollout in pick_evenly(part[-16:], 2):
            note = f"{_count_length(rollout)} tokens, reward {_sum_rewards(rollout):.4g}"
            yield show_rollout(rollout, note=note)


RULES: tuple[Callable[[RunData], Finding | None], ...] = (
    find_not_finite,
    find_stale_generator,
    find_reward_hacking,
    find_length_drift,
    find_no_signal,
    find_no_update,
    find_collapsed_entropy,
    find_failed_rewards,
    find_slow_reward,
)
KINDS = (
    "wrong_template",
    "replies_cut_off",
    "unparsed_replies",
    "never_right",
    "no_reward_variance",
    "nothing_learned",
    "not_finite",
    "stale_generator",
    "logprob_difference",
    "reward_hacking",
    "reward_not_correct",
    "length_drift",
    "collapsed_entropy",
    "failed_rewards",
    "slow_reward",
)


def find(run: RunData) -> list[Finding]:
    """Return the findings of all rules, the earliest first."""
    findings = []
    for rule in RULES:
        finding = rule(run)
        if finding is not None:
            findings.append(finding)
    return sorted(findings, key=lambda finding: finding.since_step)
