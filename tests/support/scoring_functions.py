"""Reward functions that do what a rollout says, for processes that load them from here, and a worker of them.

They wait, hang and end: what a scoring process has to live with.
"""

import asyncio
import hashlib
import os
import random
import signal
import time

from rl.rollouts.rubric import Criterion, GroupCriterion, Rubric, UnparsedAnswer
from rl.rollouts.scoring import ScoringWorker

LIMIT_S = 0.5


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


def by_chance(rollout):
    return random.random()


def end(rollout):
    os._exit(3)


SYNC = {
    f.__name__: f
    for f in (
        loop,
        swallow,
        busy_in_c,
        away_in_c,
        no_answer,
        clear_the_alarm,
        set_an_alarm,
        wait_a_little,
        by_chance,
        end,
    )
}

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
    elif what == "wait":
        await asyncio.sleep(LIMIT_S / 2)
    elif what == "take long":
        await asyncio.sleep(60)
    elif what == "block":
        time.sleep(60)
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


_now = 0


async def counted(rollout):
    global _now
    _now += 1
    most = _now
    await asyncio.sleep(0.2)
    _now -= 1
    return most


def failure_of(score):
    assert score.failure is not None
    return score.failure


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

    def run(self, coroutine):
        return self.runner.run(asyncio.wait_for(coroutine, 60))

    def start(self):
        self.runner.run(self.worker.start())
        assert self.worker._link is not None
        return self.worker._link.process

    def close(self):
        self.runner.run(self.worker.close())
        self.runner.close()
