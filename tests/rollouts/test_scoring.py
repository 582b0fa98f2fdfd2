import asyncio
import hashlib
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import time

import pytest
from math_verify import parse, verify

from rl.errors import RunError
from rl.rollouts.rubric import Criterion, GroupCriterion, Rubric, UnparsedAnswer
from rl.rollouts.scoring import ScoringWorker
from rl.rollouts.scoring_limit import score_within
from tests.support.scored import replied

LIMIT_S = 0.5
HALF = parse("$\\frac{1}{2}$")
"""Made while the module is loaded: the first parse takes long."""


def never(rollout):
    return False


# What reward functions do


def obey(rollout):
    """Does what the reply says."""
    if rollout.text in SYNC:
        return SYNC[rollout.text](rollout)
    return float(rollout.text)


def loop(rollout):
    while True:
        pass


def swallow(rollout):
    try:
        time.sleep(60)
    except Exception:  # noqa: BLE001  (what a careless reward does)
        return 1.0


def busy_in_c(rollout):
    """Holds the interpreter's lock, so that no other thread runs."""
    return 3 ** (10**9)


def away_in_c(rollout):
    """Gives the lock back, and still sees no signal."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)


def no_answer(rollout):
    raise UnparsedAnswer(value=-1.0)


def clear_the_alarm(rollout):
    signal.alarm(100)
    signal.alarm(0)
    loop(rollout)


def set_an_alarm(rollout):
    signal.signal(signal.SIGALRM, lambda *_: os._exit(9))
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    return 1.0


def wait_a_little(rollout):
    time.sleep(0.15)
    return 1.0


def equal_by_math_verify(rollout):
    """math-verify sets the process's alarm, and clears it, in each of these."""
    return float(verify(HALF, parse(rollout.prompt.problem.answer)))


def loop_after_math_verify(rollout):
    parse("$\\frac{1}{2}$", parsing_timeout=5)
    loop(rollout)


def end(rollout):
    os._exit(3)


SYNC = {
    f.__name__: f
    for f in (
        loop, swallow, busy_in_c, away_in_c, no_answer, clear_the_alarm, set_an_alarm, wait_a_little,
        equal_by_math_verify, loop_after_math_verify, end,
    )
}  # fmt: skip

_together = 0


async def later(rollout):
    """Does what the problem's question says, in an event loop."""
    global _together
    what = rollout.prompt.problem.question
    if what == "meet 4":
        # Returns when four are under way.
        _together += 1
        while _together % 4:
            await asyncio.sleep(0.001)
    elif what == "take long":
        await asyncio.sleep(60)
    elif what == "block":
        time.sleep(60)
    elif what == "math":
        parse("$1$", parsing_timeout=5)
    elif what == "end":
        os._exit(4)
    elif what == "end by a task":
        await asyncio.create_task(ending())
    return 10.0


async def ending():
    raise SystemExit


def together(rollouts):
    if rollouts[0].prompt.problem.answer == "slow":
        time.sleep(0.75)
    return [100.0 * len(rollouts)] * len(rollouts)


RUBRIC = Rubric(criteria=(Criterion(name="obey", function=obey, weight=2.0),), correct=never)
MIXED = Rubric(
    criteria=(
        Criterion(name="obey", function=obey),
        Criterion(name="later", function=later),
        GroupCriterion(name="together", function=together),
    )
)


class Driven:
    """A worker, and the event loop that it is of."""

    def __init__(self, rubric, **settings):
        self.runner = asyncio.Runner()
        self.worker = ScoringWorker(rubric=rubric, time_limit_s=LIMIT_S, **settings)

    def score(self, *groups):
        return self.runner.run(asyncio.wait_for(self.worker.score(groups), 60))

    def score_each(self, *groups):
        """In calls of their own, at once."""

        async def calls():
            return await asyncio.gather(*(self.worker.score([group]) for group in groups))

        return [scores for (scores,) in self.runner.run(asyncio.wait_for(calls(), 60))]

    def start(self):
        self.runner.run(self.worker.start())
        return self.worker._link.process

    def close(self):
        self.runner.run(self.worker.close())
        self.runner.close()


@pytest.fixture(scope="module")
def driven():
    driven = Driven(RUBRIC)
    yield driven
    driven.close()


@pytest.fixture(scope="module")
def mixed():
    driven = Driven(MIXED)
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


@pytest.mark.parametrize("text", ["loop", "swallow", "clear_the_alarm", "loop_after_math_verify"])
def test_a_reward_that_takes_too_long_fails_alone_and_is_interrupted(driven, text):
    process = driven.start()
    (scores,) = driven.score([replied("1"), replied(text), replied("1")])
    assert failed(scores) == [False, True, False]
    assert f"reward 'obey' took longer than time_limit_s={LIMIT_S} (stopped after " in scores[1].failure
    assert "sum-digits/47-82" in scores[1].failure
    assert driven.start() is process


