"""Rules for runs that cannot learn, on made-up numbers."""

from typing import Any

import pytest

from rl.reporting.evidence import RolloutEvidence
from rl.reporting.findings import KINDS, find
from tests.support.report_runs import rollout, run_data

LOOP: dict[str, Any] = {"groups_per_batch": 16, "group_size": 8, "sampling": {"max_tokens": 32}}
"""128 replies a step."""
CHAT: dict[str, Any] = {"renderer": {"kind": "raw"}, "hf_assets_path": "some/chat-model"}
STARTED: list[dict[str, Any]] = [{"time": 1.0, "event": "started", "chat_template": True}]

NOTHING: dict[str, Any] = {"reward__correct": lambda s: 0.0, "reward__equal_groups": lambda s: 1.0}
"""Metrics that follow from any cause before the rewards."""
ALL_CUT_OFF: dict[str, Any] = {
    "completion__cut_off": lambda s: 1.0,
    "reward__num_unparsed": lambda s: 128,
    **NOTHING,
}
MOST_UNPARSED: dict[str, Any] = {
    "reward__num_unparsed": lambda s: 100,
    "reward__correct": lambda s: 0.1,
    "reward__equal_groups": lambda s: 0.95,
}


def reply(step, text="47 and 82", *, sample=0, is_cut_off=False, **more):
    line = rollout(step, text, sample=sample, answer="21", **more)
    if is_cut_off:
        line["turns"][0]["finish_reason"] = "length"
    return line


def only(run, kind):
    """Return the only finding of a run, and check its kind."""
    findings = find(run)
    assert [finding.kind for finding in findings] == [kind]
    assert kind in KINDS
    return findings[0]


def texts(finding):
    return [e.text for e in finding.evidence if isinstance(e, RolloutEvidence)]


# Each cause, within ten steps, and before what follows from it


def test_cut_off_replies_are_the_cause_of_all_that_follows():
    replies = [reply(step, "and so on", is_cut_off=True) for step in range(1, 11)]
    finding = only(run_data(10, loop=LOOP, rollouts=replies, **ALL_CUT_OFF), "replies_cut_off")
    assert finding.sentence == (
        "Since step 1 100% of the replies are cut off at 32 tokens, before they end, and 0% are "
        "right."
    )
    assert finding.advice.startswith("`--loop.sampling.max_tokens 64` ")
    assert texts(finding) == ["and so on"] * 3


def test_unparsed_replies_are_named_with_the_function_and_the_place():
    replies = [
        reply(step, "it is 21, I think", sample=i, unparsed=["answer"])
        for step in range(1, 11)
        for i in range(2)
    ]
    task = {"task": {"system": "", "answer_in": "tags"}}
    finding = only(
        run_data(10, loop=LOOP, values=task, rollouts=replies, **MOST_UNPARSED), "unparsed_replies"
    )
    assert finding.sentence == (
        "Since step 1 reward 'answer' finds no answer in 78% of the replies, in the place where "
        "it is looked for."
    )
    assert "`--task.system`" in finding.advice
    assert "`--task.answer_in` (now tags)" in finding.advice
    assert texts(finding) == ["it is 21, I think"] * 3


def test_unparsed_replies_that_are_cut_off_need_more_tokens():
    replies = [
        reply(step, is_cut_off=True, unparsed=["answer"], sample=step) for step in range(1, 11)
    ]
    half = {**MOST_UNPARSED, "completion__cut_off": lambda s: 0.7}
    finding = only(run_data(10, loop=LOOP, rollouts=replies, **half), "unparsed_replies")
    assert finding.sentence.endswith("; 10 of 10 recorded ones are cut off.")
    assert finding.advice.startswith("`--loop.sampling.max_tokens 64` ")


def test_dropped_groups_count_among_the_unparsed_replies():
    # 100 of 128 would be most of them, 100 of 256 are not.
    dropped = {**MOST_UNPARSED, "groups__dropped_equal": lambda s: 16}
    assert [f.kind for f in find(run_data(10, loop=LOOP, **dropped))] == ["no_reward_variance"]


