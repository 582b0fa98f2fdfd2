"""A generator of two tensor-parallel ranks gives the results of one rank."""

import numpy as np
import pytest

from rl.models.generate import generate
from tests.actors.generator_ranks import LONG, PROMPTS, SAMPLING, SEQUENCES, SPEC, live
from tests.support.distributed import run_ranks
from tests.support.policies import random_model, recomputed_logprobs, sequence_logprobs, tokens_of

pytestmark = [pytest.mark.medium, pytest.mark.timeout(240)]

OLD, NEW = random_model(SPEC, seed=0), random_model(SPEC, seed=1)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(live, 2, str(tmp_path_factory.mktemp("ranks")), timeout_s=200)


def versions_of(completions):
    return {version for of in completions for c in of for version in c.policy_versions.tolist()}


def test_tokens_and_logprobs_equal_those_of_one_rank(ranks):
    completions = ranks[0].first
    assert tokens_of(completions) == tokens_of(generate(OLD, PROMPTS, sampling=SAMPLING))
    differences = np.concatenate(
        [
            completion.logprobs - recomputed_logprobs(OLD, prompt, completion, SAMPLING)
            for prompt, of_prompt in zip(PROMPTS, completions, strict=True)
            for completion in of_prompt
        ]
    )
    assert np.abs(differences).mean() <= 1e-5
    assert versions_of(completions) == {1}


def test_weights_are_written_into_sharded_parameters(ranks):
    kinds = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "embed_tokens", "lm_head")
    for rank in ranks:
        assert len(rank.sharded) == 2 * 4 + 2
        assert all(any(kind in name for kind in kinds) for name in rank.sharded)


def test_ranks_stay_in_step_under_concurrent_calls_and_an_update(ranks):
    for i, completions in enumerate(ranks[0].concurrent):
        assert tokens_of(completions) == tokens_of(generate(OLD, PROMPTS[i::3], sampling=SAMPLING))
        assert versions_of(completions) == {1}
    assert tokens_of(ranks[0].waiting) == tokens_of(generate(NEW, PROMPTS[:2], sampling=SAMPLING))
    assert versions_of(ranks[0].waiting) == {2}


def test_only_rank_0_answers(ranks):
    assert ranks[1].first == ranks[1].waiting == ranks[1].healed == []
    assert ranks[1].concurrent == [[], [], []]


def test_update_that_fails_on_one_rank_fails_on_all(ranks):
    assert ranks[1].one_rank_failed == "KeyError: 'version 3'"
    assert ranks[0].one_rank_failed == (
        "GeneratorError: the update of the weights to version 3 failed on another rank of the generator"
    )
    assert ranks[0].no_weights.startswith("GeneratorError: the generator has no weights")
    assert tokens_of(ranks[0].healed) == tokens_of(generate(OLD, PROMPTS[:1], sampling=SAMPLING))
    assert versions_of(ranks[0].healed) == {4}


def test_closed_generator_leaves_no_thread(ranks):
    assert [rank.threads_left for rank in ranks] == [0, 0]


def test_ranks_stay_in_step_when_weights_change_in_flight(ranks):
    first, second = ranks
    assert versions_of(first.across) == {4, 5}
    for prompt, of_prompt in zip(PROMPTS, first.across, strict=True):
        for completion in of_prompt:
            num_old = completion.policy_versions.tolist().count(4)
            assert completion.policy_versions.tolist() == [4] * num_old + [5] * (60 - num_old)
            by_old, by_new = (recomputed_logprobs(m, prompt, completion, LONG) for m in (OLD, NEW))
            np.testing.assert_allclose(completion.logprobs[:num_old], by_old[:num_old], atol=1e-4, rtol=0)
            np.testing.assert_allclose(completion.logprobs[num_old:], by_new[num_old:], atol=1e-4, rtol=0)
    assert second.across == second.scored == []


def test_ranks_score_sequences(ranks):
    for tokens, logprobs in zip(SEQUENCES, ranks[0].scored, strict=True):
        np.testing.assert_allclose(logprobs, sequence_logprobs(NEW, tokens), atol=1e-5, rtol=0)


def test_ranks_end_and_continue_completions_together(ranks):
    first, second = ranks
    reasons = [c.finish_reason for of_prompt in first.aborted for c in of_prompt]
    assert first.num_aborted == reasons.count("abort") == 21
    assert second.num_aborted == 0
    assert tokens_of(first.continued) == tokens_of(generate(NEW, PROMPTS, sampling=LONG))
