from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch

from rl.models.attention import SequenceLayout
from rl.models.generate import generate
from rl.models.logprobs import token_logprobs
from rl.models.qwen3.model import linear_head
from rl.types import SamplingParams

PROMPTS = [np.array(ids, dtype=np.int32) for ids in ([3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9])]


@pytest.fixture(scope="module")
def model(make_model):
    return make_model()


def recomputed(model, prompt, completion, temperature=1.0):
    """Logprobs of the completion's tokens by one forward over the whole sequence."""
    tokens = torch.from_numpy(np.concatenate([prompt, completion.token_ids]).astype(np.int64))
    length = len(tokens) - 1
    head = partial(token_logprobs, targets_T=tokens[1:], temperatures_T=torch.full((length,), temperature))
    layout = SequenceLayout.from_lengths([length])
    with torch.no_grad():
        logprobs, _ = model(tokens[:-1], positions=torch.arange(length), sequences=layout, head=head)
    return logprobs[len(prompt) - 1 :]


def next_logits(model, tokens):
    layout = SequenceLayout.from_lengths([len(tokens)])
    ids = torch.as_tensor(tokens, dtype=torch.int64)
    with torch.no_grad():
        return model(ids, positions=torch.arange(len(tokens)), sequences=layout, head=linear_head)[-1]


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
            expected = recomputed(model, prompt, completion, temperature)
            torch.testing.assert_close(torch.from_numpy(completion.logprobs), expected, atol=1e-5, rtol=1e-5)


def test_returned_logprobs_are_those_of_the_cut_distribution(model):
    sampling = SamplingParams(max_tokens=8, num_samples=4, top_k=3, temperature=1.5, seed=1)
    for prompt, completions in zip(PROMPTS, generate(model, PROMPTS, sampling=sampling), strict=True):
        for completion in completions:
            tokens = list(prompt)
            for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
                kept = (next_logits(model, tokens) / 1.5).topk(3)
                assert token in kept.indices
                expected = kept.values.log_softmax(-1)[kept.indices == token]
                assert logprob == pytest.approx(expected.item(), abs=1e-5)
                tokens.append(token)


def test_tokens_are_drawn_as_often_as_their_probability_says(model):
    sampling = SamplingParams(max_tokens=1, num_samples=20_000, seed=2)
    (completions,) = generate(model, PROMPTS[:1], sampling=sampling)
    counts = np.bincount([c.token_ids[0] for c in completions], minlength=64)
    expected = next_logits(model, PROMPTS[0]).softmax(-1).numpy()
    assert expected.max() < 0.5
    # Five standard deviations of a share among 20,000 draws.
    assert np.all(np.abs(counts / 20_000 - expected) < 5 * np.sqrt(expected / 20_000) + 1e-4)


def test_the_same_seed_draws_the_same_and_another_seed_does_not(model):
    def draw(seed):
        sampling = SamplingParams(max_tokens=12, num_samples=2, seed=seed)
        return [c for of_prompt in generate(model, PROMPTS, sampling=sampling) for c in of_prompt]

    assert same(draw(0), draw(0))
    assert not same(draw(0), draw(1))
    assert not same(draw(None), draw(None))


def test_a_prompts_completions_do_not_depend_on_the_rest_of_the_call(model):
    sampling = SamplingParams(max_tokens=12, num_samples=2, seed=0, stop_token_ids=(7,))
    together = generate(model, PROMPTS, sampling=sampling)
    for prompt, completions in zip(PROMPTS, together, strict=True):
        (alone,) = generate(model, [prompt], sampling=sampling)
        assert same(alone, completions)
    in_parts = generate(model, PROMPTS, sampling=sampling, max_sequences=2)
    assert all(same(a, b) for a, b in zip(in_parts, together, strict=True))


def test_samples_of_one_prompt_differ_even_where_it_comes_twice(model):
    sampling = SamplingParams(max_tokens=12, num_samples=2, seed=0)
    twice = generate(model, [PROMPTS[0], PROMPTS[0]], sampling=sampling)
    assert len({tuple(c.token_ids) for completions in twice for c in completions}) == 4


def test_greedy_takes_the_most_likely_token_at_every_step(model):
    sampling = SamplingParams(max_tokens=10, temperature=0)
    for prompt, (completion,) in zip(PROMPTS, generate(model, PROMPTS, sampling=sampling), strict=True):
        tokens = list(prompt)
        for token in completion.token_ids:
            assert token == next_logits(model, tokens).argmax()
            tokens.append(token)
        expected = recomputed(model, prompt, completion)
        torch.testing.assert_close(torch.from_numpy(completion.logprobs), expected, atol=1e-5, rtol=1e-5)


def test_a_stop_token_ends_a_completion_and_is_part_of_it(model):
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


def test_completions_end_where_the_context_does_and_carry_the_version(model):
    long = np.arange(120, dtype=np.int32) % 64
    sampling = SamplingParams(max_tokens=20, seed=0)
    (at_end,), (free,) = generate(model, [long, PROMPTS[0]], sampling=sampling, policy_version=7)
    assert (len(at_end.token_ids), at_end.finish_reason) == (8, "length")
    assert (len(free.token_ids), free.finish_reason) == (20, "length")
    assert at_end.policy_versions.tolist() == [7] * 8


def test_the_model_is_as_before_afterwards(model):
    cores = [layer.attention.core for layer in model.layers]
    generate(model, PROMPTS, sampling=SamplingParams(max_tokens=2, seed=0))
    with pytest.raises(IndexError):
        generate(model, [np.array([64], dtype=np.int32)], sampling=SamplingParams(max_tokens=2))
    assert all(layer.attention.core is core for layer, core in zip(model.layers, cores, strict=True))


