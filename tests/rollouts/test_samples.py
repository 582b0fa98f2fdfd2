"""Training samples from rollouts and demonstrations."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from rl.rollouts.environment import Environments
from rl.rollouts.samples import (
    TokenSpan,
    UnfitDemonstrationError,
    make_demonstration_sample,
    make_sample_of_demonstration,
    make_supervised_sample,
    policy_sample,
    policy_samples,
)
from rl.types import Problem, TrainingSample
from tests.support.conversations import Factory, TwinRenderer, conversation, drawn

ROLLOUT = conversation(
    (3, drawn(5, 6, version=2, logprob=-0.5)), (2, drawn(7, version=3, logprob=-2.0))
)


def sample(advantages=(1.0, 2.0, -3.0)):
    return policy_sample(ROLLOUT, advantages_C=np.array(advantages), temperature=0.7)


def test_turns_are_joined_and_only_the_models_tokens_are_trained_on():
    made = sample()
    assert made.token_ids.tolist() == [1, 1, 1, 5, 6, 1, 1, 7]
    assert made.mask.tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True]
    assert made.advantages.tolist() == [0, 0, 0, 1, 2, 0, 0, -3]
    assert made.policy_versions.tolist() == [-1, -1, -1, 2, 2, -1, -1, 3]
    np.testing.assert_array_equal(
        made.generator_logprobs, [np.nan] * 3 + [-0.5] * 2 + [np.nan] * 2 + [-2.0]
    )
    assert made.temperature == 0.7
    assert made.token_ids.dtype == made.policy_versions.dtype == np.int32
    assert made.advantages.dtype == made.generator_logprobs.dtype == np.float32


def test_samples_made_together_are_those_made_alone():
    other = conversation((2, drawn(8, version=4, logprob=-1.0)))
    advantages = [np.array([1.0, 2.0, -3.0]), np.array([4.0])]
    together = policy_samples([ROLLOUT, other], advantages, temperature=0.7)
    for made, rollout, own in zip(together, (ROLLOUT, other), advantages, strict=True):
        alone = policy_sample(rollout, advantages_C=own, temperature=0.7)
        for field in ("token_ids", "mask", "generator_logprobs", "advantages", "policy_versions"):
            np.testing.assert_array_equal(getattr(made, field), getattr(alone, field))
    assert policy_samples([], [], temperature=1.0) == []


def test_values_that_are_not_one_for_each_token_are_refused():
    with pytest.raises(ValueError, match=r"^2 advantages for 3 tokens of problem"):
        sample(advantages=(1.0, 2.0))
    # Together they have as many logprobs as tokens.
    longer, shorter = (
        conversation((1, replace(drawn(5, 6, version=1), logprobs=np.zeros(num, dtype=np.float32))))
        for num in (3, 1)
    )
    with pytest.raises(
        ValueError, match=r"has 2 tokens, 3 logprobs and 2 policy versions: must be equally"
    ):
        policy_samples([longer, shorter], [np.zeros(2)] * 2, temperature=1.0)


def test_supervised_sample_trains_on_replies_but_not_on_the_first_token():
    spans = [
        TokenSpan(np.array(ids, dtype=np.int32), is_reply=is_reply)
        for ids, is_reply in (([4, 5], True), ([6], False), ([7, 8], True))
    ]
    made = make_supervised_sample(spans)
    assert made.token_ids.tolist() == [4, 5, 6, 7, 8]
    assert made.mask.tolist() == [False, True, False, True, True]
    one = make_demonstration_sample(np.array([4, 5]), np.array([6]))
    assert (one.token_ids.tolist(), one.mask.tolist()) == ([4, 5, 6], [False, False, True])


RENDERER = TwinRenderer()
PROBLEM = Problem(
    id="ask/one", question="one", answer="", demonstration=("first", "second", "third")
)


def demonstrate(problem: Problem, factory: Factory) -> TrainingSample:
    return asyncio.run(
        make_sample_of_demonstration(problem, Environments(make=factory), renderer=RENDERER)
    )


def test_demonstration_is_an_episode_whose_replies_are_trained_on():
    factory = Factory()
    sample = demonstrate(PROBLEM, factory)
    assert RENDERER.text(sample.token_ids[sample.mask]) == "firstsecondthird"
    assert (
        RENDERER.text(sample.token_ids[~sample.mask]) == "<u>one<a></a><u>more 1<a></a><u>more 2<a>"
    )
    assert (sample.advantages == sample.mask).all()
    assert np.isnan(sample.generator_logprobs).all()
    assert (sample.policy_versions == -1).all()
    assert [reply.text for reply in factory.made[0].replies] == list(PROBLEM.demonstrations)
    assert factory.closed == [1]
    whole = demonstrate(replace(PROBLEM, demonstration="all at once"), Factory(turns=0))
    assert RENDERER.text(whole.token_ids) == "<u>one<a>all at once"


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        (3, r"'ask/one': its environment continues after reply 3 of the 3 demonstrated"),
        (1, r"'ask/one': its environment ends after reply 2 of the 3 demonstrated"),
        (0, r"'ask/one': its environment ends after reply 1 of the 3 demonstrated"),
    ],
)
def test_number_of_replies_must_fit_the_environment(turns, message):
    factory = Factory(turns=turns)
    with pytest.raises(UnfitDemonstrationError, match=message):
        demonstrate(PROBLEM, factory)
    assert factory.closed == [1]


def test_problem_without_demonstration_is_refused_by_name():
    for nothing in ("", ()):
        factory = Factory()
        with pytest.raises(UnfitDemonstrationError, match="problem 'ask/one' has no demonstration"):
            demonstrate(replace(PROBLEM, demonstration=nothing), factory)
        assert factory.made == []
