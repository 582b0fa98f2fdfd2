import asyncio
import importlib
import logging
import multiprocessing
import os
import signal
import sys
from dataclasses import replace

import pytest

from rl.errors import RunError
from rl.rollouts.rubric import Criterion, Rubric
from rl.rollouts.scoring import longest_s, score_within
from tests.support.scored import replied
from tests.support.scoring_functions import LIMIT_S, MIXED, RUBRIC, Driven, counted, failure_of, never


@pytest.fixture(scope="module")
def driven():
    driven = Driven(RUBRIC)
    yield driven
    driven.close()


@pytest.fixture(scope="module")
def mixed():
    driven = Driven(MIXED, grace_s=0.6)
    yield driven
    driven.close()


def failed(scores):
    return [s.failure is not None for s in scores]


# Sync functions


def test_scores_come_in_order_with_weights_and_unweighted_parts(driven):
    first, empty, second = driven.score([replied("1"), replied("0.5")], [], [replied("0")])
    assert [s.reward for s in first] == [2.0, 1.0]
    assert first[1].parts == {"obey": 0.5}
    assert (empty, second[0].reward) == ([], 0.0)


@pytest.mark.parametrize("text", ["loop", "swallow", "clear_the_alarm"])
def test_a_reward_that_takes_too_long_fails_alone_and_is_interrupted(driven, text):
    process = driven.start()
    (scores,) = driven.score([replied("1"), replied(text), replied("1")])
    assert failed(scores) == [False, True, False]
    assert f"reward 'obey' took longer than time_limit_s={LIMIT_S} (stopped after " in failure_of(scores[1])
    assert "sum-digits/47-82" in failure_of(scores[1])
    assert driven.start() is process


@pytest.mark.medium
@pytest.mark.parametrize("text", ["busy_in_c", "away_in_c"])
def test_a_reward_that_stays_in_c_fails_alone_and_its_process_is_replaced(driven, text):
    process = driven.start()
    (scores,) = driven.score([replied("1"), replied(text), replied("1")])
    assert failed(scores) == [False, True, False]
    assert f"reward 'obey' took longer than time_limit_s={LIMIT_S} on problem" in failure_of(scores[1])
    assert process.exitcode == -signal.SIGKILL


def test_a_reward_that_ends_its_process_fails_alone_and_the_rest_is_scored(driven):
    (scores,) = driven.score([replied("1"), replied("end"), replied("1")])
    assert failed(scores) == [False, True, False]
    assert "reward 'obey' ended the scoring process (exit code 3)" in failure_of(scores[1])


def test_what_fails_and_what_is_unparsed_comes_from_the_process(driven):
    ((bad, unparsed, nan),) = driven.score([replied("one"), replied("no_answer"), replied("nan")])
    assert "raised ValueError(\"could not convert string to float: 'one'\")" in failure_of(bad)
    assert (unparsed.reward, unparsed.failure, unparsed.unparsed) == (-2.0, None, ("obey",))
    assert "is nan, not a finite number" in failure_of(nan)


def test_a_worker_that_died_between_calls_is_replaced_and_nothing_fails(driven):
    process = driven.start()
    process.kill()
    process.join()
    (scores,) = driven.score([replied("1"), replied("1")])
    assert [s.reward for s in scores] == [2.0, 2.0]


def test_functions_draw_again_what_they_drew_after_their_random_states_were_taken(driven):
    def drawn():
        (scores,) = driven.score([replied("by_chance")] * 3)
        return [score.parts["obey"] for score in scores]

    driven.start()
    states = driven.run(driven.worker.random_states())
    first = drawn()
    assert len(set(first)) == 3
    assert drawn() != first
    driven.run(driven.worker.restore_random_states(states))
    assert drawn() == first


async def states_while_it_scores(worker, text):
    """Random states that are asked for when the function of this reply is called, and its score."""
    score = asyncio.ensure_future(worker.score([[replied(text)]]))
    while not any(work.began_at for work in worker._work.values()):
        await asyncio.sleep(0.01)
    states = await worker.random_states()
    return states, await score


def test_random_states_are_told_while_a_function_runs_and_there_are_none_without_a_process():
    driven = Driven(RUBRIC)
    assert driven.run(driven.worker.random_states()) is None
    driven.start()
    states, ((score,),) = driven.run(states_while_it_scores(driven.worker, "wait_a_little"))
    assert states is not None
    assert score.reward == 2.0
    driven.close()