@pytest.mark.parametrize("num_tokens", [0, 128])
def test_a_prompt_that_is_empty_or_fills_the_context_is_refused_by_number(model, num_tokens):
    bad = np.ones(num_tokens, dtype=np.int32)
    with pytest.raises(ValueError, match=f"prompt 1 has {num_tokens} tokens: must be 1 to 127"):
        generate(model, [PROMPTS[0], bad], sampling=SamplingParams(max_tokens=4))


def test_settings_out_of_range_are_refused(model):
    with pytest.raises(ValueError, match=r"sampling\.max_tokens=0: must be at least 1"):
        generate(model, PROMPTS, sampling=SamplingParams(max_tokens=0))


def test_cancelled_completions_end_where_they_are(model):
    sampling = SamplingParams(max_tokens=10, num_samples=2, seed=3)
    whole = generate(model, PROMPTS, sampling=sampling)
    answers = iter([False] * 4)  # one before the prompts are read, and one before each further token
    cut = generate(model, PROMPTS, sampling=sampling, is_cancelled=lambda: next(answers, True))
    for completion, expected in zip(chain(*cut), chain(*whole), strict=True):
        assert completion.finish_reason == "abort"
        assert completion.token_ids.tolist() == expected.token_ids[:4].tolist()
    unread = generate(model, PROMPTS, sampling=sampling, is_cancelled=lambda: True)
    assert [len(c.token_ids) for c in chain(*unread)] == [0] * 6


def first_tokens(completions, count):
    return [c.token_ids[:count].tolist() for c in completions]


def test_requests_of_different_lengths_share_a_batch_and_draw_what_each_draws_alone(model):
    together = generate(
        model,
        PROMPTS,
        sampling=SamplingParams(max_tokens=40, num_samples=2),
        limits=[3, 40, 17],
        seeds=[5, 6, 7],
    )
    for prompt, limit, seed, completions in zip(PROMPTS, [3, 40, 17], [5, 6, 7], together, strict=True):
        sampling = SamplingParams(max_tokens=limit, num_samples=2)
        (alone,) = generate(model, [prompt], sampling=sampling, seeds=[seed])
        assert [len(c.token_ids) for c in completions] == [limit] * 2
        assert {c.finish_reason for c in completions} == {"length"}
        assert same(alone, completions)


def test_a_prompt_with_a_seed_of_its_own_draws_the_same_wherever_and_how_often_it_comes(model):
    sampling = SamplingParams(max_tokens=12, num_samples=2)
    one, two = PROMPTS[0], PROMPTS[1]
    first = generate(model, [one, two, one, one], sampling=sampling, seeds=[4, None, 4, 9])
    second = generate(model, [two, one], sampling=sampling, seeds=[None, 4], max_sequences=2)
    assert same(first[0], first[2])
    assert same(first[0], second[1])
    assert not same(first[0], first[3])
    assert not same(first[1], second[0])  # drawn from the state of PyTorch's generator
    assert not same(first[0][:1], first[0][1:])


def test_prompts_without_a_seed_of_their_own_have_the_calls(model):
    sampling = SamplingParams(max_tokens=12, num_samples=2, seed=3)
    plain = generate(model, [PROMPTS[1], PROMPTS[1]], sampling=sampling)
    mixed = generate(model, [PROMPTS[1], PROMPTS[0], PROMPTS[1]], sampling=sampling, seeds=[None, 8, None])
    assert same(mixed[0], plain[0])
    assert same(mixed[2], plain[1])
    state = torch.random.get_rng_state()
    generate(model, PROMPTS, sampling=SamplingParams(max_tokens=2), seeds=[1, 2, 3])
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_predicate_over_its_tokens_ends_a_completion_with_stop(model):
    sampling = SamplingParams(max_tokens=12, num_samples=2, seed=0)
    free = generate(model, PROMPTS, sampling=sampling)
    seen = []

    def after_four(tokens):
        seen.append(list(tokens))
        return len(tokens) == 4

    pair = free[2][0].token_ids[4:6].tolist()
    ended = generate(
        model, PROMPTS, sampling=sampling, ends=[after_four, None, lambda tokens: list(tokens[-2:]) == pair]
    )
    assert first_tokens(ended[0], 12) == first_tokens(free[0], 4)
    assert [c.finish_reason for c in ended[0]] == ["stop", "stop"]
    assert sorted(seen) == sorted(ids[:n] for ids in first_tokens(free[0], 4) for n in (1, 2, 3, 4))
    assert same(ended[1], free[1])
    assert [c.finish_reason for c in ended[1]] == ["length", "length"]
    assert (len(ended[2][0].token_ids), ended[2][0].finish_reason) == (6, "stop")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"limits": [1, 2]}, "limits has 2 entries for 3 prompts"),
        ({"seeds": [1]}, "seeds has 1 entries for 3 prompts"),
        ({"ends": []}, "ends has 0 entries for 3 prompts"),
        ({"limits": [1, 0, 2]}, r"limits\[1\]=0: must be 1 to 4, which is sampling.max_tokens"),
        ({"limits": [1, 4, 5]}, r"limits\[2\]=5: must be 1 to 4, which is sampling.max_tokens"),
    ],
)
def test_what_is_asked_of_single_prompts_is_checked(model, options, says):
    with pytest.raises(ValueError, match=says):
        generate(model, PROMPTS, sampling=SamplingParams(max_tokens=4), **options)
