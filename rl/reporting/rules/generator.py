"""A generator whose weights are not those it should have, told by versions or by logprobs that move apart."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from rl.reporting.evidence import Evidence, Finding, evenly, metric_evidence, rollout_evidence
from rl.reporting.run_data import RunData
from rl.reporting.series import Series, first_lasting, first_level, knee, last_level, metric, onset, step_up

DIFF = "logprob_diff/mean"
JUMP, JUMP_OFF_POLICY = 10.0, 2.0
"""Times by which the difference rises: of tokens of the same weights, and of older ones."""
LEAST = 1e-4
"""Nats a token: below it is rounding, whatever it was before."""
GROWTH, LEAST_GROWTH = 3.0, 3e-3
"""Of a difference that creeps up over the run, and what it has to come to."""
GROWS_ON = 2.0
"""Times by which it grows further after it has jumped, where the weights stay and the trainer goes on."""
MIN_STEPS = 4
IN_STEP = re.compile(r"\bstep (\d+)\b")
ADVICE = (
    "Compare `sync/version` with `policy_version` and the generators' logs at that step, and let "
    "canary.enable (on by default) check every pull; loop.max_logprob_diff stops a run at the first such "
    "step."
)


def find_stale_generator(run: RunData) -> list[Finding]:
    """At most one: by the versions that rollouts tell, else by their logprobs."""
    for found in (_stopped(run), _by_versions(run), _by_logprobs(run)):
        if found is not None:
            return [found]
    return []


def _stopped(run: RunData) -> Finding | None:
    """The loop itself saw a version that no generator should have had."""
    for event in run.events:
        reason = str(event.get("reason", ""))
        if event["event"] == "stopped" and reason.startswith("StalePolicyError"):
            match = IN_STEP.search(reason)
            last = run.steps[-1]["step"] if run.steps else 0
            return Finding(
                kind="stale_generator",
                title="The generator kept old weights",
                since_step=int(match[1]) if match else int(last) + 1,
                sentence=f"The run stopped: {reason}",
                advice=ADVICE,
                evidence=(
                    *(metric_evidence(s) for s in (_lag(run), _behind(run)) if len(s)),
                    *_versions(run),
                ),
            )
    return None


def _by_versions(run: RunData) -> Finding | None:
    """Tokens that are older than `loop.max_policy_age` allows, or a served version that does not move."""
    bound = run.setting("loop.max_policy_age", 0) * run.setting("loop.num_minibatches", 1)
    lag = _lag(run)
    place = first_lasting([value > bound for value in lag.values])
    since = None if place is None else lag.steps[place]
    behind = _behind(run)
    patience = bound + run.setting("loop.publish_every", 1) * run.setting("loop.num_minibatches", 1)
    stuck = first_lasting([value > patience for value in behind.values])
    if since is None and stuck is not None:
        while stuck > 0 and behind.values[stuck - 1] > 0:
            stuck -= 1
        since = behind.steps[stuck]
    if since is None:
        return None
    most = max((*lag.since(since).values, *behind.since(since).values), default=0)
    return Finding(
        kind="stale_generator",
        title="The generator keeps old weights",
        since_step=since,
        sentence=(
            f"Since step {since} rollouts are of weights up to {most:g} optimizer steps older than those "
            f"that they train; loop.max_policy_age allows {bound}."
        ),
        advice=ADVICE,
        evidence=(*(metric_evidence(s) for s in (lag, behind) if len(s)), *_versions(run)),
    )


def _lag(run: RunData) -> Series:
    """Optimizer steps between the weights that a step begins with and the oldest that its tokens are of."""
    begins = {
        int(after["step"]) + 1: after["policy_version"] for after in run.steps if "policy_version" in after
    }
    oldest: dict[int, int] = {}
    for rollout in run.rollouts:
        if rollout["kind"] == "train" and rollout["step"] in begins:
            for version in _versions_of(rollout):
                oldest[rollout["step"]] = min(version, oldest.get(rollout["step"], version))
    steps = sorted(oldest)
    return Series(
        name="optimizer steps behind, of recorded tokens",
        steps=steps,
        values=[begins[step] - oldest[step] for step in steps],
    )


def _versions_of(rollout: dict[str, Any]) -> Iterable[int]:
    for turn in rollout["turns"]:
        versions = turn.get("policy_versions", [])
        yield from [versions] if isinstance(versions, int) else versions


def _behind(run: RunData) -> Series:
    """Optimizer steps by which the served version is behind the trainer's."""
    has_both = [r for r in run.steps if "sync/version" in r and "policy_version" in r]
    pairs = [(r["step"], r["policy_version"] - r["sync/version"]) for r in has_both]
    return Series(
        name="policy_version - sync/version",
        steps=[int(step) for step, _ in pairs],
        values=[value for _, value in pairs],
    )


# By logprobs


