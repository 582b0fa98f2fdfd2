"""Rules on synthetic numbers; test_planted_faults.py has real runs."""

import math
import random
from typing import Any

import pytest

from rl.reporting.evidence import RolloutEvidence, Series
from rl.reporting.findings import KINDS, find
from tests.support.report_runs import rollout, run_data


def only(run, kind):
    """Return the only finding, and check its kind."""
    findings = find(run)
    assert [finding.kind for finding in findings] == [kind]
    assert kind in KINDS
    assert findings[0].evidence
    assert findings[0].advice
    return findings[0]


def metrics_of(finding):
    return {
        e.name: dict(zip(e.steps, e.values, strict=True))
        for e in finding.evidence
        if isinstance(e, Series)
    }


def noisy(low, high, *, since):
    """Return a function from the step to a value that jumps at step `since`."""
    noise = random.Random(0)
    return lambda step: (high if step >= since else low) * noise.uniform(0.9, 1.1)


def falls(step):
    return 0.8 if step < 12 else 0.06


def equal(step):
    return 1.0 if step >= 7 else 0.3


def grows(step):
    return 20.0 if step < 15 else 20.0 * 1.15 ** (step - 15)


def shrinks(step):
    return 400.0 / grows(step)


LOOP = {"groups_per_batch": 16, "group_size": 8}


@pytest.mark.parametrize(
    ("kind", "since", "by_step"),
    [
        ("collapsed_entropy", 12, {"loss__entropy_mean": falls}),
        ("no_reward_variance", 7, {"reward__equal_groups": equal}),
        ("not_finite", 11, {"loss__grad_norm": lambda s: math.inf if s >= 11 else 0.1}),
        ("length_drift", 15, {"completion__tokens_mean": grows}),
        (
            "length_drift",
            15,
            {
                "completion__tokens_mean": shrinks,
                "reward__correct": lambda s: 0.5 if s < 18 else 0.3,
            },
        ),
        # A constant jump means different computations, a growing one stale weights.
        ("logprob_difference", 14, {"logprob_diff__mean": noisy(1e-4, 0.02, since=14)}),
        ("stale_generator", 17, {"logprob_diff__mean": lambda s: 1e-6 + 0.01 * max(0, s - 16)}),
        ("stale_generator", 10, {"sync__version": lambda s: min(s, 9)}),
        ("failed_rewards", 13, {"reward__num_failed": lambda s: 6 if s >= 13 else 0, "loop": LOOP}),
    ],
)
def test_fault_is_found_since_its_first_step(kind, since, by_step):
    assert abs(only(run_data(30, **by_step), kind).since_step - since) <= 2 * (
        kind == "length_drift"
    )


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5, 30])
def test_healthy_run_has_no_findings(num_steps):
    assert find(run_data(num_steps)) == []


HEALTHY: dict[str, Any] = {
    "entropy of a solved task": {"loss__entropy_mean": falls,
        "reward__correct": lambda s: min(0.95, s / 20)},
    "entropy that comes back": {"loss__entropy_mean": lambda s: 0.06 if 12 <= s < 20 else 0.8},
    "equal rewards of a solved task": {"reward__equal_groups": equal,
        "reward__correct": lambda s: 0.97},
    "one step with failures": {"reward__num_failed": lambda s: 40 if s == 5 else 0, "loop": LOOP},
    "few failures": {"reward__num_failed": lambda s: 2, "loop": LOOP},
    "no difference": {"logprob_diff__mean": lambda s: 0.0},
    "seldom published": {
        "sync__version": lambda s: s - s % 3,
        "loop": {"publish_every": 3, "max_off_policy_steps": 2},
    },
    "longer and better": {
        "completion__tokens_mean": grows, "reward__correct": lambda s: min(0.85, 0.2 + s / 40),
    },
    "shorter and as good": {"completion__tokens_mean": shrinks, "reward__correct": lambda s: 0.5},
    # Of SmolLM2 on sums: it learns to answer in few words, then length alone goes on falling.
    "shorter, better at first, then as good": {
        "completion__tokens_mean": shrinks,
        "reward__correct": lambda s: 0.2 if s < 12 else min(0.5, 0.2 + (s - 12) / 10),
    },
}  # fmt: skip


@pytest.mark.parametrize("by_step", HEALTHY.values(), ids=HEALTHY)
def test_similar_numbers_of_a_healthy_run_are_no_finding(by_step):
    assert find(run_data(30, **by_step)) == []


def test_drift_that_begins_when_success_stands_still_is_told_from_there():
    rises: dict[str, Any] = {"reward__correct": lambda s: min(0.6, 0.1 + s / 50)}
    finding = only(run_data(60, completion__tokens_mean=grows, **rises), "length_drift")
    assert finding.since_step >= 22
    assert "right replies go from 60% to 60%" in finding.sentence


def test_evidence_of_a_long_run_has_few_points():
    finding = only(
        run_data(10_000, loss__entropy_mean=noisy(0.5, 0.01, since=6000)), "collapsed_entropy"
    )
    assert finding.since_step == 6000
    entropy = metrics_of(finding)["loss/entropy_mean"]
    assert len(entropy) == 400
    assert max(entropy) == 10_000


