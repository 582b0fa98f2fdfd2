"""Scores from the processes of a reward actor."""

import asyncio
import os
import signal
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from actors import launch
from actors.backend import ActorScorer
from actors.calls import ActorCallError, ActorGroup, Timeouts
from actors.reward import RewardActor
from rl.errors import RunError
from rl.types import Score
from tests.support.monarch_meshes import monarch_meshes
from tests.support.reward_functions import alone, together
from tests.support.scored import replied

CONFIG = RewardActor.Config(num_procs=2, time_limit_s=20)


class Rewards:
    """Reward actors on two processes, one for each rubric."""

    def __init__(self, meshes):
        self.run = meshes.run
        mesh = meshes.spawn_mesh(2, process_group=False)
        self.alone, self.together = (
            ActorGroup(
                name=rubric.__name__,
                mesh=mesh.spawn(rubric.__name__, RewardActor, config=CONFIG, rubric=rubric()),
                timeouts=Timeouts(score_s=40),
                processes=launch.local_processes(mesh),
            )
            for rubric in (alone, together)
        )
        self.run(self._set_up())

    async def _set_up(self):
        await asyncio.gather(*(g.call("setup", limit="setup_s") for g in (self.alone, self.together)))

    def score(self, reward, *groups, keep_groups=False):
        """Groups in one call, each given as the replies of its rollouts."""
        scorer = ActorScorer(reward, num_procs=2, keep_groups=keep_groups)
        return self.run(scorer.score([rollouts(*texts) for texts in groups]))


def rollouts(*texts):
    return [replied(text, sample=i) for i, text in enumerate(texts)]


def processes(scores):
    return [score.parts["process"] for score in scores]


@pytest.fixture(scope="module")
def rewards():
    with monarch_meshes() as meshes:
        yield Rewards(meshes)


pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("field", ["num_procs", "max_concurrency"])
def test_numbers_below_one_are_refused(field):
    with pytest.raises(ValueError, match=f"{field}=0 is less than 1"):
        RewardActor.Config(**{field: 0})


@pytest.mark.medium
@pytest.mark.parametrize("sizes", [[], [0], [1], [5], [3, 0, 2]])
def test_scores_come_in_order_from_both_processes_in_turn(rewards, sizes):
    scores = rewards.score(rewards.alone, *(["x"] * size for size in sizes))
    assert [[s.reward for s in group] for group in scores] == [list(range(size)) for size in sizes]
    assert all(s.correct == (s.reward % 2 == 0) for group in scores for s in group)
    asked = [process for group in scores for process in processes(group)]
    assert len(set(asked[::2])) <= 1
    assert len(set(asked[1::2])) <= 1
    assert len(set(asked)) == min(len(asked), 2)


@pytest.mark.medium
def test_a_group_that_is_kept_goes_to_one_process_and_the_next_to_the_other(rewards):
    scores = rewards.score(rewards.together, ["x"] * 3, ["x"] * 2, ["x"], keep_groups=True)
    assert [[s.parts["count"] for s in group] for group in scores] == [[3.0] * 3, [2.0] * 2, [1.0]]
    first, second, third = (set(processes(group)) for group in scores)
    assert len(first) == len(second) == 1
    assert first != second == third


@pytest.mark.medium
def test_groups_are_not_divided_where_a_function_needs_them_whole(rewards):
    with pytest.raises(RunError, match="functions of a group, and groups were divided"):
        rewards.score(rewards.together, ["x"] * 3)


@pytest.mark.medium
def test_calls_overlap_and_a_slow_process_holds_up_its_own_rollouts_alone(rewards, tmp_path):
    gate = tmp_path / "gate"
    scorer = ActorScorer(rewards.alone, num_procs=2, keep_groups=False)

    async def steps():
        slow = asyncio.ensure_future(scorer.score([rollouts(str(gate))]))
        await asyncio.sleep(0)
        quick = [await scorer.score([rollouts("x")]) for _ in range(3)]
        done = slow.done()
        gate.touch()
        return await slow, quick, done

    slow, quick, done = rewards.run(steps())
    assert not done
    assert slow[0][0].failure is None
    others = {processes(group)[0] for scores in quick for group in scores}
    assert others.isdisjoint(processes(slow[0]))
    assert len(others) == 1