@pytest.mark.parametrize("num_steps", [3, 10])
def test_run_that_is_never_right_is_found(num_steps):
    replies = [reply(step) for step in range(1, num_steps + 1)]
    finding = only(run_data(num_steps, loop=LOOP, rollouts=replies, **NOTHING), "never_right")
    assert finding.sentence == (
        f"Since step 1 none of {128 * num_steps:,} replies is right, and 100% of the groups have "
        "equal rewards: there is nothing to learn from."
    )
    assert "`--loop.group_size 16`" in finding.advice
    assert texts(finding) == ["47 and 82"] * 3


def test_run_of_single_replies_that_is_never_right_is_found():
    # Without groups the spread of the rewards tells that all are alike.
    none = {**NOTHING, "reward__equal_groups": lambda s: None, "reward__std": lambda s: 0.0}
    loop = {"groups_per_batch": 128, "group_size": 1}
    assert "all earn the same" in only(run_data(10, loop=loop, **none), "never_right").sentence


def test_unknown_config_takes_the_number_of_trained_replies():
    # In steps of 10 s.
    assert only(run_data(3, perf__samples_per_s=lambda s: 12.8, **NOTHING), "never_right")


@pytest.mark.parametrize("num_right", [0.0, 0.25])
def test_equal_rewards_without_an_earlier_cause_are_found(num_right):
    few = {"groups_per_batch": 2, "group_size": 4}
    by_step = {**NOTHING, "reward__correct": lambda s: num_right}
    assert only(run_data(10, loop=few, **by_step), "no_reward_variance").since_step == 1


@pytest.mark.parametrize(
    ("by_step", "says"),
    [
        (ALL_CUT_OFF, "since step 1 100% of the replies are cut off"),
        (MOST_UNPARSED, "since step 1 the reward finds no answer in 78%"),
        (NOTHING, "since step 1 none of 1,280 replies is right"),
        (
            {"completion__cut_off": lambda s: 0.6, "reward__correct": lambda s: 0.05},
            "since step 1 60% of the replies are cut off at 32 tokens, before they end, and 5%",
        ),
    ],
)
def test_raw_text_for_a_chat_model_is_the_first_cause(by_step, says):
    run = run_data(10, loop=LOOP, values=CHAT, events=STARTED, **by_step)
    finding = only(run, "wrong_template")
    assert finding.sentence.startswith(
        "The prompts are raw text (renderer.kind=raw) although some/chat-model has a chat template"
    )
    assert says in finding.sentence
    assert "`--renderer.kind template`" in finding.advice


@pytest.mark.parametrize(
    ("values", "events"),
    [
        ({**CHAT, "renderer": {"kind": "template"}}, STARTED),
        ({**CHAT, "hf_assets_path": None}, STARTED),
        (CHAT, [{"time": 1.0, "event": "started", "chat_template": False}]),
        (CHAT, [{"time": 1.0, "event": "started"}]),
    ],
)
def test_template_is_not_blamed_without_a_raw_chat_model(values, events):
    run = run_data(10, loop=LOOP, values=values, events=events, **ALL_CUT_OFF)
    assert only(run, "replies_cut_off")


def test_learning_rate_of_zero_is_found():
    values = {"trainer": {"optimizer": {"lr": 0.0}}}
    finding = only(run_data(10, values=values, loss__lr=lambda s: 0.0), "nothing_learned")
    assert finding.title == "The learning rate is 0"
    assert finding.sentence.startswith("Since step 1 the learning rate is 0, in 10 steps")
    assert finding.advice.startswith("`--trainer.optimizer.lr`")


def test_schedule_that_has_ended_is_found():
    values = {"trainer": {"optimizer": {"lr": 1e-5}}}
    run = run_data(30, values=values, loss__lr=lambda s: 0.0 if s > 20 else 1e-5)
    finding = only(run, "nothing_learned")
    assert finding.since_step == 21
    assert "`--trainer.lr_scheduler.total_steps`" in finding.advice


