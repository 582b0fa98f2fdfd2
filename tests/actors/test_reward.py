"""Scores from the processes of a reward actor."""

import asyncio
import os
import signal
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest

from actors import launch
from actors.backend import ActorScorer
from actors.calls import ActorCallError, ActorGroup, ActorTimeoutError, Timeouts
from actors.random_states import ActorRandomStates
from actors.reward import RewardActor
from rl.errors import RunError
from rl.rollouts.scoring import longest_s
from rl.types import Score
from tests.support.monarch_meshes import monarch_meshes
from tests.support.reward_functions import alone, together
from tests.support.scored import replied
from tests.support.virtual_time import run_in_virtual_time

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
def test_reward_functions_draw_again_what_they_drew_after_their_random_states_were_taken(rewards):
    def drawn():
        (scores,) = rewards.score(rewards.alone, ["x"] * 4)
        return sorted((s.parts["process"], s.parts["chance"]) for s in scores)

    processes = ActorRandomStates([rewards.alone])
    states = rewards.run(processes.random_states())
    assert list(states) == ["alone-0", "alone-1"]
    first = drawn()
    assert drawn() != first
    rewards.run(processes.restore_random_states(states))
    assert drawn() == first


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

    async def call(self, endpoint, groups, whole, alone, *, limit, more_s):
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


class OneByOne:
    """Stands for the mesh of a process whose reward functions all take a time that is within their limit."""

    def __init__(self, takes_s):
        self.takes_s = takes_s
        self.sizes = {"procs": 1}
        self.score = self
        self.main_thread = asyncio.Lock()

    def size(self):
        return 1

    def slice(self, **place):
        return self

    async def call(self, groups, whole, alone):
        async with self.main_thread:
            await asyncio.sleep(self.takes_s * sum(map(len, groups)))
        return {"procs": [[Score(reward=1.0, correct=True) for _ in group] for group in groups]}


def scored_one_by_one(rubric, *sizes, takes_s):
    """Virtual seconds that groups of these sizes take, with the default limits."""

    async def scored():
        group = ActorGroup(name="reward", mesh=OneByOne(takes_s), timeouts=Timeouts())
        limits = partial(longest_s, rubric, time_limit_s=RewardActor.Config().time_limit_s)
        scorer = ActorScorer(group, num_procs=1, longest_s=limits)
        return await scorer.score([rollouts(*["x"] * size) for size in sizes])

    scores, took_s = run_in_virtual_time(scored())
    assert list(map(len, scores)) == list(sizes)
    return took_s


def test_rollouts_that_all_keep_their_limit_stop_no_run_however_many_are_scored():
    # Four parts of 64 are in the process at once: the last of them waits for 1728 s.
    assert scored_one_by_one(alone(), *[1] * 260, takes_s=9) == pytest.approx(2340, abs=1)
    # A function of a group has the limit for each rollout of its group.
    assert scored_one_by_one(together(), 100, takes_s=19) == pytest.approx(1900, abs=1)


def test_a_process_that_does_not_answer_still_stops_the_run():
    says = r"reward\.score of rank 0 of 1 gave no answer within timeouts\.score_s=600 and the 30 s that its"
    with pytest.raises(ActorTimeoutError, match=says):
        scored_one_by_one(alone(), 1, takes_s=1e6)


@pytest.mark.medium
def test_functions_that_compare_rollouts_are_left_out_where_each_stands_alone(rewards):
    scorer = ActorScorer(rewards.together, num_procs=2)
    scores = rewards.run(scorer.score([rollouts("x"), rollouts("x")], alone=True))
    assert [list(score.parts) for (score,) in scores] == [["sample", "process", "meet", "chance"]] * 2


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
    with pytest.raises(AssertionError, match="there are 2 ranks, there is no rank 2"):
        replace(rewards.alone, mesh=mesh).at_rank(2)


@pytest.mark.medium
def test_a_dead_process_is_named_by_its_rank(rewards):
    """The last test: one process is gone afterwards."""
    os.kill(rewards.alone.processes[1].pid, signal.SIGKILL)
    with pytest.raises(ActorCallError, match=r"^alone\.score failed: rank 1 of 2 is dead: "):
        rewards.score(rewards.alone, ["x"] * 2)