@pytest.mark.parametrize("text", ["busy_in_c", "away_in_c"])
def test_a_reward_that_stays_in_c_fails_alone_and_its_process_is_replaced(driven, text):
    process = driven.start()
    (scores,) = driven.score([replied("1"), replied(text), replied("1")])
    assert failed(scores) == [False, True, False]
    assert f"reward 'obey' took longer than time_limit_s={LIMIT_S} on problem" in scores[1].failure
    assert process.exitcode == -signal.SIGKILL


def test_a_reward_that_ends_its_process_fails_alone_and_the_rest_is_scored(driven):
    (scores,) = driven.score([replied("1"), replied("end"), replied("1")])
    assert failed(scores) == [False, True, False]
    assert "reward 'obey' ended the scoring process (exit code 3)" in scores[1].failure


def test_what_fails_and_what_is_unparsed_comes_from_the_process(driven):
    ((bad, unparsed, nan),) = driven.score([replied("one"), replied("no_answer"), replied("nan")])
    assert "raised ValueError(\"could not convert string to float: 'one'\")" in bad.failure
    assert (unparsed.reward, unparsed.failure, unparsed.unparsed) == (-2.0, None, ("obey",))
    assert "is nan, not a finite number" in nan.failure


def test_a_worker_that_died_between_calls_is_replaced_and_nothing_fails(driven):
    process = driven.start()
    process.kill()
    process.join()
    (scores,) = driven.score([replied("1"), replied("1")])
    assert [s.reward for s in scores] == [2.0, 2.0]


def test_an_alarm_that_a_function_leaves_behind_hits_no_other(driven):
    process = driven.start()
    (scores,) = driven.score([replied("set_an_alarm"), replied("wait_a_little")])
    assert [s.reward for s in scores] == [2.0, 2.0]
    assert driven.start() is process


def test_math_verify_grades_in_the_process(driven):
    asked = [replied("equal_by_math_verify", answer=a) for a in ("$0.5$", "$0.25$")]
    (scores,) = driven.score(asked)
    assert [(s.failure, s.parts.get("obey")) for s in scores] == [(None, 1.0), (None, 0.0)]


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
        failure = score_within(RUBRIC, replied("clear_the_alarm"), LIMIT_S).failure
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
    assert f"reward 'later' took longer than time_limit_s={LIMIT_S}" in slow.failure


# Async functions, and those of a group


def test_async_functions_of_several_groups_and_calls_overlap(mixed):
    groups = mixed.score_each(*([replied("1", question="meet 4")] for _ in range(4)))
    assert [s.reward for (s,) in groups] == [111.0] * 4


def test_a_function_of_a_group_has_its_limit_for_each_rollout(mixed):
    one, two = mixed.score([replied("1", answer="slow")], [replied("1", answer="slow"), replied("2")])
    assert "reward 'together' took longer than time_limit_s=0.5 (stopped after " in one[0].failure
    assert [s.reward for s in two] == [211.0, 212.0]


def test_an_async_function_that_takes_too_long_fails_alone(mixed):
    process = mixed.start()
    (scores,) = mixed.score([replied("1"), replied("1", question="take long"), replied("2")])
    assert failed(scores) == [False, True, False]
    assert f"reward 'later' took longer than time_limit_s={LIMIT_S}" in scores[1].failure
    assert mixed.start() is process


def test_math_verifys_alarm_off_the_main_thread_is_a_failure_that_says_so(mixed):
    ((score,),) = mixed.score([replied("1", question="math")])
    assert "reward 'later' raised ValueError(" in score.failure
    assert "threaded environment" in score.failure


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
    groups = mixed.score_each([replied("1")], [bad, replied("2")], [replied("3"), replied("4")])
    assert [[s.reward for s in scores] for scores in groups] == [[111.0], [0.0, 212.0], [213.0, 214.0]]
    assert says in groups[1][0].failure


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


_now = 0


async def counted(rollout):
    global _now
    _now += 1
    most = _now
    await asyncio.sleep(0.2)
    _now -= 1
    return most


# Starting and ending


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
    with pytest.raises(RunError, match="the rubric cannot be sent to the scoring process .*top of a module"):
        driven.start()
    driven.close()


class EndsItsReader:
    def __reduce__(self):
        return os._exit, (7,)


@pytest.mark.medium
def test_a_process_that_ends_before_any_function_is_called_is_not_started_for_ever(driven):
    rollout = replied("1")
    rollout.prompt.problem.info["x"] = EndsItsReader()
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