def test_gradient_of_zero_with_unequal_rewards_is_found():
    run = run_data(
        10,
        loop=LOOP,
        rollouts=[reply(9)],
        loss__grad_norm=lambda s: 0.0,
        reward__std=lambda s: 0.44,
    )
    finding = only(run, "nothing_learned")
    assert finding.title == "The gradient is 0"
    assert "in 10 steps whose rewards differ by 0.44" in finding.sentence
    assert texts(finding) == ["47 and 82"]


def test_gradient_of_masked_replies_is_zero_because_they_are_cut_off():
    loop = {**LOOP, "mask_truncated_completions": True}
    by_step = {**ALL_CUT_OFF, "reward__equal_groups": lambda s: 0.3}
    run = run_data(10, loop=loop, loss__grad_norm=lambda s: 0.0, **by_step)
    assert only(run, "replies_cut_off")


def slow(score_s: float) -> dict[str, Any]:
    """Return the times of steps of ten seconds without their generation."""
    return {
        "time__score_s": lambda s: score_s if s > 5 else 0.1,
        "time__generate_s": lambda s: 3.0,
        "time__train_s": lambda s: 2.0,
    }


def test_slow_reward_is_found():
    values = {"reward": {"num_procs": 1}}
    finding = only(run_data(15, values=values, **slow(4.5)), "slow_reward")
    assert finding.since_step == 6
    assert finding.sentence == (
        "Since step 6 the run waits 4.5 s of each step for rewards, 45% of it."
    )
    assert finding.advice.startswith("`--reward.num_procs 2` ")


# Similar numbers of healthy runs

HEALTHY: dict[str, dict[str, Any]] = {
    "replies that are cut off in 30%": {"completion__cut_off": lambda s: 0.3},
    "cut off at first, while the policy learns to be brief": {
        "completion__cut_off": lambda s: max(0.0, 1.0 - s / 10),
        "reward__correct": lambda s: min(0.9, s / 20),
    },
    "cut off after the right answer": {
        "completion__cut_off": lambda s: 1.0, "reward__correct": lambda s: 0.6,
    },
    "half cut off and a quarter right": {
        "completion__cut_off": lambda s: 0.7, "reward__correct": lambda s: 0.25,
    },
    "a form that is learned": {
        "reward__num_unparsed": lambda s: 120 - 6 * s, "reward__correct": lambda s: 0.1,
    },
    "a third unparsed": {"reward__num_unparsed": lambda s: 42, "reward__correct": lambda s: 0.3},
    "a format that is missing while answers are right": {
        "reward__num_unparsed": lambda s: 128, "reward__correct": lambda s: 0.7,
    },
    "one right reply": {
        "reward__correct": lambda s: 1 / 128 if s == 2 else 0.0,
        "reward__equal_groups": lambda s: 0.8,
    },
    "a reward that is never 1": {
        "reward__correct": lambda s: 0.0, "reward__equal_groups": lambda s: 0.1,
    },
    "15% right, as SmolLM2 on sums": {
        "reward__correct": lambda s: 0.15, "reward__equal_groups": lambda s: 0.5,
        "completion__cut_off": lambda s: 0.4,
    },
    "37% right, as tiny at its start": {
        "reward__correct": lambda s: 0.37, "reward__num_unparsed": lambda s: 3,
    },
    "a loss of 0 with a gradient": {"loss__mean": lambda s: 0.0},
    "a schedule that ends with the run": {"loss__lr": lambda s: 1e-5 * (1 - s / 20)},
    "no gradient where rewards are equal": {
        "loss__grad_norm": lambda s: 0.0 if s % 2 else 0.1,
        "reward__equal_groups": lambda s: 1.0 if s % 2 else 0.2,
    },
    "a solved task": {
        "loss__grad_norm": lambda s: 0.0,
        "reward__equal_groups": lambda s: 1.0,
        "reward__correct": lambda s: 1.0,
    },
    "rewards that take a third of a step": slow(3.3),
    "rewards that are slow in steps of no length": {
        "time__step_s": lambda s: 0.4, "time__score_s": lambda s: 0.3,
    },
    "a slow first reward": {"time__score_s": lambda s: 8.0 if s < 3 else 0.1},
}  # fmt: skip


