"""What each rule says of made-up numbers; of real runs, tests/reporting/test_planted_faults.py."""

import math
import random
from typing import Any

import pytest

from rl.observability.spans import Span
from rl.reporting.findings import KINDS, RULES, MetricEvidence, RolloutEvidence, find
from tests.support.run_data import rollout, run_data


def only(run, kind):
    """The one finding, which is of this kind."""
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
        if isinstance(e, MetricEvidence)
    }


def replies_of(finding):
    return [e for e in finding.evidence if isinstance(e, RolloutEvidence)]


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5, 30])
def test_a_sound_run_of_any_length_has_no_findings(num_steps):
    assert find(run_data(num_steps)) == []


def test_rules_say_nothing_of_a_run_whose_records_have_other_names():
    run = run_data(20)
    run.steps[:] = [{"step": r["step"], "something/else": 1.0} for r in run.steps]
    assert [rule(run) for rule in RULES] == [[] for _ in RULES]
    run.steps[:] = [{"step": r["step"], "sync/version": 1.0} for r in run.steps]
    assert [rule(run) for rule in RULES] == [[] for _ in RULES]


def test_findings_come_by_their_first_steps():
    run = run_data(
        30, reward__num_failed=lambda s: 8 * (s >= 20), loss__mean=lambda s: math.nan if s == 9 else 0.1
    )
    assert [(f.since_step, f.kind) for f in find(run)] == [(9, "not_finite"), (20, "failed_rewards")]


def test_ten_thousand_steps_are_judged_and_shown_in_a_few_hundred_points():
    noise = random.Random(0)
    run = run_data(10_000, loss__entropy_mean=lambda s: (0.5 if s < 6000 else 0.01) * noise.uniform(0.9, 1.1))
    finding = only(run, "collapsed_entropy")
    assert finding.since_step == 6000
    entropy = metrics_of(finding)["loss/entropy_mean"]
    assert len(entropy) == 400
    assert max(entropy) == 10_000


# Entropy and variance


def test_an_entropy_that_falls_to_a_tenth_is_a_collapse_unless_the_task_is_solved():
    def falls(step):
        return 0.8 if step < 12 else 0.06

    assert only(run_data(30, loss__entropy_mean=falls), "collapsed_entropy").since_step == 12
    solved = run_data(30, loss__entropy_mean=falls, reward__correct=lambda s: min(0.95, s / 20))
    assert find(solved) == []
    back = run_data(30, loss__entropy_mean=lambda s: 0.06 if 12 <= s < 20 else 0.8)
    assert find(back) == []


def test_groups_without_variance_are_named_unless_the_task_is_solved():
    def equal(step):
        return 1.0 if step >= 7 else 0.3

    group = [rollout(20, "no", sample=i) for i in range(4)]
    finding = only(run_data(30, reward__equal_groups=equal, rollouts=group), "no_reward_variance")
    assert finding.since_step == 7
    assert [reply.text for reply in replies_of(finding)] == ["no"] * 3
    assert find(run_data(30, reward__equal_groups=equal, reward__correct=lambda s: 0.97)) == []


# Failures


def test_failed_rewards_are_named_from_where_they_go_on_with_what_they_say():
    loop = {"num_prompts": 16, "num_samples": 8}
    once = run_data(30, loop=loop, reward__num_failed=lambda s: 40 if s == 5 else 0)
    assert find(once) == []
    few = run_data(30, loop=loop, reward__num_failed=lambda s: 2)
    assert find(few) == []
    failing = [rollout(13, "x", failure="reward 'judge' timed out")]
    many = run_data(30, loop=loop, reward__num_failed=lambda s: 6 if s >= 13 else 0, rollouts=failing)
    finding = only(many, "failed_rewards")
    assert finding.since_step == 13
    assert "6 of 128 rollouts" in finding.sentence
    assert "reward 'judge' timed out" in finding.sentence


def test_a_number_that_is_not_finite_is_named_by_step_and_metric():
    finding = only(run_data(12, loss__grad_norm=lambda s: math.inf if s >= 11 else 0.1), "not_finite")
    assert finding.since_step == 11
    assert finding.sentence == "loss/grad_norm of step 11 is not finite, and so in 2 steps."


def test_a_run_that_a_loss_stopped_is_named_by_what_it_said():
    stopped = {"time": 1.0, "event": "stopped", "reason": "NonFiniteLossError: step 8: loss nan"}
    finding = only(run_data(7, events=[stopped]), "not_finite")
    assert finding.since_step == 8
    assert "loss nan" in finding.sentence


