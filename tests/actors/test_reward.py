"""Scores from the processes of a reward actor."""

import asyncio
from dataclasses import replace
from functools import partial
from itertools import chain

import pytest

from actors.cluster.group import ActorGroup
from actors.cluster.rewarder import GATHER_S, MAX_GATHERED, QUICK_S, RewardClient
from actors.config import Timeouts
from actors.launch.calls import ActorTimeoutError
from actors.reward import RewardActor
from rl.rollouts.rewards import compute_longest_s
from rl.types import Score
from tests.support.monarch_meshes import monarch_meshes
from tests.support.reward_functions import alone, together
from tests.support.scored import replied
from tests.support.virtual_time import run_in_virtual_time

CONFIG = RewardActor.Config(num_procs=2, time_limit_s=20)
QUICK = QUICK_S / 1000
"""Seconds for a rollout."""


class Rewards:
    """Reward actors on two processes, one role per rubric."""

    def __init__(self, meshes):
        self.run = meshes.run
        role = meshes.spawn_role("rewards", num_procs=2)
        self.alone, self.together = (
            ActorGroup(
                name=rubric.__name__,
                mesh=role.mesh.spawn(rubric.__name__, RewardActor, config=CONFIG, rubric=rubric()),
                timeouts=Timeouts(score_s=40),
                processes=role.local,
            )
            for rubric in (alone, together)
        )
        self.run(self._set_up())

    async def _set_up(self):
        await asyncio.gather(
            *(g.call("setup", timeout="setup_s") for g in (self.alone, self.together))
        )

    def score(self, reward, *groups):
        """Score groups in one call; each is given by the replies of its rollouts."""
        rewarder = RewardClient(reward, num_procs=2)
        return self.run(rewarder.score([rollouts(*texts) for texts in groups]))


def rollouts(*texts):
    return [replied(text, sample=i) for i, text in enumerate(texts)]


def processes(scores):
    return [score.parts["process"] for score in scores]


@pytest.fixture(scope="module")
def rewards():
    with monarch_meshes() as meshes:
        yield Rewards(meshes)


pytestmark = pytest.mark.timeout(120)


@pytest.mark.medium
def test_groups_go_to_the_process_with_the_fewest_rollouts_and_come_back_in_order(rewards):
    scores = rewards.score(rewards.together, *(["x"] * size for size in (3, 0, 2, 1)))
    assert [[s.reward for s in group] for group in scores] == [[0, 1, 2], [], [0, 1], [0]]
    assert all(s.correct == (s.reward % 2 == 0) for group in scores for s in group)
    assert [[s.parts["count"] for s in group] for group in scores] == [
        [3.0] * 3,
        [],
        [2.0] * 2,
        [1.0],
    ]
    first, _, second, third = (set(processes(group)) for group in scores)
    assert len(first) == len(second) == 1
    assert first != second == third
    assert rewards.score(rewards.alone) == []


class OneByOne:
    """Fake mesh of a process whose reward functions all take the same time, within their limit."""

    def __init__(self, takes_s):
        self.takes_s = takes_s
        self.sizes = {"procs": 1}
        self.score = self
        self.main_thread = asyncio.Lock()
        self.asked = []
        """Number of rollouts of each group, by call."""

    def size(self):
        return 1

    def slice(self, **place):
        return self

    async def call(self, groups, alone):
        self.asked.append([len(group) for group in groups])
        async with self.main_thread:
            await asyncio.sleep(self.takes_s * sum(map(len, groups)))
        return {"procs": [[Score(reward=1.0, correct=True) for _ in group] for group in groups]}


def scored_one_by_one(rubric, *sizes, takes_s):
    """Return the virtual seconds that scoring groups of these sizes takes with the default
    limits.
    """

    async def scored():
        group = ActorGroup(name="reward", mesh=OneByOne(takes_s), timeouts=Timeouts())
        limits = partial(compute_longest_s, rubric, time_limit_s=RewardActor.Config().time_limit_s)
        rewarder = RewardClient(group, num_procs=1, longest_s=limits)
        return await rewarder.score([rollouts(*["x"] * size) for size in sizes])

    scores, took_s = run_in_virtual_time(scored())
    assert list(map(len, scores)) == list(sizes)
    return took_s


