"""Tensor-parallel plans of the decoder on two ranks."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from examples.custom_model import MULTIPLIERS
from rl.distributed.compat import use_one_gloo_worker
from rl.distributed.mesh import CP, DP_REPLICATE, DP_SHARD, TP
from rl.distributed.sharding import ShardingOptions, gather_whole, local_tensor
from rl.models.layers.attention import SequenceLayout
from rl.models.logprobs import compute_token_logprobs
from rl.models.parallelize import gather_logits, parallelize_decoder, parallelize_decoder_generator
from tests.support.distributed import run_ranks
from tests.support.policies import random_model, small_spec

CASES: dict[str, dict[str, Any]] = {
    "tied": {"tie": True},
    "untied": {"tie": False},
    "llama": {"family": "llama"},
    "qwen2": {"family": "qwen2", "tie": False},
    "mistral": {"family": "mistral", "tie": False, "switches": {"window": 3}},
    "gemma3_text": {"family": "gemma3_text", "switches": {"window": 3, "global_layers": (1,)}},
    "biases everywhere without norms": {
        "qkv_bias": True, "o_bias": True, "ffn_bias": True, "qk_norm": False, "tie": False,
    },
    "width that heads do not divide": {"num_kv_heads": 4, "hidden_dim": 54},
    "experts": {"experts": True, "tie": False},
    "a family from outside": {
        "family": "granite", "tie": False,
        "switches": {"multipliers": MULTIPLIERS | {"logits_scaling": 0.5}},
    },
}  # fmt: skip
WHOLE = ("norm.weight", "router.weight", "load_balance_bias", "o_proj.bias", "down_proj.bias")
"""Endings of tensors that each rank of the generator holds whole."""


LENGTHS = [5, 1, 4]


def compute(models):
    """Compute logprobs, gradients of all parameters and logits of an odd number of tokens, without
    and with the plans."""
    use_one_gloo_worker()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(TP,))
    whole_mesh = init_device_mesh(
        "cpu", (1, 1, 1, 2), mesh_dim_names=(DP_REPLICATE, DP_SHARD, CP, TP)
    )
    results = {}
    for name, model in models.items():
        (sharded,) = parallelize_decoder(deepcopy(model), mesh=whole_mesh, config=ShardingOptions())
        (whole_logprobs, of_whole), (logprobs, ours) = step(model), step(sharded)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        whole = logits(model)
        assert parallelize_decoder_generator(model, mesh) is model
        after = model.state_dict()
        results[name] = {
            "logprobs": (whole_logprobs.numpy(), logprobs.numpy()),
            "gradients": {n: (of_whole[n].numpy(), ours[n].numpy()) for n in of_whole},
            "whole": whole,
            "sharded": logits(model),
            "unsplit": [n for n, t in after.items() if 2 * local_tensor(t).numel() != t.numel()],
            "same_names": list(before) == list(after),
            "same_values": all(torch.equal(gather_whole(after[n]), before[n]) for n in before),
        }
    dist.destroy_process_group()
    return results


@torch.no_grad()
def logits(model):
    ids, positions, layout = batch([5, 1, 3])
    return model(ids, positions=positions, sequences=layout, head=gather_logits).numpy()


def step(model):
    ids, positions, layout = batch(LENGTHS)

    def head(hidden, weight):
        ones = torch.ones(len(ids))
        return compute_token_logprobs(hidden, weight, targets_T=ids.roll(-1), temperatures_T=ones)[
            0
        ]

    logprobs = model(ids, positions=positions, sequences=layout, head=head)
    (logprobs * torch.arange(1.0, len(ids) + 1)).sum().backward()
    gradients = {n: gather_whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return logprobs.detach(), gradients


def batch(lengths):
    ids = torch.randint(0, 64, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in lengths])
    return ids, positions, SequenceLayout.from_lengths(lengths)


@pytest.fixture(scope="module")
def ranks():
    models = {name: random_model(small_spec(**sizes), seed=0) for name, sizes in CASES.items()}
    return run_ranks(compute, 2, models, timeout_s=50)


@pytest.mark.medium
@pytest.mark.parametrize("name", CASES)
def test_generator_plan_on_two_ranks_computes_the_unsharded_logits(ranks, name):
    for rank in ranks:
        np.testing.assert_allclose(rank[name]["sharded"], rank[name]["whole"], atol=2e-5, rtol=0)
        assert np.abs(rank[name]["whole"]).max() > 3
        assert rank[name]["same_names"]
        assert rank[name]["same_values"]
        assert all(tensor.endswith(WHOLE) for tensor in rank[name]["unsplit"])
    # Ranks sample from these logits, so the bits must be equal.
    assert np.array_equal(ranks[0][name]["sharded"], ranks[1][name]["sharded"])


@pytest.mark.parametrize("name", CASES)
def test_trainer_plan_on_two_ranks_computes_the_unsharded_logprobs_and_gradients(ranks, name):
    for rank in ranks:
        whole, sharded = rank[name]["logprobs"]
        np.testing.assert_allclose(sharded, whole, atol=2e-5, rtol=0)
        assert rank[name]["gradients"]
        for parameter, (expected, actual) in rank[name]["gradients"].items():
            np.testing.assert_allclose(actual, expected, atol=2e-4, rtol=1e-4, err_msg=parameter)
        for parameter, (expected, _) in rank[name]["gradients"].items():
            assert not parameter.endswith(".bias") or np.abs(expected).max() > 0.01
