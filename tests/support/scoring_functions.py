"""Reward functions that obey a rollout: wait, hang, or kill their process."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path

from rl.rollouts.rewards import RewardProcess
from rl.rollouts.rubric import Criterion, GroupCriterion, Rubric

LIMIT_S = 0.5


def never(rollout):
    return False


def obey(rollout):
    """Call the function that the reply names."""
    function = globals().get(rollout.text)
    return float(rollout.text) if function is None else function(rollout)


def loop(rollout):
    while True:
        pass


def busy_in_c(rollout):
    """Hold the interpreter's lock, so that no other thread runs."""
    return 3 ** (10**9)


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


def own_loop(rollout):
    asyncio.run(asyncio.sleep(0))
    return 1.0


def end(rollout):
    os._exit(3)


def fork_and_end(rollout):
    """Leave a child process that inherits all open files."""
    if os.fork() == 0:
        time.sleep(5)
        os._exit(0)
    os._exit(5)


def start_process(rollout):
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(0,))
    child.start()
    child.join()
    return float(child.exitcode == 0)


def use_pool(rollout):
    assert multiprocessing.get_start_method() == multiprocessing.get_all_start_methods()[0]
    with multiprocessing.Pool(1) as pool:
        return float(pool.apply(os.getpid) != os.getpid())


def leave_children(rollout):
    """Start a process in a session of its own and an orphan, write their pids to the file in the
    question.
    """
    apart = subprocess.Popen(["sleep", "60"], start_new_session=True)
    orphan = subprocess.run(
        ["sh", "-c", "setsid sleep 60 >/dev/null 2>&1 & echo $!"],
        stdout=subprocess.PIPE,
        check=True,
    )
    Path(rollout.prompt.problem.question).write_text(f"{apart.pid} {int(orphan.stdout)}")
    return 1.0


def leave_children_and_hang(rollout):
    leave_children(rollout)
    busy_in_c(rollout)


def leave_children_and_end(rollout):
    leave_children(rollout)
    os.kill(os.getpid(), signal.SIGSEGV)


_together = 0


async def later(rollout):
    """Obey the problem's question in the event loop."""
    global _together
    what = rollout.prompt.problem.question
    if what == "meet 4":
        # Return once four calls are running.
        _together += 1
        while _together % 4:
            await asyncio.sleep(0.001)
    elif what == "wait":
        await asyncio.sleep(LIMIT_S / 2)
    elif what == "hang":
        await asyncio.sleep(60)
    return 10.0


def together(rollouts):
    return [100.0 * len(rollouts)] * len(rollouts)


RUBRIC = Rubric(criteria=(Criterion(name="obey", function=obey, weight=2.0),), correct=never)
MIXED = Rubric(
    criteria=(
        Criterion(name="obey", function=obey),
        Criterion(name="later", function=later),
        GroupCriterion(name="together", function=together),
    )
)


def failure_of(score):
    assert score.failure is not None
    return score.failure


class Driven:
    """Reward process with its own event loop."""

    def __init__(self, rubric, **settings):
        self.runner = asyncio.Runner()
        self.rewards = RewardProcess(rubric=rubric, time_limit_s=LIMIT_S, **settings)

    def score(self, *groups):
        return self.run(self.rewards.score(groups))

    def score_each(self, *groups):
        """Score each group in a separate call, all concurrently."""

        async def calls():
            return await asyncio.gather(*(self.rewards.score([group]) for group in groups))

        return [scores for (scores,) in self.run(calls())]

    def run(self, coroutine):
        return self.runner.run(asyncio.wait_for(coroutine, 60))

    def start(self):
        self.run(self.rewards.start())
        process = self.rewards.process
        assert process is not None
        return process

    def close(self):
        self.run(self.rewards.close())
        self.runner.close()
