"""Rollouts and demonstrations as training samples."""

from dataclasses import replace

import numpy as np
import pytest

from rl.rollouts.samples import TokenSpan, cut, demonstration_sample, policy_sample, supervised_sample
from tests.support.conversations import conversation, drawn

ROLLOUT = conversation((3, drawn(5, 6, version=2, logprob=-0.5)), (2, drawn(7, version=3, logprob=-2.0)))


def sample(advantages=(1.0, 2.0, -3.0)):
    return policy_sample(ROLLOUT, advantages_C=np.array(advantages), temperature=0.7)


def test_a_rollouts_turns_are_joined_and_only_the_models_tokens_are_trained_on():
    made = sample()
    assert made.token_ids.tolist() == [1, 1, 1, 5, 6, 1, 1, 7]
    assert made.mask.tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True]
    assert made.advantages.tolist() == [0, 0, 0, 1, 2, 0, 0, -3]
    assert made.policy_versions.tolist() == [-1, -1, -1, 2, 2, -1, -1, 3]
    np.testing.assert_array_equal(made.generator_logprobs, [np.nan] * 3 + [-0.5] * 2 + [np.nan] * 2 + [-2.0])
    assert made.temperature == 0.7
    dtypes = {
        name: getattr(made, name).dtype for name in ("token_ids", "mask", "advantages", "policy_versions")
    }
    assert dtypes == {
        "token_ids": np.int32,
        "mask": bool,
        "advantages": np.float32,
        "policy_versions": np.int32,
    }
    assert made.generator_logprobs.dtype == np.float32


@pytest.mark.parametrize("num_advantages", [2, 4])
def test_advantages_of_another_number_of_tokens_are_refused(num_advantages):
    with pytest.raises(ValueError, match=rf"has {num_advantages} entries for the 3 tokens .* problem 'p'"):
        sample(np.ones(num_advantages))


@pytest.mark.parametrize("max_tokens", [4, 7, 8, 9])
def test_a_sample_is_cut_in_all_that_it_has_by_token(max_tokens):
    whole = replace(sample(), proximal_logprobs=np.arange(8, dtype=np.float32))
    short = cut(whole, max_tokens=max_tokens)
    for name in (
        "token_ids", "mask", "generator_logprobs", "advantages", "policy_versions", "proximal_logprobs",
    ):  # fmt: skip
        np.testing.assert_array_equal(getattr(short, name), getattr(whole, name)[:max_tokens])
    assert short.temperature == 0.7
    assert short.reference_logprobs is None


def test_a_supervised_sample_trains_on_replies_and_never_on_the_first_token():
    spans = [
        TokenSpan(np.array(ids, dtype=np.int32), is_reply=is_reply)
        for ids, is_reply in (([4, 5], True), ([6], False), ([7, 8], True))
    ]
    made = supervised_sample(spans)
    assert made.token_ids.tolist() == [4, 5, 6, 7, 8]
    assert made.mask.tolist() == [False, True, False, True, True]
    one = demonstration_sample(np.array([4, 5]), np.array([6]))
    assert (one.token_ids.tolist(), one.mask.tolist()) == ([4, 5, 6], [False, False, True])
