from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch

from rl.models.files.tokenizer import build_byte_tokenizer, open_tokenizer
from rl.models.generate import build_requests, complete, generate, prompt_logprobs
from rl.models.sampling import draw, draw_uniforms, process_logits, request_seeds, spells_any
from rl.types import SamplingParams
from tests.support.policies import full_logits, random_model, recomputed_logprobs, small_spec

PROMPTS = [
    np.array(ids, dtype=np.int32) for ids in ([3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9])
]


@pytest.fixture(scope="module")
def model():
    return random_model(small_spec(max_positions=128), seed=0)


def same(a, b):
    return len(a) == len(b) and all(
        np.array_equal(x.token_ids, y.token_ids) for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_those_of_a_forward_over_the_whole_sequence(model, temperature):
    sampling = SamplingParams(max_tokens=30, num_samples=3, temperature=temperature, seed=0)
    for prompt, completions in zip(
        PROMPTS, generate(model, PROMPTS, sampling=sampling), strict=True
    ):
        for completion in completions:
            assert len(completion.token_ids) == 30
            expected = recomputed_logprobs(model, prompt, completion, sampling)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("limit", [0, 10**6])
def test_sampling_past_a_window_equals_a_forward_over_the_whole_sequence(limit, monkeypatch):
    monkeypatch.setattr("rl.models.layers.attention.MAX_PADDED_KEYS", limit)
    model = random_model(
        small_spec(family="gemma3_text", switches={"window": 7, "global_layers": (1,)}), seed=0
    )
    sampling = SamplingParams(max_tokens=20, num_samples=2, seed=0)
    for prompt, completions in zip(
        PROMPTS, generate(model, PROMPTS, sampling=sampling), strict=True
    ):
        for completion in completions:
            expected = recomputed_logprobs(model, prompt, completion, sampling)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=1e-5)


