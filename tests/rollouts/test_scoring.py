import importlib
import math
import multiprocessing
import os
import sys
import time

import pytest

from rl.errors import RunError
from rl.rollouts.renderer import ChatRenderer
from rl.rollouts.rubric import Criterion, Rubric
from rl.rollouts.scoring import ScoringWorker
from rl.tasks.sum_digits import make_problem
from rl.types import Rollout
from tests.support.fakes import ByteTokenizer, completion


def rollout(text: str) -> Rollout:
    renderer = ChatRenderer(tokenizer=ByteTokenizer(), max_prompt_tokens=64)
    return renderer.rollout(renderer.prompt(make_problem([47, 82])), completion(text), sample=0)


def never(rollout: Rollout) -> bool:
    return False


def obey(rollout: Rollout) -> float:
    """Does what the reply says."""
    if rollout.text == "loop":
        while True:
            pass
    if rollout.text == "swallow":
        try:
            time.sleep(60)
        except Exception:  # noqa: BLE001  (what a careless reward does)
            return 1.0
    if rollout.text == "exit":
        os._exit(3)
    if rollout.text == "raise":
        raise ValueError("bad reply")
    return float(rollout.text)


RUBRIC = Rubric(criteria=(Criterion(name="obey", function=obey, weight=2.0),), correct=never)


@pytest.fixture(scope="module")
def worker():
    worker = ScoringWorker(rubric=RUBRIC, time_limit_s=0.3)
    yield worker
    worker.close()


def test_scores_come_in_order_with_weights_and_unweighted_parts(worker):
    scores = worker.score([rollout("1"), rollout("0.5"), rollout("0")])
    assert [s.reward for s in scores] == [2.0, 1.0, 0.0]
    assert scores[1].parts == {"obey": 0.5}


@pytest.mark.parametrize("text", ["loop", "swallow"])
def test_a_reward_that_takes_too_long_fails_alone(worker, text):
    scores = worker.score([rollout("1"), rollout(text), rollout("1")])
    assert [s.failure is None for s in scores] == [True, False, True]
    assert "time_limit_s=0.3" in scores[1].failure
    assert "sum-digits/47-82" in scores[1].failure


def test_a_reward_that_ends_its_process_fails_alone_and_the_rest_is_scored(worker):
    scores = worker.score([rollout("1"), rollout("exit"), rollout("1")])
    assert [s.failure is None for s in scores] == [True, False, True]
    assert "ended the scoring process" in scores[1].failure


@pytest.mark.parametrize(("text", "says"), [("raise", "raised ValueError('bad reply')"), ("nan", "is nan")])
def test_a_raising_or_nan_reward_is_a_failed_score_that_says_why(worker, text, says):
    (score,) = worker.score([rollout(text)])
    assert says in score.failure
    assert score.reward == 0.0


def test_a_worker_that_died_between_calls_fails_one_rollout_and_is_replaced(worker):
    worker.start()
    process = worker._worker.process
    process.kill()
    process.join()
    scores = worker.score([rollout("1"), rollout("1")])
    assert "ended the scoring process" in scores[0].failure
    assert (scores[1].failure, scores[1].reward) == (None, 2.0)


def test_a_rubric_that_the_worker_cannot_load_is_said_and_leaves_no_process(tmp_path, monkeypatch):
    source = f"import os\nassert os.getpid() == {os.getpid()}\ndef half(rollout): return 0.5\n"
    (tmp_path / "loads_in_the_parent_alone.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("loads_in_the_parent_alone")
    before = set(multiprocessing.active_children())
    worker = ScoringWorker(
        rubric=Rubric(criteria=(Criterion(name="half", function=module.half),), correct=never),
        time_limit_s=0.3,
    )
    with pytest.raises(RunError, match=r"ended while loading the rubric \(exit code 1\)"):
        worker.start()
    assert set(multiprocessing.active_children()) == before
    del sys.modules[module.__name__]


def raising(rollout: Rollout) -> bool:
    raise KeyError("answer")


def test_a_raising_correct_is_a_failed_score_that_names_it():
    score = Rubric(criteria=RUBRIC.criteria, correct=raising).score(rollout("1"))
    assert "correct raised KeyError('answer') on problem 'sum-digits/47-82'" in str(score.failure)
    assert (score.reward, score.correct) == (0.0, False)


def test_a_weighted_sum_that_overflows_is_a_failed_score():
    rubric = Rubric(criteria=(Criterion(name="obey", function=obey, weight=1e308),), correct=never)
    assert rubric.score(rollout("1")).reward == 1e308
    score = rubric.score(rollout("10"))
    assert "weighted reward is inf" in str(score.failure)
    assert score.reward == 0.0


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_is_refused_by_name(weight):
    with pytest.raises(ValueError, match=f"criterion 'obey': weight={weight} is not a finite number"):
        Criterion(name="obey", function=obey, weight=weight)


def test_closing_leaves_no_process():
    worker = ScoringWorker(rubric=RUBRIC, time_limit_s=0.3)
    worker.start()
    assert worker._worker is not None
    process = worker._worker.process
    worker.close()
    assert process.exitcode is not None
