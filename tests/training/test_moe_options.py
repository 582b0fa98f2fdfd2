"""Options that save memory or time change no number of a mixture, nor do context-parallel ranks."""

import numpy as np
import pytest

from rl.models.converters.lora import LoRA
from tests.support.distributed import run_ranks
from tests.training.layouts import half_tolerance
from tests.training.moe_layouts import LAYOUTS, moe_spec, write_moe_assets
from tests.training.moe_options import CONTEXT, OPTIONS, count_exchanges, measure_options
from tests.training.parts import engine_config

PAIRS = ("ep2", "tp2", "etp2", "fsdp2")


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return write_moe_assets(tmp_path_factory.mktemp("moe_options") / "assets")


@pytest.fixture(scope="module")
def expected(assets):
    """On one device without options; LoRA and bfloat16 by themselves, which have other gradients."""
    names = ("none", "lora", "bfloat16")
    plain, lora, half = measure_options([("one", name) for name in names], assets)
    halves = {name: half for name in OPTIONS if name.startswith("bfloat16")}
    return dict.fromkeys((*OPTIONS, "compile"), plain) | {"lora": lora} | halves


def assert_as_on_one_device(measured, expected, *, layout, option, relative=1e-5):
    """In bfloat16 up to its rounding, which now and then chooses another expert."""
    expected, case = expected[option], f"{layout}, {option}"
    of_loss = of_gradient = relative
    if option.startswith("bfloat16"):
        of_loss, of_gradient = 1e-2, half_tolerance((LAYOUTS | CONTEXT)[layout][1])
    else:
        assert measured.expert_load == expected.expert_load, case
    assert measured.loss_sum == pytest.approx(expected.loss_sum, rel=of_loss), case
    assert list(measured.gradients) == list(expected.gradients), case
    for name, tensor in expected.gradients.items():
        difference = np.linalg.norm(measured.gradients[name] - tensor)
        assert difference <= of_gradient * np.linalg.norm(tensor), f"{case}: {name}: {difference}"


def check(cases, assets, expected, **tolerance):
    for rank in run_ranks(measure_options, 2, cases, assets, timeout_s=280):
        for (layout, option), measured in zip(cases, rank, strict=True):
            assert_as_on_one_device(measured, expected, layout=layout, option=option, **tolerance)


def test_options_on_one_device_change_no_number(assets, expected):
    cases = [("one", option) for option in OPTIONS if option != "offload"]
    for (_, option), measured in zip(cases, measure_options(cases, assets), strict=True):
        assert_as_on_one_device(measured, expected, layout="one", option=option)
    # LoRA trains what it adds to attention, and no expert.
    assert all("lora" in name for name in expected["lora"].gradients)
    assert any(tensor.any() for tensor in expected["lora"].gradients.values())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_options_change_no_number_in_any_layout_of_two_ranks(assets, expected):
    cases = [(layout, option) for layout in PAIRS for option in OPTIONS if option != "none"]
    check(cases, assets, expected)


@pytest.mark.medium
def test_context_parallel_ranks_share_tokens_and_experts(assets, expected):
    cases = [
        (layout, option) for layout in CONTEXT for option in ("none", "full", "selective_op", "bfloat16_full")
    ]
    check(cases, assets, expected)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_options_change_no_number_with_context_parallelism(assets, expected):
    run = ("none", "full", "selective_op", "bfloat16_full")
    cases = [(layout, option) for layout in CONTEXT for option in OPTIONS if option not in run]
    check(cases, assets, expected)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiling_changes_no_number(assets, expected):
    (measured,) = measure_options([("one", "compile")], assets)
    assert_as_on_one_device(measured, expected, layout="one", option="compile", relative=1e-4)
    layouts = (*PAIRS, "cp2_ep2")
    check([(layout, "compile") for layout in layouts], assets, expected, relative=1e-4)


@pytest.mark.medium
def test_selective_checkpointing_by_operation_exchanges_rows_once(assets):
    for rank in run_ranks(count_exchanges, 2, "ep2", ["none", "selective_op", "full"], assets, timeout_s=100):
        # In each of two layers, of each of two micro-batches: counts, rows there and back, and both back
        # again in the backward. Computed again, the first three once more.
        assert rank == [4 * 5, 4 * 5, 4 * 8]


def test_without_names_adapters_are_those_of_attention(assets):
    config = engine_config()
    config.converters = (LoRA.Config(rank=2),)
    engine = config.build(model_spec=moe_spec(), hf_assets_path=assets, device="cpu")
    adapted = {name.split(".")[-2] for name in engine.policy.trained_parameters}
    assert adapted == {"qkv_proj_lora", "o_proj_lora"}


def test_adapters_of_experts_are_refused_by_name(assets):
    config = engine_config()
    config.converters = (LoRA.Config(target_modules=("gate_proj",)),)
    with pytest.raises(ValueError, match="target_modules has 'gate_proj', which is no linear layer"):
        config.build(model_spec=moe_spec(), hf_assets_path=assets, device="cpu")
