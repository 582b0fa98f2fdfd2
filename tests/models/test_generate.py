from itertools import chain

import numpy as np
import pytest
import torch

from rl.models import generate as generate_module
from rl.models.generate import generate, prompt_logprobs
from rl.types import SamplingParams
from tests.support.policies import full_logits, recomputed_logprobs

PROMPTS = [np.array(ids, dtype=np.int32) for ids in ([3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9])]


@pytest.fixture(scope="module")
def model(make_model):
    return make_model()


def same(a, b):
    return len(a) == len(b) and all(
        np.array_equal(x.token_ids, y.token_ids) for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_those_of_a_forward_over_the_whole_sequence(model, temperature):
    sampling = SamplingParams(max_tokens=30, num_samples=3, temperature=temperature, seed=0)
    for prompt, completions in zip(PROMPTS, generate(model, PROMPTS, sampling=sampling), strict=True):
        for completion in completions:
            assert len(completion.token_ids) == 30
            expected = recomputed_logprobs(model, prompt, completion, sampling)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=1e-5)


def test_completions_do_not_depend_on_the_rest_of_the_call(model):
    sampling = SamplingParams(max_tokens=12, num_samples=2, seed=0, stop_token_ids=(7,))
    together = generate(model, PROMPTS, sampling=sampling)
    for prompt, completions in zip(PROMPTS, together, strict=True):
        (alone,) = generate(model, [prompt], sampling=sampling)
        assert same(alone, completions)


def test_stop_token_ends_a_completion_and_is_part_of_it(model):
    free = SamplingParams(max_tokens=20, num_samples=4, seed=0)
    stops = tuple(range(0, 64, 8))
    stopped = SamplingParams(max_tokens=20, num_samples=4, seed=0, stop_token_ids=stops)
    reasons = set()
    for before, after in zip(
        generate(model, PROMPTS, sampling=free), generate(model, PROMPTS, sampling=stopped), strict=True
    ):
        for whole, cut in zip(before, after, strict=True):
            ids = whole.token_ids.tolist()
            ends = [i + 1 for i, token in enumerate(ids) if token in stops]
            assert cut.token_ids.tolist() == ids[: ends[0] if ends else 20]
            np.testing.assert_allclose(cut.logprobs, whole.logprobs[: len(cut.logprobs)], atol=1e-5)
            assert whole.finish_reason == "length"
            assert cut.finish_reason == ("stop" if ends else "length")
            reasons.add(cut.finish_reason)
    assert reasons == {"stop", "length"}


def test_cancelled_completions_end_as_abort(model):
    sampling = SamplingParams(max_tokens=10, num_samples=2, seed=3)
    whole = generate(model, PROMPTS, sampling=sampling)
    answers = iter([False] * 4)  # one before the prompts are read, and one before each further token
    cut = generate(model, PROMPTS, sampling=sampling, is_cancelled=lambda: next(answers, True))
    for completion, expected in zip(chain(*cut), chain(*whole), strict=True):
        assert completion.finish_reason == "abort"
        assert completion.token_ids.tolist() == expected.token_ids[:4].tolist()
    unread = generate(model, PROMPTS, sampling=sampling, is_cancelled=lambda: True)
    assert [len(c.token_ids) for c in chain(*unread)] == [0] * 6


def test_max_sequences_bounds_the_batch_without_changing_tokens(model, monkeypatch):
    sampling = SamplingParams(max_tokens=4, num_samples=5, seed=3)
    whole = generate(model, PROMPTS, sampling=sampling)
    batches, decode = [], generate_module._decode

    def count(model, part, *rest):
        batches.append(len(part))
        decode(model, part, *rest)

    monkeypatch.setattr(generate_module, "_decode", count)
    parts = generate(model, PROMPTS, sampling=sampling, max_sequences=7)
    assert batches == [7, 7, 1]
    assert [len(completions) for completions in parts] == [5, 5, 5]
    assert all(same(one, other) for one, other in zip(whole, parts, strict=True))


