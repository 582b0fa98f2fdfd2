"""Rule for generators with wrong weights, seen in the versions of tokens or in logprobs that move
apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from statistics import median
from typing import Any

from rl.reporting.data import RunData
from rl.reporting.evidence import Finding, Series, evenly, metric, rollout_evidence, series, shown

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
    return _by_versions(run) or _by_logprobs(run)


def _by_versions(run: RunData) -> Finding | None:
    """Find tokens older than `loop.max_off_policy_steps`, or a served version that does not
    move.
    """
    lag, behind = _token_lag(run), _served_lag(run)
    trained = [r for r in run.rollouts if r["kind"] in ("train", "pending")]
    rollouts = [
        rollout_evidence(r, note=f"of policy versions {sorted(set(_versions_of(r)))}")
        for r in evenly(trained[-32:], 2)
    ]
    evidence = shown(lag, behind, rollouts=rollouts)
    if (stop := stopped(run, "StalePolicyError")) is not None:
        title, (since, sentence) = "The generator kept old weights", stop
    else:
        title, num_minibatches = (
            "The generator keeps old weights",
            run.number("loop.num_minibatches", 1),
        )
        bound = run.number("loop.max_off_policy_steps", 0) * num_minibatches
        patience = bound + run.number("loop.publish_every", 1) * num_minibatches
        stuck = behind.lasting(lambda value: value > patience, hold=3)
        if stuck is not None:
            before = behind.before(stuck)
            fresh = [
                step for step, value in zip(before.steps, before.values, strict=True) if value <= 0
            ]
            stuck = behind.since(fresh[-1] + 1 if fresh else 0).steps[0]
        found = [lag.lasting(lambda value: value > bound, hold=3), stuck]
        if not any(found):
            return None
        since = min(step for step in found if step is not None)
        most = max((*lag.since(since).values, *behind.since(since).values))
        sentence = (
            f"Since step {since} rollouts come from weights up to {most:g} optimizer steps older "
            f"than those that they train; loop.max_off_policy_steps allows {bound}."
        )
    return Finding(
        kind="stale_generator",
        title=title,
        since_step=since,
        sentence=sentence,
        advice=ADVICE,
        evidence=evidence,
    )


def stopped(run: RunData, error: str) -> tuple[int, str] | None:
    """Return the step at which this kind of error stopped the run, and a sentence; None if it did
    not.
    """
    reasons = [str(event.get("reason", "")) for event in run.events if event["event"] == "stopped"]
    for reason in reasons:
        if reason.startswith(error):
            match = IN_STEP.search(reason)
            done = int(run.steps[-1]["step"]) if run.steps else 0
            return int(match[1]) if match else done + 1, f"The run stopped: {reason}"
    return None


def _token_lag(run: RunData) -> Series:
    """Return by step the optimizer steps between the first weights of the step and its oldest
    tokens.
    """
    begins = {int(r["step"]) + 1: r["policy_version"] for r in run.steps if "policy_version" in r}
    lag: dict[int, float] = {}
    for rollout in run.rollouts:
        step = rollout["step"]
        if rollout["kind"] == "train" and step in begins:
            for version in _versions_of(rollout):
                lag[step] = max(begins[step] - version, lag.get(step, 0.0))
    return series("optimizer steps behind, of recorded tokens", lag)


def _versions_of(rollout: dict[str, Any]) -> Iterable[int]:
    for turn in rollout["turns"]:
        versions = turn.get("policy_versions", [])
        yield from [versions] if isinstance(versions, int) else versions


def _served_lag(run: RunData) -> Series:
    """Return by step the optimizer steps by which the served version is behind the trainer's."""
    records = [r for r in run.steps if "sync/version" in r and "policy_version" in r]
    lag = {int(r["step"]): r["policy_version"] - r["sync/version"] for r in records}
    return series("policy_version - sync/version", lag)


def _by_logprobs(run: RunData) -> Finding | None:
    """Find a step from which on trainer and generator disagree about tokens of the same weights."""
    diffs = metric([r for r in run.steps if r.get("staleness/mean", 0.0) == 0.0], DIFF)
    if len(diffs) < MIN_STEPS:
        return None
    places = [i for i in range(1, len(diffs)) if _is_jump(diffs, i)]
    if not places:
        return None
    before, after = diffs.values[: places[0]], diffs.since(diffs.steps[places[0]])
    since = after.steps[0]
    if max(after.values[-3:]) >= GROWS_ON * after.values[0]:
        kind, title = "stale_generator", "The generator keeps old weights"
        what = (
            "The difference grows with every update, as if the generator's weights did not change"
        )
    else:
        kind, title = "logprob_difference", "Trainer and generator do not compute the same"
        what = "The difference stays constant, as with another precision or other sampling settings"
    names = (DIFF, "logprob_diff/max", "parity/logprob_diff", "staleness/mean", "loss/ratio_mean")
    later = [r for r in run.rollouts if r["kind"] == "train" and r["step"] >= since][:64]
    apart = sorted(later, key=_gap, reverse=True)[:2]
    return Finding(
        kind=kind,
        title=title,
        since_step=since,
        sentence=(
            f"Since step {since} the logprobs of trainer and generator differ by "
            f"{after.last_level:.2g} nats a token, before by {median(before):.2g}. {what}."
        ),
        advice=ADVICE,
        evidence=shown(
            *(metric(run.steps, name) for name in names),
            rollouts=[
                rollout_evidence(r, note=f"its logprobs differ by up to {_gap(r):.3g} nats")
                for r in apart
            ],
        ),
    )


def _is_jump(diffs: Series, place: int) -> bool:
    """Return whether the difference rises at this place to ten times the usual one, and stays
    there.
    """
    least = max(ROUNDING, JUMP * median(diffs.values[:place]))
    after = diffs.values[place:]
    return after[0] >= least and sum(value >= least for value in after) >= 0.8 * len(after)


def _gap(rollout: dict[str, Any]) -> float:
    """Return the largest logprob difference of a token, or 0 if logprobs were not recorded."""
    gaps = [
        abs(a - b)
        for turn in rollout["turns"]
        for a, b in zip(turn.get("logprobs", ()), turn.get("trainer_logprobs", ()), strict=False)
        if isinstance(a, int | float) and isinstance(b, int | float)
    ]
    return max(gaps, default=0.0)
