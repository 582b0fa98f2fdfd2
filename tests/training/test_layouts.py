"""Every parallel layout gives the numbers of one device."""

import dataclasses
import functools

import numpy as np
import pytest
from torch.distributed.checkpoint.filesystem import FileSystemReader

from rl.distributed.mesh import ParallelismConfig
from rl.models.hf import HFFolder, read_parameters
from tests.support.distributed import run_ranks
from tests.training.layouts import (
    LAYOUTS,
    first_rank_alone,
    half_tolerance,
    measure,
    one_step,
    refuse_layout,
    restore,
)
from tests.training.parts import small_spec, write_assets

SLOW = ("hsdp2x2", "ddp2_tp2", "cp2_tp2", "fsdp2_cp2", "hsdp2_cp2")


def of_layouts():
    """Once for each parallel layout."""
    return pytest.mark.parametrize(
        "layout",
        [
            pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.medium)
            for name in LAYOUTS
            if name != "one"
        ],
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def assets(folder):
    return write_assets(folder / "assets")


@pytest.fixture(scope="module")
def measured(folder, assets):
    """What each rank of a layout measured; a layout's processes run once."""

    @functools.cache
    def ranks_of(layout):
        where = str(folder / layout)
        if layout == "one":
            return [measure(layout, assets, where)]
        return run_ranks(measure, LAYOUTS[layout][0], layout, assets, where, timeout_s=200)

    return ranks_of


def assert_near(actual, expected, *, relative=1e-5):
    """Each tensor by the norm of the difference; what is zero, as the gradient of a fresh A, exactly."""
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        difference, norm = np.linalg.norm(actual[name] - tensor), np.linalg.norm(tensor)
        assert difference <= relative * norm, f"{name}: {difference} of {norm}"


def assert_same_result(actual, expected):
    """Of forward_backward; means to 1e-5, counts exactly."""
    for field in dataclasses.fields(expected):
        if field.name not in ("time_s", "loss_metrics", "packing", "logprob_diff_mean", "logprob_diff_max"):
            got, wanted = getattr(actual, field.name), getattr(expected, field.name)
            # A dense model has no load of experts.
            assert got == (wanted if wanted is None else pytest.approx(wanted, rel=1e-5)), field.name
    # How samples are packed is each layout's own; that a prompt's tokens are shared, nobody's loss.
    assert 0 < actual.packing.num_packed <= min(actual.num_tokens, actual.packing.num_room)
    assert actual.loss_metrics == pytest.approx(expected.loss_metrics, rel=1e-5)
    assert actual.logprob_diff_mean == pytest.approx(expected.logprob_diff_mean, abs=1e-5)
    assert actual.logprob_diff_max == pytest.approx(expected.logprob_diff_max, abs=1e-5)


@pytest.mark.parametrize(
    "reshard",
    ["default", *(pytest.param(name, marks=pytest.mark.medium) for name in ("always", "never"))],
)
def test_two_ranks_take_the_step_of_one(assets, reshard):
    """The quick one of this file: FSDP2 alone."""
    expected, expected_step = one_step(ParallelismConfig(), assets)
    shards = ParallelismConfig(data_parallel_shard_degree=2, reshard_after_forward=reshard)
    for result, step in run_ranks(one_step, 2, shards, assets, timeout_s=50):
        assert_same_result(result, expected)
        assert step.grad_norm == pytest.approx(expected_step.grad_norm, rel=1e-5)


@of_layouts()
def test_loss_and_diagnostics_are_those_of_one_device(measured, layout):
    (one,) = measured("one")
    for rank in measured(layout):
        assert_same_result(rank.whole, one.whole)
        assert sum(part.loss_sum for part in rank.parts) == pytest.approx(one.whole.loss_sum, rel=1e-5)
        assert sum(part.denominator for part in rank.parts) == one.whole.denominator


@of_layouts()
def test_gradients_are_those_of_one_device_in_one_call_and_in_parts(measured, layout):
    (one,) = measured("one")
    for rank in measured(layout):
        assert_near(rank.gradients, one.gradients)
        assert_near(rank.part_gradients, one.gradients)


@of_layouts()
def test_steps_are_those_of_one_device(measured, layout):
    (one,) = measured("one")
    norms = [step.grad_norm for step in one.steps]
    assert norms[0] > 0.5  # clipped
    for rank in measured(layout):
        assert [step.grad_norm for step in rank.steps] == pytest.approx(norms, rel=1e-5)
        assert_near(rank.parameters, one.parameters)