def test_stop_token_ends_a_completion_and_is_part_of_it(model):
    free = SamplingParams(max_tokens=20, num_samples=4, seed=0)
    stops = tuple(range(0, 64, 8))
    stopped = SamplingParams(max_tokens=20, num_samples=4, seed=0, stop_token_ids=stops)
    reasons = set()
    for before, after in zip(
        generate(model, PROMPTS, sampling=free),
        generate(model, PROMPTS, sampling=stopped),
        strict=True,
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
    answers = iter(
        [False] * 4
    )  # one before the prompts are read, and one before each further token
    requests = build_requests(PROMPTS, sampling=sampling, context=128, ends=lambda tokens: False)
    cut = complete(model, requests, sampling=sampling, is_cancelled=lambda: next(answers, True))
    for completion, expected in zip(cut, chain(*whole), strict=True):
        assert completion.finish_reason == "abort"
        assert completion.token_ids.tolist() == expected.token_ids[:4].tolist()
    unread = complete(model, requests, sampling=sampling, is_cancelled=lambda: True)
    assert [len(c.token_ids) for c in unread] == [0] * 6


def test_max_sequences_bounds_the_batch_without_changing_tokens(model):
    sampling = SamplingParams(max_tokens=4, num_samples=5, seed=3)
    whole = generate(model, PROMPTS, sampling=sampling)
    widths = []
    hook = model.layers[0].register_forward_hook(lambda *call: widths.append(call[1][3].num_tokens))
    parts = generate(model, PROMPTS, sampling=sampling, max_sequences=7)
    hook.remove()
    # The prompts of each batch, then its sequences.
    assert widths == [6, 7, 7, 7, 10, 7, 7, 7, 9, 1, 1, 1]
    assert all(same(one, other) for one, other in zip(whole, parts, strict=True))


def test_completion_depends_on_its_own_request_alone(model):
    sampling = SamplingParams(max_tokens=20, num_samples=2, seed=0)
    long = np.arange(120, dtype=np.int32) % 64
    seen = []

    def after_four(tokens):
        seen.append(list(tokens))
        return len(tokens) == 4

    state = torch.random.get_rng_state()
    first, _, second, *filling = build_requests(
        [PROMPTS[0], PROMPTS[2], long], sampling=sampling, context=128, ends=lambda tokens: False
    )
    assert torch.equal(state, torch.random.get_rng_state())
    requests = [replace(first, ends=after_four), replace(second, max_tokens=3), filling[-1]]
    ended, short, full = complete(model, requests, sampling=sampling, policy_version=7)
    free = generate(model, [PROMPTS[0], PROMPTS[2]], sampling=sampling)
    assert ended.token_ids.tolist() == free[0][0].token_ids[:4].tolist()
    assert seen == [ended.token_ids[:n].tolist() for n in (1, 2, 3, 4)]
    assert short.token_ids.tolist() == free[1][0].token_ids[:3].tolist()
    assert [c.finish_reason for c in (ended, short, full)] == ["stop", "length", "length"]
    # The context holds 128 tokens.
    assert full.policy_versions.tolist() == [7] * 8


@pytest.mark.parametrize("length", [0, 128])
def test_prompt_that_is_empty_or_fills_the_context_is_rejected(model, length):
    with pytest.raises(ValueError, match=f"prompt 1 has {length} tokens: must be 1 to 127"):
        generate(
            model, [PROMPTS[0], np.ones(length, np.int32)], sampling=SamplingParams(max_tokens=4)
        )


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


def test_top_k_and_top_p_cut_and_renormalise():
    logits = torch.tensor([[0.15, 0.5, 0.1, 0.25]]).log()

    def probabilities(**settings):
        return process_logits(logits, SamplingParams(max_tokens=1, **settings)).exp()[0].tolist()

    assert probabilities() == pytest.approx([0.15, 0.5, 0.1, 0.25])
    assert probabilities(top_k=2) == pytest.approx([0, 2 / 3, 0, 1 / 3])
    assert probabilities(top_k=9) == pytest.approx([0.15, 0.5, 0.1, 0.25])
    # 0.5 + 0.25 is the least that reaches 0.7; 0.5 alone reaches 0.4.
    assert probabilities(top_p=0.7) == pytest.approx([0, 2 / 3, 0, 1 / 3])
    assert probabilities(top_p=0.4) == pytest.approx([0, 1, 0, 0])
    assert probabilities(top_p=1e-9) == pytest.approx([0, 1, 0, 0])
    # top-p applies after top-k: 2/3 reaches 0.6 alone.
    assert probabilities(top_k=2, top_p=0.6) == pytest.approx([0, 1, 0, 0])
    # At temperature 0.5 the probabilities are squared: 225, 2500, 100 and 625 of 3450.
    assert probabilities(temperature=0.5) == pytest.approx(
        [225 / 3450, 2500 / 3450, 100 / 3450, 625 / 3450]
    )
    assert probabilities(temperature=0.5, top_p=0.8) == pytest.approx([0, 0.8, 0, 0.2])
    assert probabilities(temperature=0) == pytest.approx([0.15, 0.5, 0.1, 0.25])


def test_draw_inverts_the_cumulative_distribution():
    logprobs = torch.tensor([0, 0.25, 0, 0.75, 0]).log().expand(5, 5)
    points = torch.tensor([0, 0.2499, 0.2501, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw(logprobs, points).tolist() == [1, 1, 3, 3, 3]


@pytest.mark.parametrize("vocab_size", [1000, 1024, 49_152])
def test_draw_finds_the_token_in_its_block(vocab_size):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, vocab_size, generator=generator) * 3
    logits[torch.rand(64, vocab_size, generator=generator) < 0.9] = -torch.inf
    logits[:8] += torch.arange(vocab_size) * (
        20 / vocab_size
    )  # most of the weight lies in the last block
    logprobs = logits.log_softmax(-1)
    points = torch.rand(64, generator=generator, dtype=torch.float64)
    tokens = draw(logprobs, points)
    cumulative = logprobs.double().exp().cumsum(-1)
    share = points * cumulative[:, -1]
    rows = torch.arange(64)
    before = cumulative[rows, tokens] - logprobs.double().exp()[rows, tokens]
    assert ((before - 1e-6 <= share) & (share <= cumulative[rows, tokens] + 1e-6)).all()
    assert (logits[rows, tokens] > -torch.inf).all()
    edges = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert (logits[:2].gather(1, draw(logprobs[:2], edges).unsqueeze(1)) > -torch.inf).all()


def test_seeds_depend_on_the_prompt_but_not_on_its_position():
    a, b = np.array([1, 2], dtype=np.int32), np.array([3], dtype=np.int32)
    of_a, of_b = request_seeds([a, b], seed=0, num_samples=2)
    assert request_seeds([b, a], seed=0, num_samples=2) == [of_b, of_a]
    # The integer type does not change the seeds.
    assert request_seeds([a.astype(np.int64)], seed=0, num_samples=3)[0][:2] == of_a
    twice = request_seeds([a, a], seed=0, num_samples=2)
    assert twice[0] == of_a
    assert len({*twice[0], *twice[1], *of_b, *request_seeds([a], seed=1, num_samples=2)[0]}) == 8


def test_first_uniforms_do_not_depend_on_the_count():
    assert torch.equal(draw_uniforms(5, 4), draw_uniforms(5, 40)[:4])
    assert not torch.equal(draw_uniforms(5, 4), draw_uniforms(6, 4))
    assert 0.45 < draw_uniforms(0, 10_000).mean() < 0.55


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    build_byte_tokenizer(folder)
    return open_tokenizer(folder)[0]


@pytest.mark.parametrize(
    ("texts", "said", "ends_at"),
    [
        (("stop",), "do not stop here", len("do not stop")),
        (("here", "not"), "do not stop here", len("do not")),
        (("ß",), "a groß b", len("a groß".encode())),
        (("\n\nUser:",), "x\nUser: \n\nUser: y", len("x\nUser: \n\nUser:")),
        (("never",), "do not stop here", None),
        ((), "do not stop here", None),
    ],
    ids=repr,
)
def test_completion_ends_with_the_token_that_completes_a_stop_text(tokenizer, texts, said, ends_at):
    tokens = tokenizer.encode(said, add_special_tokens=False)
    ends = [
        n for n in range(1, len(tokens) + 1) if spells_any(texts, tokens[:n], tokenizer=tokenizer)
    ]
    assert (ends[0] if ends else None) == ends_at