def test_any_number_of_rollouts_within_their_limit_are_scored():
    assert scored_one_by_one(alone(), *[1] * 260, takes_s=9) == pytest.approx(2340, abs=1)
    # A function of a group has the limit once per rollout.
    assert scored_one_by_one(together(), 100, takes_s=19) == pytest.approx(1900, abs=1)


async def asked_for(*, between_s=0.0, sizes=(1, 2, 3), given_up=(), takes_s=QUICK):
    """Ask for groups one after another; return what the process was asked, and the scores' numbers.

    Callers at the places `given_up` are cancelled before anything is sent.
    """
    process = OneByOne(takes_s=takes_s)
    group = ActorGroup(name="reward", mesh=process, timeouts=Timeouts())
    rewarder = RewardClient(group, num_procs=1, longest_s=float)
    # Nothing is known of the first group: it is a call of its own.
    await rewarder.score([rollouts("x")])
    asking = []
    for size in sizes:
        asking.append(asyncio.ensure_future(rewarder.score([rollouts(*["x"] * size)])))
        await asyncio.sleep(between_s)
    for place in given_up:
        asking[place].cancel()
    answers = await asyncio.gather(*asking, return_exceptions=True)
    # Nothing of the calls is left, and the next group is a call of its own.
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await rewarder.score([rollouts("x")])
    first, *asked, last = process.asked
    assert first == last == [1]
    return asked, [len(a[0]) if isinstance(a, list) else type(a) for a in answers]


@pytest.mark.parametrize(
    ("how", "asked"),
    [
        ({}, [[1, 2, 3]]),
        # The time begins with the first of them.
        ({"between_s": 0.7 * GATHER_S}, [[1, 2], [3]]),
        ({"between_s": 2 * GATHER_S}, [[1], [2], [3]]),
        ({"takes_s": 2 * QUICK_S}, [[1], [2], [3]]),
        ({"sizes": (MAX_GATHERED - 1, 1, 2)}, [[MAX_GATHERED - 1, 1], [2]]),
    ],
)
def test_groups_that_are_scored_quickly_share_calls(how, asked):
    calls, scores = run_in_virtual_time(asked_for(**how))[0]
    assert calls == asked
    assert scores == list(chain.from_iterable(asked))


def test_caller_that_gives_up_leaves_the_others_their_scores():
    gone = asyncio.CancelledError
    calls, scores = run_in_virtual_time(asked_for(given_up=[1]))[0]
    # Of a caller that is gone nothing is scored.
    assert (calls, scores) == ([[1, 0, 3]], [1, gone, 3])
    assert run_in_virtual_time(asked_for(given_up=[0, 1, 2]))[0] == ([], [gone] * 3)


def test_unresponsive_process_stops_the_run():
    says = r"reward\.score of rank 0 of 1 gave no answer within"
    with pytest.raises(ActorTimeoutError, match=says):
        scored_one_by_one(alone(), 1, takes_s=1e6)


@pytest.mark.medium
def test_cancelled_call_no_longer_counts_as_load(rewards):
    """Otherwise its process would get less work than the other one forever."""
    rewarder = RewardClient(rewards.alone, num_procs=2)

    async def steps():
        given_up = asyncio.ensure_future(rewarder.score([rollouts(*["x"] * 5)]))
        await asyncio.sleep(0)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        return [await rewarder.score([rollouts("x")]) for _ in range(2)]

    first, second = rewards.run(steps())
    assert processes(first[0]) == processes(second[0])


@pytest.mark.medium
def test_ranks_are_numbered_across_the_processes_of_several_hosts(rewards):
    mesh = rewards.alone.mesh.split(procs=("hosts", "procs"), hosts=2)
    found = [
        [processes(scores) for scores in rewards.score(actors, ["x"], ["x"])]
        for actors in (replace(rewards.alone, mesh=mesh), rewards.alone)
    ]
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
