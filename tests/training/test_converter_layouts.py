"""LoRA and float8 give in every parallel layout the numbers that they give on one device."""

import functools

import numpy as np
import pytest
from safetensors.numpy import load_file

from rl.models.hf import HFFolder, read_parameters
from tests.support.distributed import run_ranks
from tests.training.converter_layouts import (
    KINDS,
    UNEVEN,
    has_scales_of_its_own,
    measure_all,
    ungathered,
    write_adapter,
)
from tests.training.layouts import LAYOUTS
from tests.training.parts import write_assets
from tests.training.test_layouts import assert_near, assert_same_result

SLOW = ("hsdp2x2", "cp2", "fsdp2_tp2")
pytestmark = pytest.mark.timeout(300)


def of(*arguments):
    """Marked as their layout is."""
    return [
        pytest.param(*each, marks=pytest.mark.slow if each[0] in SLOW else pytest.mark.medium)
        for each in arguments
    ]


of_layouts = pytest.mark.parametrize("layout", of(*((layout,) for layout in KINDS)))
ALL_KINDS = [(layout, kind) for layout, kinds in KINDS.items() for kind in kinds]
of_kinds = pytest.mark.parametrize(("layout", "kind"), of(*ALL_KINDS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("converters")


@pytest.fixture(scope="module")
def assets(folder):
    return write_assets(folder / "assets", tie=False)


@pytest.fixture(scope="module")
def measured(folder, assets):
    """What each rank of a layout measured; a layout's processes run once."""
    adapter = write_adapter(folder / "start")

    @functools.cache
    def ranks_of(layout):
        where = str(folder / layout)
        if layout == "one":
            return [measure_all(layout, assets, adapter, where)]
        return run_ranks(measure_all, LAYOUTS[layout][0], layout, assets, adapter, where, timeout_s=250)

    return ranks_of


@pytest.fixture(scope="module")
def lora(measured):
    return lambda layout: [rank[0] for rank in measured(layout)]


@pytest.fixture(scope="module")
def float8(measured):
    return lambda layout, kind: [rank[1][kind] for rank in measured(layout)]


@of_layouts
def test_loss_and_adapter_gradients_are_those_of_one_device(lora, layout):
    (one,) = lora("one")
    assert all(".lora_a" in name or name.endswith("_lora.lora_b") for name in one.gradients)
    assert len(one.gradients) == 2 * (2 * 4 + 1)
    for rank in lora(layout):
        assert_same_result(rank.whole, one.whole)
        assert_near(rank.gradients, one.gradients)
        assert_near(rank.part_gradients, one.gradients)


@of_layouts
def test_steps_move_the_adapters_as_on_one_device_and_nothing_else(lora, layout, assets):
    (one,) = lora("one")
    norms = [step.grad_norm for step in one.steps]
    spec = UNEVEN
    names = [name for name in one.parameters if "_lora." not in name]
    start = dict(read_parameters(HFFolder(assets), spec.adapter(spec.model), names))
    for rank in lora(layout):
        assert [step.grad_norm for step in rank.steps] == pytest.approx(norms, rel=1e-5)
        assert_near(rank.parameters, one.parameters)
        for name in names:
            np.testing.assert_array_equal(rank.parameters[name], start[name].numpy())
        assert rank.restored.grad_norm == pytest.approx(one.restored.grad_norm, rel=1e-4)


@of_layouts
def test_merged_weights_have_the_plain_names_and_are_dtensors(lora, layout, folder):
    (one,) = lora("one")
    spec = UNEVEN
    adapter = spec.adapter(spec.model)
    for rank in lora(layout):
        assert_near(rank.merged, one.merged)
        assert rank.num_dtensors == len(rank.merged)
    exported = dict(
        read_parameters(HFFolder(folder / layout / "merged", tokenizer=True), adapter, one.merged)
    )
    for name, tensor in exported.items():
        np.testing.assert_array_equal(tensor.numpy(), lora(layout)[0].merged[name])


@of_layouts
def test_adapter_is_written_as_on_one_device_and_continues(lora, layout, folder):
    lora("one")
    ranks = lora(layout)
    one, this = (
        load_file(folder / where / "adapter" / "adapter_model.safetensors") for where in ("one", layout)
    )
    assert_near(dict(sorted(this.items())), dict(sorted(one.items())))
    for rank in ranks:
        for reopened, trained in zip(rank.reopened, rank.trained, strict=True):
            np.testing.assert_array_equal(reopened, trained)
        for actual, expected in zip(rank.logprobs, lora("one")[0].logprobs, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


@of_layouts
def test_half_precision_is_that_of_one_device(lora, layout):
    (one,) = lora("one")
    for rank in lora(layout):
        assert rank.half.loss_mean == pytest.approx(one.half.loss_mean, rel=2e-2)


@pytest.mark.parametrize(
    ("layout", "kind"), of(*(each for each in ALL_KINDS if not has_scales_of_its_own(*each)))
)
def test_float8_is_that_of_one_device(float8, layout, kind):
    (one,) = float8("one", ungathered(kind))
    for rank in float8(layout, kind):
        assert_same_result(rank.whole, one.whole)
        assert_near(rank.gradients, one.gradients)
        assert [s.grad_norm for s in rank.steps] == pytest.approx([s.grad_norm for s in one.steps], rel=1e-5)
        assert_near(rank.parameters, one.parameters)


@pytest.mark.parametrize(
    ("layout", "kind"), of(*(each for each in ALL_KINDS if has_scales_of_its_own(*each)))
)
def test_scales_of_pieces_of_a_micro_batch_change_a_gradient_by_their_rounding(float8, layout, kind):
    """Measured: the loss by 0.0014, a gradient by up to 0.17 where float8 itself changes it as much."""
    (one,) = float8("one", ungathered(kind))
    for rank in float8(layout, kind):
        assert rank.whole.loss_sum == pytest.approx(one.whole.loss_sum, rel=5e-3)
        assert_near(rank.gradients, one.gradients, relative=0.25)
        if layout == "cp2":
            assert_near(rank.gradients, float8(layout, "tensorwise")[0].gradients)


@of_kinds
def test_each_rank_multiplies_multiples_of_16_tokens(float8, layout, kind):
    for rank in float8(layout, kind):
        assert rank.num_tokens
        assert all(number % 16 == 0 for number in rank.num_tokens)


@of_kinds
def test_scales_computed_ahead_are_of_the_weights_as_they_are(float8, layout, kind):
    ahead = kind in ("gathered", "gathered_with_lora")
    for rank in float8(layout, kind):
        for scales in rank.scales.values():
            assert len(scales) == (8 if ahead else 0)
            assert [scale for scale, _ in scales] == pytest.approx([wanted for _, wanted in scales], rel=1e-6)
        if kind == "gathered":
            assert rank.scales["stepped"] != rank.scales["loaded"]
        # They are what the gathering uses: with others the loss is another.
        with_scales, with_other_scales = rank.losses
        assert (abs(with_other_scales - with_scales) > 0.1) == ahead