def test_end_condition_ends_a_completion_as_stop(model):
    sampling = SamplingParams(max_tokens=12, num_samples=2, seed=0)
    free = generate(model, PROMPTS, sampling=sampling)
    seen = []

    def after_four(tokens):
        seen.append(list(tokens))
        return len(tokens) == 4

    firsts = [c.token_ids[:4].tolist() for c in free[0]]
    pair = free[2][0].token_ids[4:6].tolist()
    ended = generate(
        model, PROMPTS, sampling=sampling, ends=[after_four, None, lambda tokens: list(tokens[-2:]) == pair]
    )
    assert [c.token_ids.tolist() for c in ended[0]] == firsts
    assert [c.finish_reason for c in ended[0]] == ["stop", "stop"]
    assert sorted(seen) == sorted(ids[:n] for ids in firsts for n in (1, 2, 3, 4))
    assert same(ended[1], free[1])
    assert [c.finish_reason for c in ended[1]] == ["length", "length"]
    assert (len(ended[2][0].token_ids), ended[2][0].finish_reason) == (6, "stop")


def test_seeds_of_prompts_leave_the_calls_seed_and_the_global_generator_alone(model):
    sampling = SamplingParams(max_tokens=12, num_samples=2, seed=3)
    plain = generate(model, [PROMPTS[1], PROMPTS[1]], sampling=sampling)
    mixed = generate(model, [PROMPTS[1], PROMPTS[0], PROMPTS[1]], sampling=sampling, seeds=[None, 8, None])
    assert same(mixed[0] + mixed[2], plain[0] + plain[1])
    state = torch.random.get_rng_state()
    generate(model, PROMPTS, sampling=SamplingParams(max_tokens=2), seeds=[1, 2, 3])
    assert torch.equal(state, torch.random.get_rng_state())


def test_completions_end_at_the_context_limit_and_carry_the_version(model):
    long = np.arange(120, dtype=np.int32) % 64
    (completion,), (other,) = generate(
        model,
        [long, PROMPTS[0]],
        sampling=SamplingParams(max_tokens=20, seed=0),
        limits=[20, 3],
        policy_version=7,
    )
    assert (len(other.token_ids), other.finish_reason) == (3, "length")
    assert (len(completion.token_ids), completion.finish_reason) == (8, "length")
    assert completion.policy_versions.tolist() == [7] * 8


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (PROMPTS, {"seeds": [1]}, "shorter"),
        ([PROMPTS[0], PROMPTS[0][:0]], {}, "prompt 1 has 0 tokens: must be 1 to 127"),
        ([np.ones(128, dtype=np.int32)], {}, "prompt 0 has 128 tokens: must be 1 to 127"),
    ],
)
def test_invalid_prompt_or_option_is_rejected(model, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        generate(model, prompts, sampling=SamplingParams(max_tokens=4), **options)


@pytest.mark.parametrize("top_k", [0, 3])
def test_prompt_logprobs_equal_a_plain_forward(model, top_k, monkeypatch):
    monkeypatch.setattr("rl.models.generate.CHUNK_TOKENS", 32)
    for prompt in (*PROMPTS, np.arange(128) % 64):
        answer = prompt_logprobs(model, prompt, top_k=top_k)
        assert np.isnan(answer.logprobs[0])
        assert answer.top_ids[0].tolist() == [-1] * top_k
        expected = full_logits(model, prompt)[:-1].detach().log_softmax(-1)
        own = expected.gather(1, torch.from_numpy(prompt[1:, None].astype(np.int64)))
        np.testing.assert_allclose(answer.logprobs[1:], own.squeeze(1).numpy(), atol=1e-5)
        top = expected.topk(top_k)
        np.testing.assert_array_equal(answer.top_ids[1:], top.indices.numpy())
        np.testing.assert_allclose(answer.top_logprobs[1:], top.values.numpy(), atol=1e-5)
        assert [answer.logprobs.dtype.name, answer.top_ids.dtype.name] == ["float32", "int32"]
