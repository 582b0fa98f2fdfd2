import numpy as np
import pytest
import torch

from rl.models.sampling import draw, processed_logprobs, request_seeds, spells_any, uniforms
from rl.models.tokenizer import build_byte_tokenizer, open_tokenizer
from rl.types import SamplingParams


def test_top_k_and_top_p_cut_and_renormalise():
    logits = torch.tensor([[0.15, 0.5, 0.1, 0.25]]).log()

    def probabilities(**settings):
        return processed_logprobs(logits, SamplingParams(max_tokens=1, **settings)).exp()[0].tolist()

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
    assert probabilities(temperature=0.5) == pytest.approx([225 / 3450, 2500 / 3450, 100 / 3450, 625 / 3450])
    assert probabilities(temperature=0.5, top_p=0.8) == pytest.approx([0, 0.8, 0, 0.2])
    assert probabilities(temperature=0) == pytest.approx([0.15, 0.5, 0.1, 0.25])


def test_draw_inverts_the_cumulative_distribution():
    logprobs = torch.tensor([0, 0.25, 0, 0.75, 0]).log().expand(5, 5)
    points = torch.tensor([0, 0.2499, 0.2501, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw(logprobs, points).tolist() == [1, 1, 3, 3, 3]


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
    assert torch.equal(uniforms(5, 4), uniforms(5, 40)[:4])
    assert not torch.equal(uniforms(5, 4), uniforms(6, 4))
    assert 0.45 < uniforms(0, 10_000).mean() < 0.55


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
    ends = [n for n in range(1, len(tokens) + 1) if spells_any(texts, tokens[:n], tokenizer=tokenizer)]
    assert (ends[0] if ends else None) == ends_at
