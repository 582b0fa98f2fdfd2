"""A mixture of experts in vLLM on one rank and on two equals the trainer's model."""

import numpy as np
import pytest

from rl.models.generate import generate
from tests.actors.moe_ranks import PROMPTS, SAMPLING, SPEC, live
from tests.support.distributed import run_ranks
from tests.support.policies import random_model, recomputed_logprobs, tokens_of

pytestmark = [pytest.mark.medium, pytest.mark.timeout(240)]

OLD, NEW = random_model(SPEC, seed=0), random_model(SPEC, seed=1)


@pytest.fixture(scope="module")
def ranks_of(tmp_path_factory):
    """Results of each rank, by number of ranks; a single rank reads its first weights from a folder."""
    folders = {size: str(tmp_path_factory.mktemp("ranks")) for size in (1, 2)}
    return {1: [live(folders[1])], 2: run_ranks(live, 2, folders[2], timeout_s=110)}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_tokens_and_logprobs_equal_those_of_the_trainers_model(ranks_of, num_ranks):
    lived = ranks_of[num_ranks][0]
    for model, completions in ((OLD, lived.first), (NEW, lived.second)):
        assert tokens_of(completions) == tokens_of(generate(model, PROMPTS, sampling=SAMPLING))
        differences = np.concatenate(
            [
                completion.logprobs - recomputed_logprobs(model, prompt, completion, SAMPLING)
                for prompt, of_prompt in zip(PROMPTS, completions, strict=True)
                for completion in of_prompt
            ]
        )
        assert differences.shape == (len(PROMPTS) * 3 * 31,)
        assert np.abs(differences).mean() <= 1e-5


def test_two_ranks_hold_a_part_of_every_expert_and_the_whole_router(ranks_of):
    (one,) = ranks_of[1]
    assert one.placements == {}
    for rank in ranks_of[2]:
        assert rank.placements == {"experts.gate_up_proj": "S(1)", "experts.down_proj": "S(2)"}
    assert ranks_of[2][1].first == []