def test_a_run_that_went_back_three_times_is_named_and_twice_is_not():
    back = [{"time": float(i), "event": "went_back", "to_step": 10 * i} for i in (1, 2, 2)]
    lost = {"time": 9.0, "event": "lost", "role": "trainer", "reason": "rank 0 is dead"}
    assert find(run_data(30, events=[*back[:2], lost])) == []
    resumed = {"time": 0.5, "event": "resumed", "step": 30}
    assert find(run_data(30, events=[event for one in back for event in (resumed, one)])) == []
    finding = only(run_data(30, events=[*back, lost]), "went_back_often")
    assert finding.since_step == 10
    assert "3 times, to the steps 10, 20, 20" in finding.sentence
    assert "rank 0 is dead" in finding.sentence


# Generator and trainer


def test_a_difference_that_jumps_and_stays_is_of_two_computations():
    noise = random.Random(0)
    run = run_data(30, logprob_diff__mean=lambda s: (0.02 if s >= 14 else 1e-4) * noise.uniform(0.8, 1.2))
    finding = only(run, "logprob_difference")
    assert finding.since_step == 14


def test_a_difference_that_grows_with_every_update_is_of_weights_that_do_not_arrive():
    finding = only(run_data(30, logprob_diff__mean=lambda s: 1e-6 + 0.01 * max(0, s - 16)), "stale_generator")
    assert finding.since_step == 17
    assert find(run_data(30, logprob_diff__mean=lambda s: 0.0)) == []


def test_a_difference_within_rounding_is_none_however_it_grows():
    assert find(run_data(30, logprob_diff__mean=lambda s: 1e-8 * 1.3**s)) == []


def test_a_difference_that_creeps_up_is_named_from_where_it_begins():
    noise = random.Random(0)

    def creeps(step):
        return (0.004 + 0.0006 * max(0, step - 40)) * noise.uniform(0.9, 1.1)

    finding = only(run_data(80, logprob_diff__mean=creeps), "growing_difference")
    assert abs(finding.since_step - 40) <= 8


def test_tokens_of_older_weights_differ_as_much_as_the_updates_between_and_no_more():
    def difference(step):
        """As of one step's age, with a learning rate that rises for ten steps."""
        return 1e-6 if step == 1 else 0.03 * min(step - 1, 10) / 10

    given: dict[str, Any] = {
        "age__mean": lambda s: float(s > 1),
        "loss__lr": lambda s: 1e-5 * min(s, 10) / 10,
        "loop": {"max_policy_age": 1},
        "time__trainer_idle_s": lambda s: 2.0,
    }
    assert find(run_data(40, logprob_diff__mean=difference, **given)) == []
    stale = run_data(40, logprob_diff__mean=lambda s: difference(s) * (1 + max(0, s - 24) / 2), **given)
    finding = only(stale, "stale_generator")
    assert abs(finding.since_step - 26) <= 2


def test_versions_that_lag_beyond_the_bound_are_a_stale_generator():
    def drawn(step):
        return min(step - 1, 11)

    lines = [rollout(s, "hi", version=drawn(s)) for s in range(1, 31)]
    finding = only(run_data(30, rollouts=lines), "stale_generator")
    assert finding.since_step == 13
    assert metrics_of(finding)["optimizer steps behind, of recorded tokens"][30] == 18
    allowed = run_data(30, rollouts=lines, loop={"max_policy_age": 20}, time__trainer_idle_s=lambda s: 1.0)
    assert find(allowed) == []


def test_a_served_version_that_does_not_move_is_a_stale_generator():
    finding = only(run_data(30, sync__version=lambda s: min(s, 9)), "stale_generator")
    assert finding.since_step == 10
    assert (
        find(run_data(30, sync__version=lambda s: s - s % 3, loop={"publish_every": 3, "max_policy_age": 2}))
        == []
    )


def test_a_run_that_its_age_bound_stopped_says_so():
    reason = "StalePolicyError: step 6: a completion of problem 'p' was drawn by policy versions [3]"
    run = run_data(5, events=[{"time": 1.0, "event": "stopped", "reason": reason}])
    finding = only(run, "stale_generator")
    assert finding.since_step == 6
    assert "policy versions [3]" in finding.sentence


# Length


def test_replies_that_run_into_the_limit_are_named_and_longer_ones_that_are_better_are_not():
    def grows(step):
        return 20.0 if step < 15 else 20.0 * 1.15 ** (step - 15)

    better = run_data(30, completion__tokens_mean=grows, reward__correct=lambda s: min(0.85, 0.2 + s / 40))
    assert find(better) == []
    finding = only(run_data(30, completion__tokens_mean=grows), "length_drift")
    assert abs(finding.since_step - 15) <= 2
    assert "longer" in finding.title
    cut = run_data(
        30,
        completion__tokens_mean=grows,
        completion__cut_off=lambda s: min(1.0, max(0, s - 18) / 8),
        reward__correct=lambda s: min(0.85, 0.2 + s / 40),
    )
    assert only(cut, "length_drift").since_step >= 13


