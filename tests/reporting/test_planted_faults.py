"""Findings for real training runs with a fault planted at a known step."""

import pytest

from rl.observability.run_folder import RunFolder
from rl.reporting.data import read_run
from rl.reporting.evidence import RolloutEvidence, Series
from rl.reporting.findings import find
from rl.rollouts.rubric import Criterion, Rubric
from tests.support.small_runs import MAX_TOKENS, answer, faulty_from, is_right, leave_run, warm_up

FAULTY = 8
"""The first step with the fault."""
STEPS = 24
pytestmark = [pytest.mark.medium, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return warm_up(tmp_path_factory.mktemp("start"))


def findings_of(start, folder, **settings):
    """Return the findings of a finished run."""
    with RunFolder.create(folder, "run") as made:
        leave_run(start, made, num_steps=STEPS, **settings)
    run = read_run(made.path)
    assert run.status == "finished"
    assert [record["step"] for record in run.steps] == list(range(1, STEPS + 1))
    return run, find(run)


def of_kind(findings, kind):
    (finding,) = [f for f in findings if f.kind == kind]
    assert findings[0] is finding  # all others follow from the first
    return finding


def series(finding, name):
    (found,) = [e for e in finding.evidence if isinstance(e, Series) and e.name == name]
    return dict(zip(found.steps, found.values, strict=True))


def replies(finding):
    return [e for e in finding.evidence if isinstance(e, RolloutEvidence)]


def rubric(function, *more):
    return Rubric(criteria=(Criterion(name="answer", function=function), *more), correct=is_right)


def length(rollout):
    return len(rollout.completion.token_ids) / MAX_TOKENS


def pays_for_question_marks(rollout):
    return 1.0 if "?" in rollout.text else answer(rollout)


def test_healthy_run_learns_and_has_no_findings(start, tmp_path):
    run, findings = findings_of(start, tmp_path)
    assert findings == []
    assert run.steps[-1]["reward/correct"] > run.steps[0]["reward/correct"] + 0.25


def test_reward_that_pays_for_a_pattern_is_found(start, tmp_path):
    _, findings = findings_of(start, tmp_path, rubric=rubric(faulty_from(FAULTY, pays_for_question_marks)))
    finding = of_kind(findings, "reward_hacking")
    assert abs(finding.since_step - FAULTY) <= 2
    assert "'?'" in finding.title
    # The policy exploits it: it writes little else.
    shares = series(finding, "share of recorded replies with '?'")
    assert sum(shares[step] for step in (1, 2, 3, 4)) / 4 < 0.5
    assert sum(shares[step] for step in range(STEPS - 3, STEPS + 1)) / 4 > 0.7
    shown = replies(finding)
    assert len(shown) >= 3
    for reply in shown:
        assert reply.step >= finding.since_step
        assert "?" in reply.text
        assert reply.text.rstrip("!?") != reply.problem[0].upper()


def test_length_penalty_with_the_wrong_sign_is_found(start, tmp_path):
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


def test_generator_that_keeps_its_weights_is_found(start, tmp_path):
    # Weights from step 7 on do not arrive, so step 8 is the first to train on stale data.
    _, findings = findings_of(start, tmp_path, last_fresh=FAULTY - 2)
    finding = of_kind(findings, "stale_generator")
    assert abs(finding.since_step - FAULTY) <= 2
    differences = series(finding, "logprob_diff/mean")
    assert max(differences[step] for step in differences if step < FAULTY) < 1e-5
    assert min(differences[step] for step in differences if step > FAULTY) > 1e-3
    shown = replies(finding)
    assert shown
    assert all(reply.step >= finding.since_step for reply in shown)
