"""Real training in which a fault is planted at a known step, and what the findings say of it."""

import pytest

from rl.reporting.findings import MetricEvidence, RolloutEvidence, find
from rl.reporting.run_data import read_run
from rl.rollouts.rubric import Criterion, Rubric
from rl.tasks.generated import Coin
from tests.support.small_runs import MAX_TOKENS, SmallRun, answer, faulty_from, is_right, warm_up

FAULTY = 8
"""The first step with the fault."""
STEPS = 24
pytestmark = [pytest.mark.medium, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return warm_up(tmp_path_factory.mktemp("start"))


def findings_of(start, folder, **settings):
    """Of a run, which finished; its records are those of every step."""
    run = read_run(SmallRun(start=start, num_steps=STEPS, **settings).leave(folder, "run"))
    assert run.status == "finished"
    assert [record["step"] for record in run.steps] == list(range(1, STEPS + 1))
    return run, find(run)


def of_kind(findings, kind):
    (finding,) = [f for f in findings if f.kind == kind]
    assert findings[0] is finding  # whatever else there is follows from it
    return finding


def series(finding, name):
    (found,) = [e for e in finding.evidence if isinstance(e, MetricEvidence) and e.name == name]
    return dict(zip(found.steps, found.values, strict=True))


def replies(finding):
    return [e for e in finding.evidence if isinstance(e, RolloutEvidence)]


def rubric(function, *more, correct=is_right):
    return Rubric(criteria=(Criterion(name="answer", function=function), *more), correct=correct)


def length(rollout):
    return len(rollout.completion.token_ids) / MAX_TOKENS


def shorter(rollout):
    return -length(rollout)


def pays_for_question_marks(rollout):
    return 1.0 if "?" in rollout.text else answer(rollout)


def test_a_healthy_run_learns_and_has_no_findings(start, tmp_path):
    run, findings = findings_of(start, tmp_path)
    assert findings == []
    assert run.steps[-1]["reward/correct"] > run.steps[0]["reward/correct"] + 0.25


@pytest.mark.parametrize("correct", [is_right, None], ids=["marked wrong", "wrong by its text alone"])
def test_a_reward_that_a_pattern_always_wins_is_named_with_the_pattern_and_its_first_step(
    start, tmp_path, correct
):
    faulty = rubric(faulty_from(FAULTY, pays_for_question_marks), correct=correct)
    _, findings = findings_of(start, tmp_path, rubric=faulty)
    finding = of_kind(findings, "reward_hacking")
    assert abs(finding.since_step - FAULTY) <= 2
    assert "'?'" in finding.title
    # The policy has found it: it writes little else.
    shares = series(finding, "share of recorded replies with '?'")
    assert sum(shares[step] for step in (1, 2, 3, 4)) / 4 < 0.5
    assert sum(shares[step] for step in range(STEPS - 3, STEPS + 1)) / 4 > 0.7
    shown = replies(finding)
    assert len(shown) >= 3
    for reply in shown:
        assert reply.step >= finding.since_step
        assert "?" in reply.text
        assert reply.text.rstrip("!?") != reply.problem[0].upper()


def test_a_length_penalty_whose_sign_is_wrong_is_named_with_its_first_step(start, tmp_path):
    sign = Criterion(
        name="length", function=faulty_from(FAULTY, length, lambda rollout: -0.1 * length(rollout))
    )
    _, findings = findings_of(start, tmp_path, rubric=rubric(answer, sign))
    finding = of_kind(findings, "length_drift")
    assert abs(finding.since_step - FAULTY) <= 2
    assert "longer" in finding.title
    assert "paid" in finding.title
    lengths = series(finding, "completion/tokens_mean")
    assert lengths[STEPS] > 2 * lengths[FAULTY]
    paid = series(finding, "reward for length, -1 to 1")
    assert {paid[step] for step in paid if step < FAULTY} == {-1.0}
    assert {paid[step] for step in paid if step >= FAULTY} == {1.0}


def test_a_generator_that_keeps_its_weights_is_named_with_its_first_step(start, tmp_path):
    # Weights after step 7 and later do not arrive: what step 8 is the first to train on is stale.
    _, findings = findings_of(start, tmp_path, last_fresh=FAULTY - 2)
    finding = of_kind(findings, "stale_generator")
    assert abs(finding.since_step - FAULTY) <= 2
    differences = series(finding, "logprob_diff/mean")
    assert max(differences[step] for step in differences if step < FAULTY) < 1e-5
    assert min(differences[step] for step in differences if step > FAULTY) > 1e-3
    shown = replies(finding)
    assert shown
    assert all(reply.step >= finding.since_step for reply in shown)


# More of both kinds


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"seed": 1},
        {"rubric": rubric(answer, Criterion(name="brevity", function=shorter, weight=0.2))},
        {"loop": {"max_policy_age": 1}},
        {"loop": {"num_minibatches": 2}},
    ],
    ids=["another seed", "a sound length penalty", "generation ahead", "two updates a step"],
)
def test_other_healthy_runs_have_no_findings(start, tmp_path, settings):
    run, findings = findings_of(start, tmp_path, **settings)
    assert findings == []
    assert run.steps[-1]["reward/correct"] > run.steps[0]["reward/correct"]


@pytest.mark.slow
def test_a_stale_generator_is_named_where_older_weights_are_meant_to_be_used(start, tmp_path):
    # Version 7 does not arrive; with generation a step ahead, step 9 is the first to train on what it drew.
    _, findings = findings_of(start, tmp_path, last_fresh=6, loop={"max_policy_age": 1})
    finding = of_kind(findings, "stale_generator")
    assert abs(finding.since_step - 9) <= 2


@pytest.mark.slow
@pytest.mark.long
def test_a_fault_that_is_there_from_the_start_is_named_from_the_start(start, tmp_path):
    hacked = findings_of(start, tmp_path / "a", rubric=rubric(pays_for_question_marks))[1]
    assert of_kind(hacked, "reward_hacking").since_step <= 3
    paid = findings_of(
        start, tmp_path / "b", rubric=rubric(answer, Criterion(name="length", function=length))
    )[1]
    assert of_kind(paid, "length_drift").since_step <= 3
    stale = findings_of(start, tmp_path / "c", last_fresh=0)[1]
    assert of_kind(stale, "stale_generator").since_step <= 3


@pytest.mark.slow
def test_a_reward_of_noise_does_not_tell_right_from_wrong(start, tmp_path):
    noise = Rubric(criteria=(Criterion(name="noise", function=Coin(seed=1)),), correct=is_right)
    findings = findings_of(start, tmp_path, rubric=noise)[1]
    assert of_kind(findings, "reward_not_correct").since_step == 1


@pytest.mark.slow
@pytest.mark.long
def test_a_learning_rate_that_ruins_the_policy_is_told_by_what_it_leaves_to_explore(start, tmp_path):
    run, findings = findings_of(start, tmp_path, lr=5e-2)
    assert run.steps[-1]["reward/correct"] < 0.3 < run.steps[0]["reward/correct"]
    since = [f.since_step for f in findings if f.kind in ("collapsed_entropy", "no_reward_variance")]
    assert since
    assert min(since) <= 10