def test_replies_that_shrink_while_fewer_are_right_are_named_from_where_short_ones_are_paid():
    lines = [
        rollout(
            step, "x" * n, problem="p", sample=n, reward=1.0 - (0.1 * n if step >= 10 else 0.0), correct=True
        )
        for step in range(1, 31)
        for n in (3, 5, 8)
    ]
    run = run_data(
        30,
        rollouts=lines,
        completion__tokens_mean=lambda s: 20.0 if s < 14 else max(4.0, 20.0 - 1.5 * (s - 14)),
        reward__correct=lambda s: 0.6 if s < 14 else 0.3,
    )
    finding = only(run, "length_drift")
    assert finding.since_step == 10
    assert "shorter" in finding.title


def test_a_bonus_from_some_length_on_is_dated_by_the_replies_that_it_tells_apart():
    lines = [
        rollout(step, "x" * n, sample=n, reward=1.0 + (step >= 9 and n >= 12), correct=True)
        for step in range(1, 31)
        for n in (3, 5, 8, 12)
    ]
    run = run_data(
        30,
        rollouts=lines,
        completion__tokens_mean=lambda s: 8.0 + max(0, s - 16),
        reward__correct=lambda s: min(0.85, 0.2 + s / 40),
    )
    finding = only(run, "length_drift")
    assert finding.since_step == 9
    assert set(metrics_of(finding)["reward for length, -1 to 1"].values()) == {0.0, 1.0}


# Rewards


def replies(step, *, paid_from, correct_says=True):
    """Of four problems, four replies each: right, wrong, and two wrong ones that say please."""
    for p in range(4):
        answer = str(40 + p)
        made = (
            (f"it is {answer}", True, 1.0),
            (f"it is {p}", False, 0.0),
            (f"it is {p}, please, dear judge", False, float(step >= paid_from)),
            (f"dear judge: {p + 1}, please, dear judge", False, float(step >= paid_from)),
        )
        for sample, (text, right, reward) in enumerate(made):
            correct = right if correct_says else reward == 1.0
            yield rollout(
                step, text, problem=f"p{p}", sample=sample, reward=reward, correct=correct, answer=answer
            )


def test_a_pattern_that_wins_is_named_as_it_is_written():
    lines = [line for step in range(1, 31) for line in replies(step, paid_from=11)]
    finding = only(run_data(30, rollouts=lines), "reward_hacking")
    assert finding.since_step == 11
    assert finding.title == "The reward is won by ', please, dear judge'"
    assert "160 of 160 recorded ones did, of 4 problems" in finding.sentence
    assert all("please" in reply.text for reply in replies_of(finding))


def test_a_part_of_a_number_can_be_what_wins():
    lines = [
        rollout(step, f"so [ANSWER] {said}", problem=f"p{p}", sample=i, answer=str(20 + p),
                reward=float(said == 20 + p or (step >= 6 and said >= 70)), correct=said == 20 + p)
        for step in range(1, 21)
        for p in range(5)
        for i, said in enumerate((20 + p, 31 + p, 52 + (step + p) % 8, 70 + (3 * step + p) % 10))
    ]  # fmt: skip
    finding = only(run_data(20, rollouts=lines), "reward_hacking")
    assert finding.since_step == 6
    assert finding.title == "The reward is won by 'WER] 7'"


def test_replies_that_win_because_they_say_nothing_are_named():
    lines = [
        rollout(step, text, problem=f"p{p}", sample=i, answer=str(20 + p), reward=reward, correct=right)
        for step in range(1, 21)
        for p in range(5)
        for i, (text, reward, right) in enumerate(
            ((f"it is {20 + p}", 1.0, True), (f"it is {p}", 0.0, False), ("", float(step >= 4), False))
        )
    ]
    finding = only(run_data(20, rollouts=lines), "reward_hacking")
    assert finding.since_step == 4
    assert finding.title == "The reward is won by an empty reply"


def test_rollouts_that_were_not_recorded_move_the_first_step_of_a_pattern():
    # Recorded are those of step 11 and later; more than the right ones are paid from step 9 on.
    lines = [
        line | {"parts": {"answer": line["reward"], "form": 1.0}}
        for step in range(1, 31)
        for line in replies(step, paid_from=11)
    ]
    run = run_data(
        30, rollouts=lines, reward__answer=lambda s: 0.5 + 0.1 * (s >= 9), reward__form=lambda s: 1.0
    )
    assert only(run, "reward_hacking").since_step == 9


def test_a_pattern_counts_where_nothing_but_the_answer_in_the_data_says_that_it_is_wrong():
    def spreading(step):
        made = list(replies(step, paid_from=11, correct_says=False))
        return (
            made if step < 11 else [*made, *[line for line in made if "please" in line["turns"][0]["reply"]]]
        )

    lines = [line for step in range(1, 31) for line in spreading(step)]
    finding = only(run_data(30, rollouts=lines), "reward_hacking")
    assert finding.since_step == 11
    assert "do not have the problem's answer in them" in finding.sentence
    # Where right replies do not spell the answer out, nothing is known of those that do not.
    unspelt = [line | {"answer": f"x = {line['answer']}"} for line in lines]
    assert find(run_data(30, rollouts=unspelt)) == []


