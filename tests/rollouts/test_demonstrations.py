"""Prompts that fit, and demonstrated conversations as training samples."""

import asyncio
from dataclasses import dataclass, replace

import numpy as np
import pytest

from rl.errors import RunError
from rl.rollouts.demonstrations import UnfitDemonstrationError, demonstrated
from rl.rollouts.environment_thread import EnvironmentThreads
from rl.rollouts.episodes import Episodes
from rl.rollouts.renderer import render_prompt
from rl.rollouts.samples import policy_sample
from rl.rollouts.settings import EpisodeLimits
from rl.rollouts.tried_environments import TriedEnvironments
from rl.types import Completion, Message, Problem, SamplingParams, TrainingSample
from tests.support.conversations import Counting, Factory, ScriptedSampler, TwinRenderer
from tests.support.virtual_time import run_in_virtual_time

RENDERER = TwinRenderer()
PROBLEM = Problem(id="ask/one", question="one", answer="", demonstration=("first", "second", "third"))


def test_a_prompt_is_the_rendered_opening_and_one_that_is_longer_than_the_room_is_refused():
    messages = (Message(role="system", content="be brief"), Message(role="user", content="one"))
    prompt = render_prompt(PROBLEM, messages, renderer=RENDERER, max_tokens=20)
    assert RENDERER.text(prompt.token_ids) == "<s>be brief<u>one<a>"
    assert prompt.problem is PROBLEM
    with pytest.raises(
        ValueError, match=r"problem 'ask/one' has 20 tokens; the context leaves room for 19 \("
    ):
        render_prompt(PROBLEM, messages, renderer=RENDERER, max_tokens=19)


def demonstrate(problem: Problem, factory: Factory, *, step_timeout_s: float = 60.0) -> TrainingSample:
    environments = TriedEnvironments(
        make=factory, threads=EnvironmentThreads(grace_s=0.05), step_timeout_s=step_timeout_s
    )
    return asyncio.run(demonstrated(problem, environments, renderer=RENDERER))


class Rehearsed(ScriptedSampler):
    """Replies as the renderer tokenizes demonstrations."""

    async def generate(self, prompts, *, sampling, session=None):
        groups = await super().generate(prompts, sampling=sampling, session=session)
        return [[_encoded(c) for c in group] for group in groups]


def _encoded(made: Completion) -> Completion:
    token_ids = RENDERER.reply(RENDERER.text(made.token_ids))
    assert len(token_ids) == len(made.token_ids)
    return replace(made, token_ids=token_ids)


def test_a_demonstration_is_the_sample_that_a_rollout_with_its_replies_would_be():
    factory = Factory()
    sample = demonstrate(PROBLEM, factory)

    def reply(prompt, sampling, i):
        return PROBLEM.demonstrations[prompt.count("<u>") - 1]

    episodes = Episodes(
        sampler=Rehearsed(reply=reply),
        renderer=RENDERER,
        environment=lambda problem: Counting(problem=problem),
        limits=EpisodeLimits(),
        max_tokens=200,
    )
    ((rollout,),), _ = run_in_virtual_time(episodes.run([PROBLEM], sampling=SamplingParams(max_tokens=16)))
    drawn = policy_sample(rollout, advantages_C=np.ones(rollout.num_completion_tokens), temperature=1.0)
    assert sample.token_ids.tolist() == drawn.token_ids.tolist()
    assert sample.mask.tolist() == drawn.mask.tolist()
    assert RENDERER.text(sample.token_ids[sample.mask]) == "firstsecondthird"
    assert RENDERER.text(sample.token_ids[~sample.mask]) == "<u>one<a></a><u>more 1<a></a><u>more 2<a>"
    assert (sample.advantages == 1).all()
    assert np.isnan(sample.generator_logprobs).all()
    assert (sample.policy_versions == -1).all()
    assert [reply.text for reply in factory.made[0].replies] == list(PROBLEM.demonstrations)
    assert factory.closed == [1]


def test_a_demonstration_of_one_turn_may_be_a_text():
    problem = replace(PROBLEM, demonstration="all at once")
    sample = demonstrate(problem, Factory(turns=0))
    assert RENDERER.text(sample.token_ids) == "<u>one<a>all at once"


@pytest.mark.parametrize(
    ("turns", "says"),
    [
        (3, r"'ask/one': its environment goes on after reply 3 of the 3 of its demonstration"),
        (1, r"'ask/one': its environment ends after reply 2 of the 3 of its demonstration"),
        (0, r"'ask/one': its environment ends after reply 1 of the 3 of its demonstration"),
    ],
)
def test_more_or_fewer_replies_than_the_environment_asks_for_are_refused(turns, says):
    factory = Factory(turns=turns)
    with pytest.raises(UnfitDemonstrationError, match=says):
        demonstrate(PROBLEM, factory)
    assert factory.closed == [1]


def test_a_problem_without_a_demonstration_is_refused_by_name():
    for nothing in ("", ()):
        factory = Factory()
        with pytest.raises(UnfitDemonstrationError, match="problem 'ask/one' has no demonstration"):
            demonstrate(replace(PROBLEM, demonstration=nothing), factory)
        assert factory.made == []


@dataclass(kw_only=True)
class Broken(Counting):
    """In its second step."""

    error: Exception | None = None

    async def step(self, reply):
        observation = await super().step(reply)
        if self.num_steps == 2:
            if self.error is None:
                await asyncio.sleep(1e6)
            else:
                raise self.error
        return observation


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (KeyError("board"), r"turn 2 of problem 'ask/one': .* raised KeyError\('board'\)"),
        (None, r"turn 2 of problem 'ask/one': .* took longer than step_timeout_s=0\.05"),
        (RunError("no sandbox is left"), r"turn 2 of problem 'ask/one': .* no sandbox is left"),
    ],
)
def test_an_environment_that_breaks_in_a_demonstration_is_named_and_closed(error, says):
    factory = Factory(Broken, error=error)
    with pytest.raises(ValueError, match=says):
        demonstrate(PROBLEM, factory, step_timeout_s=0.05)
    assert factory.closed == [1]


class Speechless(TwinRenderer):
    def continuation(self, messages, *, after):
        raise KeyError("tool")


def test_messages_that_the_renderer_refuses_are_named():
    environments = TriedEnvironments(make=Factory())
    with pytest.raises(ValueError, match=r"turn 2 of problem 'ask/one': the renderer refused .*'tool'"):
        asyncio.run(demonstrated(PROBLEM, environments, renderer=Speechless()))