@pytest.mark.parametrize("num_steps", [3, 5, 10, 20])
@pytest.mark.parametrize("values", [{}, CHAT], ids=["template", "raw"])
@pytest.mark.parametrize("by_step", HEALTHY.values(), ids=HEALTHY)
def test_healthy_run_has_no_findings(by_step, values, num_steps):
    run = run_data(num_steps, loop=LOOP, values=values, events=STARTED, **by_step)
    assert [finding.kind for finding in find(run)] == []


# What users of other trainers have reported, with the numbers of their logs

REPORTS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "ms-swift 4950: completions/clipped_ratio stays 1.0 with rewards for similarity": (
        "replies_cut_off",
        {
            "completion__cut_off": lambda s: 1.0,
            "reward__correct": lambda s: 0.0,
            "reward__equal_groups": lambda s: 0.0,
            "reward__std": lambda s: 0.12,
        },
    ),
    "ms-swift 5571: grad_norm 0 with reward_std 0.44": (
        "nothing_learned",
        {
            "loss__grad_norm": lambda s: 0.0,
            "loss__mean": lambda s: 0.0,
            "loss__lr": lambda s: 2.6e-7,
            "reward__equal_groups": lambda s: 0.0,
            "reward__std": lambda s: 0.44,
            "reward__correct": lambda s: 0.0,
        },
    ),
    "trl 3857: the rewards of a group are all 3.0, grad_norm 0": (
        "no_reward_variance",
        {
            "loss__grad_norm": lambda s: 0.0,
            "reward__equal_groups": lambda s: 1.0,
            "reward__std": lambda s: 5.08,
            "reward__correct": lambda s: 0.5,
        },
    ),
    "prime-rl 346: the answer is not found in any reply, reward 0": (
        "unparsed_replies",
        {"reward__num_unparsed": lambda s: 128, **NOTHING},
    ),
    "prime-rl 346, with a reward that does not say so": ("never_right", NOTHING),
    "fastrl 6: rewards take 40% of a step, generation 30%": (
        "slow_reward",
        {
            "time__score_s": lambda s: 40.0,
            "time__generate_s": lambda s: 30.0,
            "time__train_s": lambda s: 25.0,
            "time__step_s": lambda s: 98.0,
        },
    ),
    "trl 3452: loss 0, grad_norm 0.09, the reward rises": (
        None,
        {
            "loss__mean": lambda s: 0.0,
            "loss__grad_norm": lambda s: 0.09,
            "reward__std": lambda s: 0.6,
        },
    ),
    "open-r1 161: 2.6% right at the start": (
        None,
        {"reward__correct": lambda s: 0.026, "reward__equal_groups": lambda s: 0.7},
    ),
}


@pytest.mark.parametrize(("kind", "by_step"), REPORTS.values(), ids=REPORTS)
def test_cause_of_a_public_report_is_named(kind, by_step):
    findings = find(run_data(10, loop=LOOP, **by_step))
    assert [finding.kind for finding in findings] == ([] if kind is None else [kind])


def test_cause_that_begins_later_is_found_since_then():
    run = run_data(
        30,
        loop=LOOP,
        completion__cut_off=lambda s: 0.95 if s >= 18 else 0.1,
        reward__correct=lambda s: 0.0 if s >= 18 else 0.5,
        reward__equal_groups=lambda s: 1.0 if s >= 18 else 0.3,
    )
    assert only(run, "replies_cut_off").since_step == 18
