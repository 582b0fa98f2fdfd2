import numpy as np
import pytest
import torch

from rl.models.attention import SequenceLayout
from rl.models.generate import generate
from rl.models.prompt_logprobs import prompt_logprobs
from rl.models.qwen3.model import linear_head
from rl.types import SamplingParams

PROMPTS = [
    np.array(ids, dtype=np.int32)
    for ids in ([3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9], [7, 7], list(range(40)))
]


@pytest.fixture(scope="module")
def model(make_model):
    return make_model()


@torch.no_grad()
def of_plain_forward(model, prompt):
    """[N - 1, V], of the whole prompt alone."""
    ids = torch.from_numpy(prompt.astype(np.int64))
    length = len(ids)
    layout = SequenceLayout.from_lengths([length])
    logits = model(ids, positions=torch.arange(length), sequences=layout, head=linear_head)
    return logits.log_softmax(-1)[:-1]


def assert_are_those_of_a_plain_forward(model, prompts, answers, *, top_k):
    for prompt, answer in zip(prompts, answers, strict=True):
        assert np.isnan(answer.logprobs[0])
        assert answer.top_ids[0].tolist() == [-1] * top_k
        assert np.isnan(answer.top_logprobs[0]).all()
        expected = of_plain_forward(model, prompt)
        targets = torch.from_numpy(prompt[1:].astype(np.int64))
        own = expected[torch.arange(len(targets)), targets]
        np.testing.assert_allclose(answer.logprobs[1:], own.numpy(), atol=1e-5)
        top = expected.topk(top_k)
        np.testing.assert_array_equal(answer.top_ids[1:], top.indices.numpy())
        np.testing.assert_allclose(answer.top_logprobs[1:], top.values.numpy(), atol=1e-5)
        assert (answer.logprobs.dtype, answer.top_logprobs.dtype) == (np.float32, np.float32)
        assert answer.top_ids.dtype == np.int32


@pytest.mark.parametrize("top_k", [0, 3, 64])
def test_logprobs_and_likeliest_tokens_are_those_of_a_plain_forward(model, top_k):
    answers = prompt_logprobs(model, PROMPTS, top_k=top_k)
    assert [len(a.logprobs) for a in answers] == [5, 1, 9, 2, 40]
    assert_are_those_of_a_plain_forward(model, PROMPTS, answers, top_k=top_k)


@pytest.mark.parametrize(("max_tokens", "chunk_tokens"), [(1, 1), (12, 40), (1000, 32)])
def test_neither_packing_nor_chunks_change_a_number(model, max_tokens, chunk_tokens):
    answers = prompt_logprobs(model, PROMPTS, top_k=2, max_tokens=max_tokens, chunk_tokens=chunk_tokens)
    assert_are_those_of_a_plain_forward(model, PROMPTS, answers, top_k=2)


def test_logprobs_of_a_completion_are_those_it_was_sampled_with(model):
    sampling = SamplingParams(max_tokens=20, seed=0)
    completions = [group[0] for group in generate(model, PROMPTS, sampling=sampling)]
    whole = [np.concatenate((p, c.token_ids)) for p, c in zip(PROMPTS, completions, strict=True)]
    for prompt, completion, answer in zip(PROMPTS, completions, prompt_logprobs(model, whole), strict=True):
        np.testing.assert_allclose(answer.logprobs[len(prompt) :], completion.logprobs, atol=1e-5)


def test_a_prompt_may_fill_the_context_and_one_token_alone_is_answered(model):
    full = np.arange(128, dtype=np.int32) % 64
    (answer,) = prompt_logprobs(model, [full], top_k=1)
    assert_are_those_of_a_plain_forward(model, [full], [answer], top_k=1)
    (alone,) = prompt_logprobs(model, [PROMPTS[1]], top_k=2)
    assert (alone.logprobs.shape, alone.top_ids.shape, alone.top_logprobs.shape) == ((1,), (1, 2), (1, 2))
    assert prompt_logprobs(model, []) == []


def test_once_cancelled_no_further_forward_is_made(model):
    answers = iter([False, False, True])
    some = prompt_logprobs(model, PROMPTS, max_tokens=1, is_cancelled=lambda: next(answers))
    assert [len(a.logprobs) for a in some] == [5, 1]


@pytest.mark.parametrize(
    ("prompts", "options", "says"),
    [
        ([PROMPTS[0], np.zeros(0, dtype=np.int32)], {}, "prompt 1 has 0 tokens: must be 1 to 128"),
        ([np.zeros(129, dtype=np.int32)], {}, "prompt 0 has 129 tokens: must be 1 to 128"),
        (PROMPTS, {"top_k": 65}, "top_k=65: must be 0 to 64, the vocabulary"),
        (PROMPTS, {"top_k": -1}, "top_k=-1: must be 0 to 64"),
        (PROMPTS, {"chunk_tokens": 0}, "chunk_tokens=0: must be at least 1"),
        (PROMPTS, {"max_tokens": 0}, "max_tokens=0: must be at least 1"),
    ],
)
def test_what_cannot_be_answered_is_refused(model, prompts, options, says):
    with pytest.raises(ValueError, match=says):
        prompt_logprobs(model, prompts, **options)