@pytest.mark.medium
def test_random_states_of_a_process_that_cannot_answer_are_not_waited_for():
    driven = Driven(RUBRIC, states_s=0.05)
    driven.start()
    states, ((score,),) = driven.run(states_while_it_scores(driven.worker, "busy_in_c"))
    assert states is None
    assert "took longer than time_limit_s" in failure_of(score)
    driven.close()


def test_an_alarm_that_a_function_leaves_behind_hits_no_other(driven):
    process = driven.start()
    (scores,) = driven.score([replied("set_an_alarm"), replied("wait_a_little")])
    assert [s.reward for s in scores] == [2.0, 2.0]
    assert driven.start() is process


def test_a_cancelled_score_does_not_end_those_of_others(driven):
    async def steps():
        given_up = asyncio.ensure_future(driven.worker.score([[replied("wait_a_little"), replied("1")]]))
        kept = asyncio.ensure_future(driven.worker.score([[replied("1")]]))
        await asyncio.sleep(0)
        given_up.cancel()
        return await kept

    assert driven.runner.run(steps())[0][0].reward == 2.0


# In this process


def test_score_within_interrupts_and_leaves_alarm_and_handlers_as_they_were(caplog):
    ours = lambda *_: None  # noqa: E731
    before = signal.signal(signal.SIGALRM, ours)
    try:
        left = signal.setitimer(signal.ITIMER_REAL, 50)
        with caplog.at_level(logging.WARNING):
            assert score_within(RUBRIC, replied("set_an_alarm"), LIMIT_S).reward == 2.0
        assert "reward 'obey' left a handler of SIGALRM behind" in caplog.text
        failure = failure_of(score_within(RUBRIC, replied("clear_the_alarm"), LIMIT_S))
        assert f"took longer than time_limit_s={LIMIT_S} (stopped after " in failure
        assert signal.getsignal(signal.SIGALRM) is ours
        assert 45 < signal.getitimer(signal.ITIMER_REAL)[0] < 50
    finally:
        signal.setitimer(signal.ITIMER_REAL, *left)
        signal.signal(signal.SIGALRM, before)


def test_score_within_limits_async_functions_too_and_gives_a_group_function_the_rollout_alone():
    good = score_within(MIXED, replied("1"), LIMIT_S)
    assert good.parts == {"obey": 1.0, "later": 10.0, "together": 100.0}
    slow = score_within(MIXED, replied("1", question="take long"), LIMIT_S)
    assert f"reward 'later' took longer than time_limit_s={LIMIT_S}" in failure_of(slow)


# Async functions, and those of a group


def test_what_a_process_may_take_counts_what_runs_one_by_one_and_what_overlaps():
    def bound(rubric, num_rollouts):
        return longest_s(rubric, num_rollouts, time_limit_s=10.0, max_concurrency=64)

    assert bound(Rubric(), 256) == 0.0
    assert bound(Rubric(correct=never), 256) == 2560.0
    # Sync functions of a rollout share its limit.
    assert bound(Rubric(criteria=(*RUBRIC.criteria, Criterion(name="two", function=never))), 256) == 2560.0
    later = Criterion(name="later", function=counted)
    assert bound(Rubric(criteria=(later,)), 256) == 10.0 * (4 + 4)
    # A sync one, an async one, and one of a group.
    assert bound(MIXED, 256) == 10.0 * (256 + 256 + 4 + 4)

    class Judge:
        max_concurrency = 16

        async def __call__(self, rollout):
            return 1.0

    assert bound(Rubric(criteria=(later, Criterion(name="judge", function=Judge()))), 256) == 10.0 * (8 + 16)


def test_async_functions_of_several_groups_and_calls_overlap(mixed):
    groups = mixed.score_each(*([replied("1", question="meet 4")] for _ in range(4)))
    assert [s.reward for (s,) in groups] == [111.0] * 4


@pytest.mark.medium
def test_a_function_of_a_group_has_its_limit_for_each_rollout(mixed):
    one, two = mixed.score([replied("1", answer="slow")], [replied("1", answer="slow"), replied("2")])
    assert "reward 'together' took longer than time_limit_s=0.5 (stopped after " in failure_of(one[0])
    assert [s.reward for s in two] == [211.0, 212.0]


