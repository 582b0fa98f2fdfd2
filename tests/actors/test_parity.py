import numpy as np
import pytest

from actors.cluster.parity import LogprobParityError, ParityText, make_parity_text
from actors.config import ParityConfig
from rl.tasks.sum_digits import make_problem
from tests.support.fakes import RENDERER, prompt_of

EXPECTED = np.array([0.0, -1.0, -2.0, -0.5], dtype=np.float32)


def check(found: dict[str, np.ndarray], max_diff: float = 1e-3) -> float:
    text = ParityText(token_ids=np.array([5, 6, 7, 8], dtype=np.int32), max_diff=max_diff)
    return text.check(policy_version=7, expected_T=EXPECTED, of_generators=found)


def test_first_token_is_ignored_and_the_worst_generator_reported():
    near = EXPECTED + np.array([9.0, 3e-4, 0.0, 0.0], dtype=np.float32)
    assert check({"generator_0": EXPECTED, "generator_1": near}) == pytest.approx(1e-4, rel=1e-2)


@pytest.mark.parametrize(
    ("found", "max_diff", "says"),
    [
        (
            [0.0, -1.0, -1.75, -0.5],
            1e-3,
            r"version 7 generator_1 differs .* by 0\.0833 nats .* than 0\.001 ",
        ),
        ([0.0, np.nan, -2.0, -0.5], 1e9, "nan"),
        (np.nextafter(EXPECTED, np.float32(1)), 0.0, "generator_1 differs"),
    ],
)
def test_differing_generator_is_named_with_version_and_token(found, max_diff, says):
    assert check({"generator_0": EXPECTED}, max_diff=0.0) == 0.0
    with pytest.raises(LogprobParityError, match=says):
        check(
            {"generator_0": EXPECTED, "generator_1": np.array(found, dtype=np.float32)},
            max_diff=max_diff,
        )


def test_text_is_a_prompt_and_answer_and_the_bound_is_that_of_the_coarser_dtype():
    problem = make_problem([12, 34])
    made = make_parity_text(
        ParityConfig(num_tokens=4),
        prompt=prompt_of(problem),
        renderer=RENDERER,
        dtypes=("float32", "bfloat16"),
        max_tokens=64,
    )
    assert made is not None
    text = f"<{problem.question}>{problem.demonstration or problem.answer}"
    assert bytes(made.token_ids.tolist()).decode() == text[-4:]
    assert made.max_diff == 0.1
    assert made.sample.token_ids.tolist() == made.token_ids.tolist()


def test_parity_check_can_be_disabled():
    off = ParityConfig(enable=False)
    prompt = prompt_of(make_problem([12, 34]))
    assert (
        make_parity_text(off, prompt=prompt, renderer=RENDERER, dtypes=("float32",), max_tokens=64)
        is None
    )
