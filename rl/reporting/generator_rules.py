"""Rule for generators with wrong weights, seen in the versions of tokens or in their logprobs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from statistics import median
from typing import Any

from rl.reporting.data import RunData
from rl.reporting.evidence import (
    Finding,
    Series,
    make_series,
    pick_evenly,
    read_series,
    select_kind,
    show,
    show_rollout,
)

DIFF = "logprob_diff/mean"
JUMP = 10.0
"""Factor of a jump of the logprob difference of tokens of the same weights."""
ROUNDING = 1e-4
"""Nats a token below which a difference is rounding."""
GROWS_ON = 2.0
"""Factor of further growth after a jump if the weights stay and the trainer goes on."""
MIN_STEPS = 4
IN_STEP = re.compile(r"\bstep (\d+)\b")
ADVICE = (
    "Compare `sync/version` with `policy_version` and the generators' logs at that step, and let "
    "parity.enable (on by default) check every pull; loop.max_logprob_diff stops a run at the "
    "first such step."
)


def find_stale_generator(run: RunData) -> Finding | None:
    """Find a generator that keeps old weights, by its versions or else by its logprobs."""
    return _judge_versions(run) or _judge_logprobs(run)


def _judge_versions(run: RunData) -> Finding | None:
    """Find tokens older than `loop.max_off_policy_steps`, or a pulled version that stays."""
    lag, behind = _measure_token_lag(run), _measure_pull_lag(run)
    stop = find_stop(run, "StalePolicyError")
    if stop is not None:
        title, (since, sentence) = "The generator kept old weights", stop
    else:
        title = "The generator keeps old weights"
        # Versions count optimizer steps, the option counts steps of the loop.
        num_minibatches = run.get_number("loop.num_minibatches", 1)
        bound = run.get_number("loop.max_off_policy_steps", 0) * num_minibatches
        patience = bound + run.get_number("loop.publish_every", 1) * num_minibatches
        starts = [
            lag.find_lasting(lambda value: value > bound, hold=3),
            _find_start_of_lag(behind, patience),
        ]
        if not any(starts):
            return None
        since = min(step for step in starts if step is not None)
        most = max((*lag.select_from(since).values, *behind.select_from(since).values))
        sentence = (
            f"Since step {since} rollouts come from weights up to {most:g} optimizer steps older "
            f"than those that they train; loop.max_off_policy_steps allows {bound}."
        )
    examples = []
    for rollout in pick_evenly(select_kind(run.rollouts, "train", "pending")[-32:], 2):
        note = f"of policy versions {sorted(set(_get_versions(rollout)))}"
        examples.append(show_rollout(rollout, note=note))
    return Finding(
        kind="stale_generator",
        title=title,
        since_step=since,
        sentence=sentence,
        advice=ADVICE,
        evidence=show(lag, behind, rollouts=examples),
    )


def _find_start_of_lag(behind: Series, patience: float) -> int | None:
    """Return the step after the last fresh one, if the lag exceeds the patience for good."""
    # The lag exceeds the patience only some steps after the last pull.
    late = behind.find_lasting(lambda value: value > patience, hold=3)
    if late is None:
        return None
    before = behind.select_before(late)
    after_fresh = 0
    for step, value in zip(before.steps, before.values, strict=True):
        if value <= 0:
            after_fresh = step + 1
    return behind.select_from(after_fresh).steps[0]


def find_stop(run: RunData, error: str) -> tuple[int, str] | None:
    """Return the step at which this kind of error stopped the run, and a sentence, or None."""
    for event in run.events:
        reason = str(event.get("reason", ""))
        if event["event"] == "stopped" and reason.startswith(error):
            match = IN_STEP.search(reason)
            done = int(run.steps[-1]["step"]) if run.steps else 0
            return int(match[1]) if match else done + 1, f"The run stopped: {reason}"
    return None


def _measure_token_lag(run: RunData) -> Series:
    """Return by step the optimizer steps from its oldest tokens to its first weights."""
    begins = {int(r["step"]) + 1: r["policy_version"] for r in run.steps if "policy_version" in r}
    lag: dict[int, float] = {}
    for rollout in select_kind(run.rollouts, "train"):
        step = rollout["step"]
        if step in begins:
            for version in _get_versions(rollout):
                lag[step] = max(begins[step] - version, lag.get(step, 0.0))
    return make_series("optimizer steps behind, of recorded tokens", lag)


def _get_versions(rollout: dict[str, Any]) -> Iterable[int]:
    for turn in rollout["turns"]:
        versions = turn.get("policy_versions", [])
        yield from [versions] if isinstance(versions, int) else versions


def _measure_pull_lag(run: RunData) -> Series:
    """Return by step the optimizer steps by which the pulled version is behind the trainer's."""
    lag = {}
    for record in run.steps:
        if "sync/version" in record and "policy_version" in record:
            lag[int(record["step"])] = record["policy_version"] - record["sync/version"]
    return make_series("policy_version - sync/version", lag)


def _judge_logprobs(run: RunData) -> Finding | None:
    """Find a step from which on trainer and generator disagree about tokens of the same weights."""
    # Older tokens have other logprobs by nature.
    on_policy = [r for r in run.steps if r.get("age/mean", 0.0) == 0.0]
    diffs = read_series(on_policy, DIFF)
    if len(diffs) < MIN_STEPS:
        return None
    place = next((i for i in range(1, len(diffs)) if _is_jump(diffs, i)), None)
    if place is None:
        return None

    before, after = diffs.values[:place], diffs.select_from(diffs.steps[place])
    since = after.steps[0]
    if max(after.values[-3:]) >= GROWS_ON * after.values[0]:
        kind, title = "stale_generator", "The generator keeps old weights"
        what = (
            "The difference grows with every update, as if the generator's weights did not change"
        )
    else:
        kind, title = "logprob_difference", "Trainer and generator do not compute the same"
        what = "The difference stays constant, as with another precision or other sampling settings"

    names = (DIFF, "logprob_diff/max", "canary/logprob_diff", "age/mean", "loss/ratio_mean")
    later = [r for r in select_kind(run.rollouts, "train") if r["step"] >= since][:64]
    examples = []
    for rollout in sorted(later, key=_measure_gap, reverse=True)[:2]:
        note = f"its logprobs differ by up to {_measure_gap(rollout):.3g} nats"
        examples.append(show_rollout(rollout, note=note))
    return Finding(
        kind=kind,
        title=title,
        since_step=since,
        sentence=(
            f"Since step {since} the logprobs of trainer and generator differ by "
            f"{after.last_level:.2g} nats a token, before by {median(before):.2g}. {what}."
        ),
        advice=ADVICE,
        evidence=show(*(read_series(run.steps, name) for name in names), rollouts=examples),
    )


def _is_jump(diffs: Series, place: int) -> bool:
    """Return whether the difference rises here to ten times the usual one, and stays there."""
    least = max(ROUNDING, JUMP * median(diffs.values[:place]))
    after = diffs.values[place:]
    return after[0] >= least and sum(value >= least for value in after) >= 0.8 * len(after)


def _measure_gap(rollout: dict[str, Any]) -> float:
    """Return the largest logprob difference of a token, or 0 if logprobs were not recorded."""
    largest = 0.0
    for turn in rollout["turns"]:
        pairs = zip(turn.get("logprobs", ()), turn.get("trainer_logprobs", ()), strict=False)
        for generator, trainer in pairs:
            if isinstance(generator, int | float) and isinstance(trainer, int | float):
                largest = max(largest, abs(generator - trainer))
    return largest