def test_an_async_function_that_takes_too_long_fails_alone(mixed):
    process = mixed.start()
    (scores,) = mixed.score([replied("1"), replied("1", question="take long"), replied("2")])
    assert failed(scores) == [False, True, False]
    assert f"reward 'later' took longer than time_limit_s={LIMIT_S}" in failure_of(scores[1])
    assert mixed.start() is process


@pytest.mark.medium
@pytest.mark.parametrize(
    ("guilty", "says"),
    [
        ({"question": "block"}, f"reward 'later' took longer than time_limit_s={LIMIT_S}"),
        ({"question": "end"}, "reward 'later' ended the scoring process (exit code 4)"),
        ({"question": "end by a task"}, "reward 'later' ended the scoring process (exit code 1)"),
        ({"text": "busy_in_c"}, f"reward 'obey' took longer than time_limit_s={LIMIT_S}"),
    ],
)
def test_a_function_that_stops_all_of_the_process_fails_alone(mixed, guilty, says):
    """Others are under way at the same time, and are scored by the next process."""
    settings = {"text": "1"} | guilty
    bad = replied(settings.pop("text"), **settings)
    others = [replied(str(i), question="wait") for i in range(1, 5)]
    groups = mixed.score_each(others[:1], [bad, others[1]], others[2:])
    assert [[s.reward for s in scores] for scores in groups] == [[111.0], [0.0, 212.0], [213.0, 214.0]]
    assert says in failure_of(groups[1][0])


@pytest.mark.medium
def test_at_most_so_many_async_functions_are_under_way_and_waiting_is_not_timed():
    driven = Driven(Rubric(criteria=(Criterion(name="count", function=counted),)), max_concurrency=2)
    try:
        (scores,) = driven.score([replied(str(i)) for i in range(8)])
    finally:
        driven.close()
    # 8 of 0.2 s, two at once, take 0.8 s, of which most wait longer than the limit.
    assert [s.failure for s in scores] == [None] * 8
    assert max(s.reward for s in scores) == 2.0


# Starting and ending


@pytest.mark.medium
def test_a_rubric_that_the_worker_cannot_load_is_said_and_leaves_no_process(tmp_path, monkeypatch):
    source = f"import os\nassert os.getpid() == {os.getpid()}\ndef half(rollout): return 0.5\n"
    (tmp_path / "loads_in_the_parent_alone.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("loads_in_the_parent_alone")
    before = set(multiprocessing.active_children())
    driven = Driven(Rubric(criteria=(Criterion(name="half", function=module.half),), correct=never))
    with pytest.raises(RunError, match=r"ended while loading the rubric \(exit code 1\)"):
        driven.start()
    with pytest.raises(RunError, match=r"ended while loading the rubric \(exit code 1\)"):
        driven.score([replied("1")])
    driven.close()
    assert set(multiprocessing.active_children()) == before
    del sys.modules[module.__name__]


def test_a_function_that_cannot_be_sent_is_said():
    driven = Driven(Rubric(criteria=(Criterion(name="f", function=lambda r: 1.0),)))
    with pytest.raises(RunError, match=r"the rubric cannot be sent to the scoring process .*top of a module"):
        driven.start()
    driven.close()


class EndsItsReader:
    def __reduce__(self):
        return os._exit, (7,)


@pytest.mark.medium
def test_a_process_that_ends_before_any_function_is_called_is_not_started_for_ever(driven):
    harmless = replied("1")
    problem = replace(harmless.prompt.problem, info={"x": EndsItsReader()})
    rollout = replace(harmless, prompt=replace(harmless.prompt, problem=problem))
    with pytest.raises(RunError, match=r"ended 3 times before it called a reward function \(exit code 7\)"):
        driven.score([rollout])
    assert driven.score([replied("1")])[0][0].reward == 2.0


def test_closing_leaves_no_process_and_fails_who_waits():
    driven = Driven(RUBRIC)

    async def close_meanwhile():
        waiting = asyncio.ensure_future(driven.worker.score([[replied("loop")]]))
        await driven.worker.start()
        await driven.worker.close()
        await driven.worker.close()
        with pytest.raises(RunError, match="the scoring process was closed"):
            await waiting

    before = set(multiprocessing.active_children())
    driven.runner.run(close_meanwhile())
    driven.runner.close()
    assert set(multiprocessing.active_children()) == before
