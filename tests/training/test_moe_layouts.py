"""Every way to split a mixture of experts gives the numbers of one device."""

import dataclasses

import numpy as np
import pytest

from rl.models.hf import HFFolder, read_parameters
from tests.support.distributed import run_ranks
from tests.training.moe_layouts import (
    BIAS_RATE,
    LAYOUTS,
    SLOW,
    measure,
    measure_layouts,
    moe_spec,
    restore_layouts,
    write_moe_assets,
)

PARALLEL = [name for name in LAYOUTS if name != "one"]
EXPERTS = 2 * (6 * 40 * 36 + 6 * 36 * 20)
"""Elements of the experts' weights, in both layers."""


def of_layouts():
    """Once for each parallel layout."""
    marks = {name: pytest.mark.slow if name in SLOW else pytest.mark.medium for name in PARALLEL}
    return pytest.mark.parametrize("layout", [pytest.param(n, marks=mark) for n, mark in marks.items()])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("moe_layouts")


@pytest.fixture(scope="module")
def assets(folder):
    return write_moe_assets(folder / "assets")


@pytest.fixture(scope="module")
def one(folder, assets):
    return measure("one", assets, str(folder / "one"))


@pytest.fixture(scope="module")
def measured(folder, assets):
    """What each rank of a layout measured; layouts of one size and mark share their processes."""
    results = {}

    def ranks_of(layout):
        if layout not in results:
            size, slow = LAYOUTS[layout][0], layout in SLOW
            together = [name for name in PARALLEL if LAYOUTS[name][0] == size and (name in SLOW) == slow]
            ranks = run_ranks(measure_layouts, size, together, assets, str(folder), timeout_s=250)
            results.update({name: [rank[name] for rank in ranks] for name in together})
        return results[layout]

    return ranks_of


def assert_near(actual, expected, *, relative=1e-5):
    """Each tensor by the norm of the difference."""
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        difference = np.linalg.norm(actual[name] - tensor) / np.linalg.norm(tensor)
        assert difference <= relative, f"{name}: {difference}"


def assert_same_result(actual, expected):
    for name in ("loss_sum", "denominator", "num_valid_tokens", "ratio_mean", "entropy_mean"):
        assert getattr(actual, name) == pytest.approx(getattr(expected, name), rel=1e-5), name
    # Counts of tokens: the same routing, and every token counted once.
    assert actual.expert_load == expected.expert_load


@of_layouts()
def test_loss_gradients_and_logprobs_are_those_of_one_device(measured, one, layout):
    for rank in measured(layout):
        assert_same_result(rank.whole, one.whole)
        assert_near(rank.gradients, one.gradients)
        assert_near(rank.part_gradients, one.gradients)
        for actual, expected in zip(rank.logprobs, one.logprobs, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


@of_layouts()
def test_steps_move_weights_and_bias_as_on_one_device(measured, one, layout):
    norms = [step.grad_norm for step in one.steps]
    assert norms[0] > 0.5  # clipped
    for rank in measured(layout):
        assert [step.grad_norm for step in rank.steps] == pytest.approx(norms, rel=1e-5)
        assert_near(rank.parameters, one.parameters)
        assert_near(rank.buffers, one.buffers, relative=0.0)


@of_layouts()
def test_ranks_without_a_sample_take_part(measured, one, layout):
    for rank in measured(layout):
        assert_same_result(rank.sparse, one.sparse)


@of_layouts()
def test_every_rank_returns_the_same_bits(measured, layout):
    first, *others = measured(layout)
    for rank in others:
        for name in ("whole", "sparse", "half"):
            same = dataclasses.replace(getattr(rank, name), time_s=getattr(first, name).time_s)
            assert same == getattr(first, name)
        for mine, theirs in zip(rank.logprobs, first.logprobs, strict=True):
            np.testing.assert_array_equal(mine, theirs)


@of_layouts()
def test_half_precision_is_near_one_device_with_float32_gradients(measured, one, layout):
    for rank in measured(layout):
        assert rank.half_gradient_dtypes == {"torch.float32"}
        assert rank.half.loss_mean == pytest.approx(one.half.loss_mean, rel=1e-2)


@of_layouts()
def test_ranks_keep_their_share_of_the_experts(measured, layout):
    size, parallelism = LAYOUTS[layout]
    ways = max(1, parallelism.data_parallel_shard_degree) * parallelism.expert_tensor_parallel_degree
    ways *= parallelism.context_parallel_degree
    kept = [
        sum(number for name, number in rank.num_local.items() if ".experts." in name)
        for rank in measured(layout)
    ]
    if layout == "fsdp2_ep2":
        # Each pair of ranks splits three experts into two and one.
        assert kept == [EXPERTS // 3, EXPERTS // 3, EXPERTS // 6, EXPERTS // 6]
    elif layout == "fsdp2_cp2":
        # Six experts over four ranks, two to each as far as they go.
        assert kept == [EXPERTS // 3, EXPERTS // 3, EXPERTS // 3, 0]
    else:
        assert kept == [EXPERTS // ways] * size


@of_layouts()
def test_checkpoint_continues_and_opens_on_one_device_with_the_same_bits(
    measured, one, layout, assets, folder
):
    ranks = measured(layout)
    for rank in ranks:
        assert rank.restored.policy_version == 4
        assert rank.restored.grad_norm == pytest.approx(one.restored.grad_norm, rel=1e-5)
        assert_near(rank.restored_buffers, rank.buffers, relative=0.0)
    ((version, tensors),) = restore_layouts(["one"], assets, str(folder / layout / "checkpoint"))
    assert version == 3
    assert_near(tensors, ranks[0].parameters | ranks[0].buffers, relative=0.0)


@of_layouts()
def test_exported_weights_are_the_parameters_and_the_bias(measured, layout, folder):
    rank = measured(layout)[0]
    expected = rank.parameters | rank.buffers
    exported = HFFolder(folder / layout / "exported", tokenizer=True)
    spec = moe_spec()
    tensors = dict(read_parameters(exported, spec.adapter(spec.model), expected))
    assert_near({name: t.numpy() for name, t in tensors.items()}, expected, relative=0.0)


@pytest.mark.medium
def test_checkpoint_of_one_device_opens_in_shards(one, assets, folder):
    layouts = ["fsdp2_ep2", "ep2_etp2"]
    checkpoint = str(folder / "one" / "checkpoint")
    for rank in run_ranks(restore_layouts, 4, layouts, assets, checkpoint, timeout_s=100):
        for version, tensors in rank:
            assert version == 3
            assert_near(tensors, one.parameters | one.buffers, relative=0.0)


def test_bias_moves_by_the_rate_a_step(one, assets):
    ((_, before),) = restore_layouts(["one"], assets, assets)
    for name, bias in one.buffers.items():
        moved = (bias - before[name]) / BIAS_RATE
        # Three steps, each up, down or, at exactly the mean, not at all.
        np.testing.assert_allclose(moved, np.round(moved), atol=1e-4)
        assert 1 <= np.abs(moved).max() <= 3 + 1e-4