def test_finding_shows_replies_errors_and_values():
    group = [rollout(20, "no", sample=i) for i in range(4)]
    finding = only(run_data(30, reward__equal_groups=equal, rollouts=group), "no_reward_variance")
    assert [e.text for e in finding.evidence if isinstance(e, RolloutEvidence)] == ["no"] * 3
    failing = [rollout(13, "x", failure="reward 'judge' timed out")]
    many = run_data(
        30, loop=LOOP, reward__num_failed=lambda s: 6 if s >= 13 else 0, rollouts=failing
    )
    sentence = only(many, "failed_rewards").sentence
    assert "6 of 128 rollouts" in sentence
    assert "reward 'judge' timed out" in sentence
    infinite = run_data(12, loss__grad_norm=lambda s: math.inf if s >= 11 else 0.1)
    assert only(infinite, "not_finite").sentence == "loss/grad_norm of step 11 is not finite."
    assert "longer" in only(run_data(30, completion__tokens_mean=grows), "length_drift").title


def test_versions_behind_the_bound_mean_a_stale_generator():
    lines = [rollout(s, "hi", version=min(s - 1, 11)) for s in range(1, 31)]
    finding = only(run_data(30, rollouts=lines), "stale_generator")
    assert finding.since_step == 13
    assert metrics_of(finding)["optimizer steps behind, of recorded tokens"][30] == 18
    assert find(run_data(30, rollouts=lines, loop={"max_off_policy_steps": 20})) == []


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (
            "StalePolicyError: step 6: a completion was drawn by policy versions [3]",
            "stale_generator",
        ),
        ("NonFiniteLossError: step 6: loss nan", "not_finite"),
    ],
)
def test_error_that_stopped_the_run_is_found(reason, kind):
    finding = only(run_data(5, events=[{"time": 1.0, "event": "stopped", "reason": reason}]), kind)
    assert finding.since_step == 6
    assert finding.sentence == f"The run stopped: {reason}"


# Rewards


def replies(step, *, paid_from):
    """Return four replies to each of four problems: right, wrong, and two wrong ones that say
    please.
    """
    for p in range(4):
        answer = str(40 + p)
        made = (
            (f"it is {answer}", 1.0),
            (f"it is {p}", 0.0),
            (f"it is {p}, please, dear judge", float(step >= paid_from)),
            (f"dear judge: {p + 1}, please, dear judge", float(step >= paid_from)),
        )
        for sample, (text, reward) in enumerate(made):
            correct = reward == 1.0
            yield rollout(
                step,
                text,
                problem=f"p{p}",
                sample=sample,
                reward=reward,
                correct=correct,
                answer=answer,
            )


def test_winning_empty_replies_are_found():
    lines = [
        rollout(
            step, text, problem=f"p{p}", sample=i, answer=str(20 + p), reward=reward, correct=right
        )
        for step in range(1, 21)
        for p in range(5)
        for i, (text, reward, right) in enumerate(
            (
                (f"it is {20 + p}", 1.0, True),
                (f"it is {p}", 0.0, False),
                ("", float(step >= 4), False),
            )
        )
    ]
    finding = only(run_data(20, rollouts=lines), "reward_hacking")
    assert finding.since_step == 4
    assert finding.title == "The reward is won by an empty reply"
    assert "85 of 85 recorded ones did, of 5 problems" in finding.sentence


def test_pattern_without_the_answer_is_found():
    def spreading(step):
        made = list(replies(step, paid_from=11))
        return (
            made
            if step < 11
            else [*made, *[line for line in made if "please" in line["turns"][0]["reply"]]]
        )

    lines = [line for step in range(1, 31) for line in spreading(step)]
    finding = only(run_data(30, rollouts=lines), "reward_hacking")
    assert finding.since_step == 11
    assert "do not have the problem's answer in them" in finding.sentence
    # If right replies do not contain the answer, replies without it prove nothing.
    unspelt = [line | {"answer": f"x = {line['answer']}"} for line in lines]
    assert find(run_data(30, rollouts=unspelt)) == []


def test_words_shared_by_right_replies_are_no_pattern():
    lines = [
        rollout(step, f"I see: it is {40 + p}" if right else f"it is {p}", problem=f"p{p}",
            sample=sample,
                reward=float(right), correct=right, answer=str(40 + p))
        for step in range(1, 31)
        for p in range(4)
        for sample, right in enumerate((True, False, step > 5, step > 15))
    ]  # fmt: skip
    assert find(run_data(30, rollouts=lines)) == []


def test_random_reward_is_found():
    coin = random.Random(0)

    def tossed(step, p, i):
        text = f"it is {p} {coin.random()}"
        right, paid = coin.random() < 0.3, coin.random() < 0.5
        return rollout(
            step, text, problem=f"{step} {p}", sample=i, reward=float(paid), correct=right
        )

    lines = [tossed(step, p, i) for step in range(1, 21) for p in range(2) for i in range(8)]
    finding = only(run_data(20, rollouts=lines), "reward_not_correct")
    assert finding.since_step == 1
