"""What samplers of the local backend answer: ends, seeds, distributions, prompts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from rl.tinker.errors import InvalidRequestError
from rl.tinker.local.base import Base
from rl.tinker.local.models import SamplerWeights
from rl.tinker.local.requests import Ask, answer, check_request
from rl.tinker.messages import SampleOutput, SampleRequest, Sampling, TopLogprobs
from tests.tinker.local.data_parts import datum, random_data
from tests.tinker.local.local_parts import CROSS_ENTROPY, make_model, open_base, request, train

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return open_base(tmp_path_factory.mktemp("base") / "tied")


@pytest.fixture(scope="module")
def weights(base: Base) -> SamplerWeights:
    return SamplerWeights(base=base, lora=None, trained={})


def answers(weights: SamplerWeights, *requests: SampleRequest, max_sequences: int = 8) -> list[SampleOutput]:
    group = [Ask(weights=weights, request=one) for one in requests]
    return answer(group, max_sequences=max_sequences, is_closed=lambda: False)


def of_prompt(output: SampleOutput) -> np.ndarray:
    assert output.prompt_logprobs is not None
    return output.prompt_logprobs


def likeliest(output: SampleOutput) -> TopLogprobs:
    assert output.topk_prompt_logprobs is not None
    return output.topk_prompt_logprobs


def tokens(weights: SamplerWeights, **how: Any) -> list[int]:
    (found,) = answers(weights, request(PROMPT, **how))
    return found.sequences[0].tokens.tolist()


def test_a_completion_ends_with_a_stop_token_which_it_has(weights):
    free = tokens(weights, stop=(), max_tokens=20)
    assert len(free) == 20
    place = next(i for i, token in enumerate(free) if token not in free[:i] and i >= 3)
    (found,) = answers(weights, request(PROMPT, stop=(free[place], 319), max_tokens=20))
    assert found.sequences[0].tokens.tolist() == free[: place + 1]
    assert found.sequences[0].stop_reason == "stop"
    assert len(found.sequences[0].logprobs) == place + 1


def test_without_a_limit_a_completion_goes_as_far_as_the_context(weights):
    (found,) = answers(weights, request(PROMPT, stop=(), max_tokens=None))
    assert len(found.sequences[0].tokens) == 64 - len(PROMPT)
    assert found.sequences[0].stop_reason == "length"
    assert len(tokens(weights, stop=(), max_tokens=1000)) == 64 - len(PROMPT)


def bytes_first(base: Base, said: bytes) -> SamplerWeights:
    """A sampler whose greedy completions begin with these bytes after PROMPT: overfitted to them."""
    model = make_model(base, 0)
    continued = [*PROMPT, *said]
    data = [datum(continued[:-1], continued[1:])]
    train(model, data, steps=40)
    return model.snapshot()


@pytest.fixture(scope="module")
def says(base: Base) -> SamplerWeights:
    return bytes_first(base, "naïve: end.Q and on".encode())


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ((": end",), "naïve: end"),
        (("ï",), "naï"),
        (("end.Q", "zzz"), "naïve: end.Q"),
        (("Q", "end"), "naïve: end"),
        (("nai",), "naïve: end.Q and on"),
    ],
)
def test_a_text_ends_a_completion_wherever_its_tokens_are_cut(says, stop, expected):
    num_tokens = len("naïve: end.Q and on".encode())
    (found,) = answers(says, request(PROMPT, temperature=0.0, stop=stop, max_tokens=num_tokens))
    assert bytes(found.sequences[0].tokens.tolist()).decode() == expected
    assert found.sequences[0].stop_reason == ("length" if expected.endswith("on") else "stop")


def test_the_tokenizers_end_of_text_ends_a_completion_unless_the_stops_say_otherwise(base):
    end = base.stop_token_ids[-1]
    model = make_model(base, 0)
    continued = [*PROMPT, 65, end, 66, 67]
    train(model, [datum(continued[:-1], continued[1:])], steps=40)
    ending = model.snapshot()
    assert tokens(ending, temperature=0.0, max_tokens=4) == [65, end]
    assert tokens(ending, temperature=0.0, max_tokens=4, stop=()) == [65, end, 66, 67]
    assert tokens(ending, temperature=0.0, max_tokens=4, stop=(66,)) == [65, end, 66]


def test_a_seed_gives_the_same_tokens_whatever_else_is_asked(weights):
    one = request(PROMPT, seed=11, num_samples=3)
    (alone,) = answers(weights, one)
    others = [request([9, 9], seed=4, num_samples=3, max_tokens=20), request(PROMPT, seed=12, num_samples=3)]
    first, between, last, again = answers(weights, others[0], one, others[1], one)
    sampled = [sequence.tokens.tolist() for sequence in alone.sequences]
    assert (
        sampled
        == [s.tokens.tolist() for s in between.sequences]
        == [s.tokens.tolist() for s in again.sequences]
    )
    assert len({tuple(s) for s in sampled}) == 3
    assert sampled != [s.tokens.tolist() for s in last.sequences]
    assert all(len(s.tokens) <= 20 for s in first.sequences)


def test_without_a_seed_every_answer_is_drawn_anew(weights):
    torch.manual_seed(0)
    first = tokens(weights, seed=None, max_tokens=20)
    torch.manual_seed(0)
    assert tokens(weights, seed=None, max_tokens=20) != first


def test_greedy_top_k_and_top_p_narrow_what_is_drawn(weights):
    greedy = tokens(weights, temperature=0.0, stop=(), seed=1)
    assert greedy == tokens(weights, temperature=0.0, stop=(), seed=2)
    assert greedy == tokens(weights, top_k=1, stop=()) == tokens(weights, top_p=1e-6, stop=())
    assert greedy != tokens(weights, top_k=0, stop=()) == tokens(weights, top_k=-1, stop=())


def test_logprobs_are_those_of_the_distribution_that_is_drawn_from(base):
    model = make_model(base, 0)
    (found,) = answers(model.snapshot(), request(PROMPT, max_tokens=6, stop=()))
    (cold,) = answers(model.snapshot(), request(PROMPT, max_tokens=6, stop=(), temperature=0.01))
    drawn = found.sequences[0]
    whole = [*PROMPT, *drawn.tokens.tolist()]
    one = datum(whole[:-1], whole[1:])
    (logprobs,) = model.forward_backward([one], CROSS_ENTROPY, backward=False).logprobs
    np.testing.assert_allclose(drawn.logprobs, logprobs[len(PROMPT) - 1 :], atol=1e-5)
    assert cold.sequences[0].logprobs.min() > -0.7


def test_a_prompts_logprobs_are_those_of_training(base):
    model = make_model(base, 4)
    train(model, random_data(3, seed=2))
    prompts = [[5, 6, 7, 300], [9]]
    asked = [request(p, topk=2, prompt_logprobs=True) for p in prompts]
    (long, short, plain) = answers(model.snapshot(), *asked, request([5, 6]))
    (logprobs,) = model.forward_backward(
        [datum([5, 6, 7], [6, 7, 300])], CROSS_ENTROPY, backward=False
    ).logprobs
    assert math.isnan(of_prompt(long)[0])
    np.testing.assert_allclose(of_prompt(long)[1:], logprobs, atol=1e-5)
    every = datum([5, 6, 7], [list(range(320))] * 3)
    (all_logprobs,) = model.forward_backward([every], CROSS_ENTROPY, backward=False).logprobs
    top = likeliest(long)
    assert top.token_ids[0].tolist() == [-1, -1]
    assert np.isnan(top.logprobs[0]).all()
    assert top.token_ids[1:].tolist() == np.argsort(-all_logprobs, axis=1)[:, :2].tolist()
    np.testing.assert_allclose(top.logprobs[1:], -np.sort(-all_logprobs, axis=1)[:, :2], atol=1e-5)
    assert of_prompt(short).shape == (1,)
    assert plain.prompt_logprobs is None
    assert plain.topk_prompt_logprobs is None


def test_each_request_of_a_group_gets_as_many_likeliest_tokens_as_it_asked_for(weights):
    none, one, three = answers(weights, *(request(PROMPT, topk=k, prompt_logprobs=k < 3) for k in (0, 1, 3)))
    assert none.topk_prompt_logprobs is None
    assert three.prompt_logprobs is None
    assert likeliest(one).token_ids.shape == (3, 1)
    assert likeliest(three).token_ids.shape == (3, 3)
    assert (likeliest(three).token_ids[:, :1] == likeliest(one).token_ids).all()


def test_no_answer_holds_the_likeliest_tokens_that_another_asked_for(weights):
    found = [likeliest(output) for output in answers(weights, *(request(PROMPT, topk=k) for k in (1, 300)))]
    assert [top.token_ids.shape[1] for top in found] == [1, 300]
    assert all(array.base is None for top in found for array in (top.token_ids, top.logprobs))


def test_a_prompt_that_fills_the_context_has_logprobs_and_empty_completions(weights):
    full = list(range(64))
    filled, other = answers(
        weights,
        request(full, prompt_logprobs=True, num_samples=2),
        request(PROMPT, num_samples=2, stop=()),
    )
    assert np.isfinite(of_prompt(filled)[1:]).all()
    assert [(len(s.tokens), s.stop_reason) for s in filled.sequences] == [(0, "length")] * 2
    assert [len(s.tokens) for s in other.sequences] == [8, 8]


def test_a_cancelled_request_lets_the_others_of_its_group_end_as_they_would(weights):
    stays = request(PROMPT, seed=1, max_tokens=20, stop=())
    leaves = Ask(weights=weights, request=request([9, 9], seed=2, max_tokens=60, stop=()))
    leaves.cancelled.set()
    found = answer([leaves, Ask(weights=weights, request=stays)], max_sequences=8, is_closed=lambda: False)
    assert len(found[0].sequences[0].tokens) <= 1
    assert found[1].sequences[0].tokens.tolist() == tokens(weights, seed=1, max_tokens=20, stop=())


def test_all_ends_at_the_next_token_when_the_backend_is_closed(weights):
    asked: list[int] = []

    def is_closed() -> bool:
        asked.append(1)
        return len(asked) > 5

    ask = Ask(weights=weights, request=request(PROMPT, max_tokens=60, stop=()))
    (found,) = answer([ask], max_sequences=8, is_closed=is_closed)
    assert 1 <= len(found.sequences[0].tokens) <= 6


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt": []}, "prompt: has 0 tokens: must be 1 to 63"),
        ({"prompt": [1] * 64}, "prompt: has 64 tokens: must be 1 to 63; the model's context has 64"),
        ({"prompt": [1] * 65, "prompt_logprobs": True}, "prompt: has 65 tokens: must be 1 to 64"),
        ({"prompt": [1, 320]}, "prompt: has token id 320: must be 0 to 319"),
        ({"prompt": [-1]}, "prompt: has token id -1: must be 0 to 319"),
        ({"num_samples": 0}, "num_samples=0: must be at least 1"),
        ({"topk": 321}, "topk_prompt_logprobs=321: must be 0 to 320"),
        ({"max_tokens": 0}, "sampling_params.max_tokens=0: must be at least 1"),
        (
            {"temperature": -0.1},
            "sampling_params.temperature=-0.1: must be 0 (greedy), or a finite number of",
        ),
        ({"temperature": 1e-40}, "sampling_params.temperature=1e-40: must be 0 (greedy), or a finite"),
        (
            {"temperature": math.nan},
            "sampling_params.temperature=nan: must be 0 (greedy), or a finite number",
        ),
        ({"top_p": 0.0}, "sampling_params.top_p=0.0: must be above 0, at most 1"),
        ({"top_k": -2}, "sampling_params.top_k=-2: must be at least 1, or -1 or 0 for all"),
        ({"stop": ("a", 1)}, "sampling_params.stop=('a', 1): must be all texts or all token ids"),
        ({"stop": ("a", "")}, "sampling_params.stop: has an empty text"),
        ({"stop": (1, 320)}, "sampling_params.stop: has token id 320: must be 0 to 319"),
    ],
)
def test_a_request_that_cannot_be_is_refused_by_field_and_value(base, change, says):
    asked = request(**({"prompt": PROMPT} | change))
    with pytest.raises(InvalidRequestError) as error:
        check_request(base, asked)
    assert says in str(error.value)


def test_the_lowest_temperature_takes_the_likeliest_tokens(weights):
    how = {"max_tokens": 6}
    assert tokens(weights, temperature=1e-30, **how) == tokens(weights, temperature=0.0, **how)


def test_what_can_be_asked_is(base):
    for asked in (
        request(PROMPT, seed=-5, stop=None, top_k=0, max_tokens=None),
        request([1] * 64, prompt_logprobs=True),
        SampleRequest(prompt=np.array([0, 319]), sampling=Sampling(stop=("x",), temperature=0.0, top_k=1000)),
    ):
        check_request(base, asked)
