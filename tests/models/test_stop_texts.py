"""Texts that end a completion are found where they end, also where tokens are parts of letters."""

import numpy as np
import pytest

from rl.models.generate import generate
from rl.models.sampling import check_sampling
from rl.models.stop_texts import spells_any
from rl.models.tokenizer import build_byte_tokenizer
from rl.rollouts.tokenizer import open_tokenizer
from rl.types import SamplingParams
from tests.support.policies import random_model, small_spec


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
def test_a_completion_ends_with_the_token_that_completes_a_text(tokenizer, texts, said, ends_at):
    tokens = tokenizer.encode(said, add_special_tokens=False)
    ends = [n for n in range(1, len(tokens) + 1) if spells_any(texts, tokens[:n], tokenizer=tokenizer)]
    assert (ends[0] if ends else None) == ends_at


def test_what_cannot_end_a_completion_is_refused():
    with pytest.raises(ValueError, match=r"stop_texts=.*: must be texts that are not empty"):
        check_sampling(SamplingParams(max_tokens=1, stop_texts=("a", "")))
    with pytest.raises(ValueError, match=r"stop_texts=\('a',\): must be \(\), give `ends` instead"):
        generate(
            random_model(small_spec(), seed=0),
            [np.array([1, 2])],
            sampling=SamplingParams(max_tokens=1, stop_texts=("a",)),
        )
