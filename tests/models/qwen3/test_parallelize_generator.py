import numpy as np
import pytest
import torch

from rl.models.qwen3.parallelize_generator import generator_head, parallelize_qwen3_generator
from tests.models.qwen3.generator_ranks import compute
from tests.support.distributed import run_ranks
from tests.support.policies import random_model, small_spec


class MeshOfSize:
    """All that is asked of a mesh before anything is sharded."""

    def __init__(self, size):
        self._size = size

    def size(self):
        return self._size


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(compute, 2, timeout_s=50)


@pytest.mark.parametrize("tie", [True, False])
def test_two_ranks_compute_what_one_does_for_an_odd_number_of_tokens(ranks, tie):
    for rank in ranks:
        np.testing.assert_allclose(rank[tie]["sharded"], rank[tie]["whole"], atol=2e-5, rtol=0)
        assert np.abs(rank[tie]["whole"]).max() > 3
    # Ranks draw tokens from these: they must be the same bits.
    assert np.array_equal(ranks[0][tie]["sharded"], ranks[1][tie]["sharded"])


@pytest.mark.parametrize("tie", [True, False])
def test_parameters_are_dtensors_of_the_same_names_and_values(ranks, tie):
    blocks = {
        f"layers.{i}.{name}.weight": placement
        for i in (0, 1)
        for name, placement in (
            ("attention.qkv_proj", "S(0)"),
            ("attention.o_proj", "S(1)"),
            ("feed_forward.gate_up_proj", "S(0)"),
            ("feed_forward.down_proj", "S(1)"),
        )
    }
    expected = {"embed_tokens.weight": "S(0)"} | ({} if tie else {"lm_head.weight": "S(0)"}) | blocks
    for rank in ranks:
        assert rank[tie]["placements"] == expected
        assert rank[tie]["same_names"]
        assert rank[tie]["same_values"]
        # 64 x 32 in two halves; each rank has one.
        assert rank[tie]["local_elements"]["embed_tokens.weight"] == 1024


def test_a_mesh_of_one_leaves_plain_tensors():
    model = random_model(small_spec(), seed=0)
    before = dict(model.named_parameters())
    parallelize_qwen3_generator(model, MeshOfSize(1))  # type: ignore[arg-type]
    assert dict(model.named_parameters()) == before
    assert isinstance(model.embed_tokens, torch.nn.Embedding)


def test_a_degree_that_divides_no_heads_is_refused_by_name():
    model = random_model(small_spec(), seed=0)
    with pytest.raises(ValueError, match="tensor_parallel_degree=4 does not divide num_kv_heads=2"):
        parallelize_qwen3_generator(model, MeshOfSize(4))  # type: ignore[arg-type]


def test_the_head_of_a_plain_weight_is_a_product():
    hidden, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0], [0.0, 1.0]])
    assert generator_head(hidden, weight).tolist() == [[11.0, 17.0, 2.0]]