@pytest.mark.medium
def test_async_functions_of_several_calls_overlap_in_one_process(rewards):
    scorer = ActorScorer(rewards.alone, num_procs=1)

    async def steps():
        return await asyncio.gather(*(scorer.score([rollouts("meet")]) for _ in range(2)))

    assert [scores[0][0].failure for scores in rewards.run(steps())] == [None, None]


@dataclass
class Recorded:
    """Stands for a process: answers at once, or after an error, and notes how many were asked for."""

    asked: list[int] = field(default_factory=list)
    num_now: int = 0
    most_at_once: int = 0
    fails: bool = False

    def at_rank(self, rank):
        return self

    async def call(self, endpoint, groups, whole, *, limit):
        num = sum(map(len, groups))
        self.asked.append(num)
        self.num_now += num
        self.most_at_once = max(self.most_at_once, self.num_now)
        await asyncio.sleep(0)
        self.num_now -= num
        if self.fails:
            raise ActorCallError("it raised")
        return [[[Score(reward=float(r.sample), correct=False) for r in group] for group in groups]]


def test_a_process_is_asked_for_a_part_at_a_time_each_with_a_deadline_of_its_own():
    process: Any = Recorded()
    scorer = ActorScorer(process, num_procs=1)
    groups = [rollouts(*["x"] * 3) for _ in range(1000)]

    async def two_evaluations():
        return await asyncio.gather(scorer.score(groups), scorer.score(groups[:1]), scorer.score(groups))

    first, second, third = asyncio.run(two_evaluations())
    assert [[s.reward for s in group] for group in first] == [[0.0, 1.0, 2.0]] * 1000
    assert (second, third) == (first[:1], first)
    assert sum(process.asked) == 6003
    assert max(process.asked) == 63  # whole groups within 64
    assert 192 <= process.most_at_once <= 256
    # A group that is longer goes alone.
    long = ActorScorer(process, num_procs=1).score([rollouts(*["x"] * 300), *groups[:2]])
    assert list(map(len, asyncio.run(long))) == [300, 3, 3]
    assert process.asked[-2:] == [300, 6]


def test_after_an_error_no_further_part_is_asked_for():
    process: Any = Recorded(fails=True)
    scorer = ActorScorer(process, num_procs=1)

    async def scored_after_an_error():
        with pytest.raises(ActorCallError, match="it raised"):
            await scorer.score([rollouts(*["x"] * 3) for _ in range(1000)])
        process.fails, num_asked = False, sum(process.asked)
        return num_asked, await scorer.score([rollouts("x")])

    num_asked, scores = asyncio.run(scored_after_an_error())
    assert num_asked <= 512
    assert len(scores) == 1


@pytest.mark.medium
def test_a_call_that_is_given_up_counts_no_longer(rewards):
    """Its process would get less than the other for ever."""
    scorer = ActorScorer(rewards.alone, num_procs=2)

    async def steps():
        given_up = asyncio.ensure_future(scorer.score([rollouts(*["x"] * 5)]))
        await asyncio.sleep(0)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        return [await scorer.score([rollouts("x")]) for _ in range(2)]

    first, second = rewards.run(steps())
    assert processes(first[0]) == processes(second[0])


@pytest.mark.medium
@pytest.mark.parametrize("num_hosts", [1, 2])
def test_ranks_are_counted_through_the_processes_of_several_hosts(rewards, num_hosts):
    mesh = rewards.alone.mesh.split(procs=("hosts", "procs"), hosts=num_hosts)
    scores = rewards.score(replace(rewards.alone, mesh=mesh), ["x"] * 2)
    assert processes(scores[0]) == processes(rewards.score(rewards.alone, ["x"] * 2)[0])
    with pytest.raises(AssertionError, match="alone has 2 ranks, there is no rank 2"):
        replace(rewards.alone, mesh=mesh).at_rank(2)


@pytest.mark.medium
def test_a_dead_process_is_named_by_its_rank(rewards):
    """The last test: one process is gone afterwards."""
    os.kill(rewards.alone.processes[1].pid, signal.SIGKILL)
    with pytest.raises(ActorCallError, match=r"^alone\.score failed: rank 1 of 2 is dead: "):
        rewards.score(rewards.alone, ["x"] * 2)