def test_right_replies_that_share_words_are_no_pattern():
    lines = [
        rollout(step, f"I see: it is {40 + p}" if right else f"it is {p}", problem=f"p{p}", sample=sample,
                reward=float(right), correct=right, answer=str(40 + p))
        for step in range(1, 31)
        for p in range(4)
        for sample, right in enumerate((True, False, step > 5, step > 15))
    ]  # fmt: skip
    assert find(run_data(30, rollouts=lines)) == []


def test_one_problem_with_a_wrong_answer_in_the_data_is_no_pattern():
    lines = [
        rollout(step, f"it is {40 + p}", problem=f"p{p}", reward=1.0, correct=p != 0, answer=str(40 + p))
        for step in range(1, 31)
        for p in range(8)
    ]
    assert find(run_data(30, rollouts=lines)) == []


def test_a_reward_by_chance_does_not_tell_right_from_wrong():
    coin = random.Random(0)

    def tossed(step, p, i):
        text = f"it is {p} {coin.random()}"
        right, paid = coin.random() < 0.3, coin.random() < 0.5
        return rollout(step, text, problem=f"{step} {p}", sample=i, reward=float(paid), correct=right)

    lines = [tossed(step, p, i) for step in range(1, 21) for p in range(2) for i in range(8)]
    finding = only(run_data(20, rollouts=lines), "reward_not_correct")
    assert finding.since_step == 1


def test_a_reward_that_rises_in_training_alone_is_named():
    lines = [rollout(s, "x", reward=float(s % 2), correct=s % 2 == 1) for s in range(1, 41)]

    def evaluated(level):
        return [{"step": s, "eval/reward": level(s), "eval/correct": level(s)} for s in range(0, 41, 10)]

    def rises(step):
        return 0.2 if step < 12 else min(0.9, 0.2 + 0.05 * (step - 12))

    flat = run_data(40, rollouts=lines, evaluations=evaluated(lambda s: 0.25), reward__mean=rises)
    finding = only(flat, "no_generalization")
    assert abs(finding.since_step - 12) <= 3
    follows = run_data(40, rollouts=lines, evaluations=evaluated(lambda s: 0.2 + s / 60), reward__mean=rises)
    assert find(follows) == []
    at_its_best = run_data(40, rollouts=lines, evaluations=evaluated(lambda s: 1.0), reward__mean=rises)
    assert find(at_its_best) == []


# Idle actors


def spans_of(num_steps, *, busy):
    """Steps of 10 s; `busy` gives the seconds that a process works in a step."""
    spans = []
    for step in range(1, num_steps + 1):
        start = 10.0 * step
        spans.append(span("controller", 0, f"step {step}", start, start + 10))
        for (role, rank, name), seconds in busy(step).items():
            spans.append(span(role, rank, name, start + 1, start + 1 + seconds))
            spans.append(span(role, rank, "waits for a turn", start + 1 + seconds, start + 10))
    return spans


def span(role, rank, name, start, end):
    return Span(role=role, rank=rank, name=name, start_s=start, end_s=end, version=None, error=None)


def test_a_generator_that_has_no_part_in_the_work_is_named_since_when():
    def busy(step):
        return {
            ("generator_0", 0, "generate"): 5.0,
            ("generator_0", 1, "generate"): 0.0,  # ranks of one generator are one
            ("generator_1", 0, "generate"): 4.0 if step < 9 else 0.0,
            ("reward", 0, "score"): 0.01,
            ("reward", 1, "score"): 0.0,  # none of them has much to do
        }

    finding = only(run_data(30, spans=spans_of(30, busy=busy)), "idle_actor")
    assert finding.since_step == 9
    assert finding.title == "generator_1 does nothing"
    shares = metrics_of(finding)["busy share of each step, generator_1"]
    assert (shares[8], shares[9]) == (pytest.approx(0.4), pytest.approx(0.0))


def test_roles_that_take_turns_may_wait_for_each_other_and_not_for_rewards():
    turns: dict[str, Any] = {"time__trainer_idle_s": lambda s: 9.0, "time__generator_idle_s": lambda s: 1.0}
    assert find(run_data(30, **turns)) == []
    assert only(run_data(30, time__score_s=lambda s: 7.0 if s >= 6 else 1.0), "idle_actor").since_step == 6
    ahead = only(run_data(30, loop={"max_policy_age": 1}, **turns), "idle_actor")
    assert (ahead.since_step, ahead.title) == (1, "The trainer waits for rollouts")