def _by_logprobs(run: RunData) -> Finding | None:
    """Trainer and generator agree about tokens of the same weights; from some step on they do not."""
    series = _on_policy(run)
    if len(series) >= MIN_STEPS:
        place = onset(series.values, times=JUMP, least=LEAST)
        if place is not None:
            return _jump(run, series, place, is_on_policy=True)
    series = _off_policy(run)
    if len(series) >= 2 * MIN_STEPS:
        place = step_up(series.values, times=JUMP_OFF_POLICY)
        if place is not None:
            return _jump(run, series, place, is_on_policy=False)
    return None


def _on_policy(run: RunData) -> Series:
    return metric([r for r in run.steps if r.get("age/mean", 0.0) == 0.0], DIFF)


def _off_policy(run: RunData) -> Series:
    """For each step of age and unit of learning rate, what an update changes; without the first one."""
    rates = {int(r["step"]) + 1: r.get("loss/lr", 1.0) for r in run.steps}
    scaled = []
    for r in run.steps:
        rate = rates.get(int(r["step"]), 0.0)
        if r.get("age/mean", 0.0) >= 0.5 and rate > 0 and DIFF in r:
            scaled.append({"step": r["step"], DIFF: r[DIFF] / (r["age/mean"] * rate)})
    return metric(scaled[1:], DIFF)


def _jump(run: RunData, series: Series, place: int, *, is_on_policy: bool) -> Finding:
    since = series.steps[place]
    after = series.values[place:]
    grows = not is_on_policy or max(after[-3:]) >= GROWS_ON * after[0]
    told = metric(run.steps, DIFF)
    before, now = median(told.before(since).values), last_level(told.since(since).values)
    age = "" if is_on_policy else ", though their versions say that they are no older than before"
    if grows:
        kind, title = "stale_generator", "The generator keeps old weights"
        what = "It grows with every update, as of weights that stay where they are"
    else:
        kind, title = "logprob_difference", "Trainer and generator do not compute the same"
        what = "It stays as large, as of another precision or other settings of the sampling"
    return Finding(
        kind=kind,
        title=title,
        since_step=since,
        sentence=(
            f"Since step {since} the logprobs of trainer and generator differ by {now:.2g} nats a token, "
            f"before by {before:.2g}{age}. {what}."
        ),
        advice=ADVICE,
        evidence=tuple(_difference(run, since)),
    )


def find_growing_difference(run: RunData) -> list[Finding]:
    """Creeping up, without a step at which it began; nothing where a generator is stale."""
    if find_stale_generator(run):
        return []
    series = _on_policy(run)
    if len(series) < 10 * MIN_STEPS // 2:
        return []
    first, last = first_level(series.values), last_level(series.values)
    half = last_level(series.values[: -(len(series) // 5) or None])
    if last < max(LEAST_GROWTH, GROWTH * first) or not first < half <= last:
        return []
    since = series.steps[knee(series.values)]
    return [
        Finding(
            kind="growing_difference",
            title="Trainer and generator move apart",
            since_step=since,
            sentence=(
                "The difference of their logprobs, of tokens of the same weights, has grown from "
                f"{first:.2g} to {last:.2g} nats a token since about step {since}: the policy gradient "
                "is more and more of another distribution than the one that is sampled from."
            ),
            advice=(
                "Compute both in one precision (trainer.training.param_dtype, generator.dtype), or the "
                "logits in float32; let the loss correct it (docs/trainer.md, importance correction), or use "
                "batch_invariant where it is supported."
            ),
            evidence=tuple(_difference(run, since)),
        )
    ]


def _difference(run: RunData, since: int) -> list[Evidence]:
    names = (DIFF, "logprob_diff/max", "canary/logprob_diff", "age/mean", "loss/ratio_mean")
    found: list[Evidence] = [metric_evidence(s) for s in (metric(run.steps, n) for n in names) if len(s)]
    later = [r for r in run.rollouts if r["kind"] == "train" and r["step"] >= since][:64]
    apart = [(gap, r) for r in later if (gap := _gap(r)) is not None]
    for gap, rollout in sorted(apart, key=lambda pair: -pair[0])[:2]:
        found.append(rollout_evidence(rollout, note=f"its logprobs differ by up to {gap:.3g} nats"))
    return found


def _gap(rollout: dict[str, Any]) -> float | None:
    """The largest difference of the logprobs of a token; None where they were not recorded."""
    gaps = [
        abs(a - b)
        for turn in rollout["turns"]
        for a, b in zip(turn.get("logprobs", ()), turn.get("trainer_logprobs", ()), strict=False)
        if isinstance(a, int | float) and isinstance(b, int | float)
    ]
    return max(gaps, default=None)


def _versions(run: RunData) -> Sequence[Evidence]:
    trained = [r for r in run.rollouts if r["kind"] in ("train", "pending")]
    return [
        rollout_evidence(r, note=f"of policy versions {sorted(set(_versions_of(r)))}")
        for r in evenly(trained[-32:], 2)
    ]