@of_layouts()
def test_logprobs_are_those_of_one_device(measured, layout):
    (one,) = measured("one")
    for rank in measured(layout):
        for actual, expected in zip(rank.logprobs, one.logprobs, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)
        for part, first in zip(rank.parts, (0, 2, 9), strict=True):
            second_and_first = (one.logprobs[first + 1], one.logprobs[first])
            for actual, expected in zip(part.logprobs, second_and_first, strict=True):
                np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


@of_layouts()
def test_ranks_without_a_sample_take_part(measured, layout):
    (one,) = measured("one")
    for rank in measured(layout):
        assert_same_result(rank.sparse, one.sparse)


@of_layouts()
def test_every_rank_returns_the_same_bits(measured, layout):
    first, *others = measured(layout)
    for rank in others:
        for name in ("whole", "sparse", "half"):
            same = dataclasses.replace(getattr(rank, name), time_s=getattr(first, name).time_s)
            assert same == getattr(first, name)
        assert [s.grad_norm for s in rank.steps] == [s.grad_norm for s in first.steps]
        for mine, theirs in zip(rank.logprobs, first.logprobs, strict=True):
            np.testing.assert_array_equal(mine, theirs)


@of_layouts()
def test_loss_that_is_not_finite_stops_every_rank(measured, layout):
    assert {rank.not_finite for rank in measured(layout)} == {"loss nan at policy version 3"}


@of_layouts()
def test_half_precision_is_that_of_one_device_with_float32_gradients(measured, layout):
    (one,) = measured("one")
    for rank in measured(layout):
        assert rank.half_gradient_dtypes == {"torch.float32"}
        assert rank.half.loss_mean == pytest.approx(one.half.loss_mean, rel=3e-3)
        assert_near(rank.half_gradients, one.half_gradients, relative=half_tolerance(LAYOUTS[layout][1]))


@of_layouts()
def test_checkpoint_continues_and_opens_on_one_device_with_the_same_bits(measured, layout, assets, folder):
    (one,) = measured("one")
    ranks = measured(layout)
    for rank in ranks:
        assert rank.restored.policy_version == 4
        assert rank.restored.grad_norm == pytest.approx(one.restored.grad_norm, rel=1e-5)
    version, parameters = restore("one", assets, str(folder / layout / "checkpoint"))
    assert version == 3
    assert_near(parameters, ranks[0].parameters, relative=0.0)


@of_layouts()
def test_exported_weights_are_the_parameters(measured, layout, folder):
    expected = measured(layout)[0].parameters
    exported = HFFolder(folder / layout / "exported", tokenizer=True)
    spec = small_spec()
    tensors = dict(read_parameters(exported, spec.adapter(spec.model), expected))
    assert_near({name: t.numpy() for name, t in tensors.items()}, expected, relative=0.0)


@of_layouts()
def test_checkpoint_holds_each_tensor_once(measured, layout, folder):
    measured("one")
    measured(layout)
    names = [
        {name for name in metadata.state_dict_metadata if not name.startswith("random.")}
        for metadata in (
            FileSystemReader(folder / where / "checkpoint").read_metadata() for where in ("one", layout)
        )
    ]
    assert names[0] == names[1]


@pytest.mark.medium
def test_checkpoint_of_one_device_opens_in_shards(measured, assets, folder):
    (one,) = measured("one")
    for version, parameters in run_ranks(
        restore, 4, "fsdp2_tp2", assets, str(folder / "one" / "checkpoint"), timeout_s=100
    ):
        assert version == 3
        assert_near(parameters, one.parameters, relative=0.0)


@pytest.mark.medium
def test_rank_that_stays_away_is_an_error_that_names_the_call(assets):
    error, _ = run_ranks(first_rank_alone, 2, assets, timeout_s=50)
    assert "rank 0 of 2 of the trainer, in forward_backward of step 0" in error


@pytest.mark.medium
def test_degree_that_does_not_divide_the_model_is_refused(assets):
    for error in run_ranks(refuse_layout, 3, assets, timeout_s=50):
        assert error == "tensor_parallel_degree=3 does not divide num_kv_heads=2"


@pytest.mark.slow
def test_untied_head_is_sharded_right(tmp_path):
    untied = write_assets(tmp_path / "assets", tie=False)
    one = measure("one", untied, str(tmp_path / "one"))
    for rank in run_ranks(measure, 4, "fsdp2_tp2", untied, str(tmp_path / "four"), timeout_s=200):
        assert_near(rank.gradients, one.gradients)
        assert_near(rank.parameters, one.parameters)
