"""Every parallel layout gives the numbers of one device: a dense model, a mixture of experts, and
LoRA.
"""

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from rl.models.files.hf import HFFolder, read_parameters
from rl.training.checkpoints.metadata import read_saved_tensors
from tests.support.distributed import run_ranks
from tests.training.layouts import (
    REDUCED,
    WITH_ADAPTERS,
    measure,
    measure_all,
    measure_gradients,
    num_ranks,
    restore,
    restore_all,
    sizes,
    spec_of,
)
from tests.training.parts import BIAS_RATE, assert_near

MEDIUM = {
    "dense": (
        "fsdp2", "tp2", "ddp2", "cp2", "cp2_alltoall", "pp2", "pp2_interleaved", "pp2_zbv",
        "fsdp2_tp2", "pp2_fsdp2",
        "pp2_tp2", "cp2_tp2_alltoall",
    ),
    "moe": ("fsdp2_ep2", "tp2", "tp2_etp2", "pp2_interleaved", "fsdp2_ep2_tp2_etp2",
        "pp2_fsdp2_ep2"),
    "lora": ("fsdp2", "tp2", "cp2_alltoall", "pp2"),
    "lora_moe": ("fsdp2", "fsdp2_ep2", "tp2_etp2"),
}  # fmt: skip
"""Layouts that `make test` runs, by kind of model."""
LONG = {
    "dense": (
        "ddp2_fsdp2", "ddp2_tp2", "cp2_tp2", "fsdp2_cp2", "ddp2_cp2", "fsdp2_cp2_alltoall",
        "cp4_alltoall", "pp2_gpipe",
        "pp2_ddp2",
    ),
    "moe": (
        "fsdp2", "ddp2", "fsdp4_ep2", "ddp2_fsdp2_ep2", "fsdp2_ep2_tp2", "fsdp2_tp2_etp2",
        "fsdp2_tp2", "ddp2_tp2",
        "cp2_tp2", "ddp2_fsdp2", "fsdp2_cp2", "ddp2_cp2", "cp2_ep2_tp2_etp2",
    ),
    "lora": ("fsdp2_tp2", "ddp2_fsdp2"),
    "lora_moe": ("tp2",),
}  # fmt: skip
"""Layouts whose dimensions others cover too; only `make test-long` runs them."""
THREE_AXES = ("fsdp2_cp2_tp2", "pp2_cp2_tp2", "pp2_fsdp2_tp2_csv")
"""Layouts of eight ranks, of which only a gradient is measured."""
EXPERTS = 2 * (6 * 40 * 36 + 6 * 36 * 20)
"""Number of elements of the experts' weights, in both layers."""


def cases_of(table):
    return [(kind, layout) for kind, layouts in table.items() for layout in layouts]


def of_kinds(*kinds):
    """Run a test for the cases of these kinds."""
    medium = [
        pytest.param(case, marks=pytest.mark.medium)
        for case in cases_of(MEDIUM)
        if case[0] in kinds
    ]
    long = [pytest.mark.slow, pytest.mark.long]
    return pytest.mark.parametrize(
        "case",
        [*medium, *(pytest.param(case, marks=long) for case in cases_of(LONG) if case[0] in kinds)],
        ids="-".join,
    )


of_cases = of_kinds("dense", "moe", "lora", "lora_moe")
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def one(folder, all_assets):
    """Return the measurements on one device by kind of model."""
    return functools.cache(
        lambda kind: measure((kind, "one"), all_assets, str(folder / f"{kind}_one"))
    )


@pytest.fixture(scope="module")
def measured(folder, all_assets):
    """Return the measurements of each rank.

    Layouts of one size and table share their processes, those with adapters and those without.
    """

    @functools.cache
    def launch(is_long, size, with_adapters):
        cases = []
        for case in cases_of(LONG if is_long else MEDIUM):
            if num_ranks(case[1]) == size and (case[0] in WITH_ADAPTERS) == with_adapters:
                cases.append(case)
        return run_ranks(measure_all, size, cases, all_assets, str(folder), timeout_s=280)

    return lambda case: [
        rank[case]
        for rank in launch(case[1] in LONG[case[0]], num_ranks(case[1]), case[0] in WITH_ADAPTERS)
    ]


def assert_same_result(actual, expected):
    """Compare two results of forward_backward; means to 1e-5, counts exactly."""
    skipped = ("loss_metrics", "packing", "logprob_diff_mean", "logprob_diff_max", "expert_load")
    for field in dataclasses.fields(expected):
        if field.name not in skipped:
            got, wanted = getattr(actual, field.name), getattr(expected, field.name)
            assert got == (wanted if wanted is None else pytest.approx(wanted, rel=1e-5)), (
                field.name
            )
    # Token counts show equal routing, with every token counted once.
    assert actual.expert_load == expected.expert_load
    # Packing depends on the layout.
    assert 0 < actual.packing.num_packed <= min(actual.num_tokens, actual.packing.num_room)
    assert actual.loss_metrics == pytest.approx(expected.loss_metrics, rel=1e-5)
    assert actual.logprob_diff_mean == pytest.approx(expected.logprob_diff_mean, abs=1e-5)
    assert actual.logprob_diff_max == pytest.approx(expected.logprob_diff_max, abs=1e-5)


def assert_near_logprobs(actual, expected):
    np.testing.assert_allclose(np.concatenate(actual), np.concatenate(expected), rtol=0, atol=1e-5)


@of_cases
def test_results_gradients_and_steps_equal_one_device(measured, one, case):
    kind = case[0]
    expected, ranks = one(kind), measured(case)
    assert expected["norms"][0] > 0.5  # clipped
    for rank in ranks:
        assert all(
            rank[name] == ranks[0][name] for name in ("whole", "sparse", "norms")
        )  # same bits
        np.testing.assert_array_equal(
            np.concatenate(rank["logprobs"]), np.concatenate(ranks[0]["logprobs"])
        )
        assert_same_result(rank["whole"], expected["whole"])
        if case == ("dense", "cp2_alltoall"):  # Prompts are shared.
            assert rank["whole"].packing.num_packed < rank["whole"].num_tokens
        assert_same_result(
            rank["sparse"], expected["sparse"]
        )  # All data ranks but one have no sample.
        parts = rank["parts"]
        assert sum(part.loss_sum for part in parts) == pytest.approx(
            expected["whole"].loss_sum, rel=1e-5
        )
        assert sum(part.denominator for part in parts) == expected["whole"].denominator
        assert_near(rank["gradients"], expected["gradients"])
        assert_near(rank["part gradients"], expected["gradients"])
        assert rank["norms"] == pytest.approx(
            expected["norms"], rel=1e-4 if "lora" in kind else 1e-5
        )
        assert_near(rank["weights"], expected["weights"])
        assert_near(rank["merged"], expected["merged"])
        assert rank["merge lost"] == ranks[0]["merge lost"]
        if kind in WITH_ADAPTERS:
            assert rank["merge lost"] == pytest.approx(expected["merge lost"], rel=1e-5)
            assert rank["merge lost"] > 1e-3
        logprobs = expected["logprobs"]
        asked = [values for part in parts for values in part.logprobs]
        assert_near_logprobs(rank["logprobs"], logprobs)
        assert_near_logprobs(asked, [logprobs[place] for place in (1, 0, 3, 2, 10, 9)])
        assert rank["not finite"] == "loss nan at policy version 3"
        assert rank["faulty loss"] == "this loss is faulty"


@pytest.mark.medium
def test_gradients_on_three_axes_equal_one_device(one, all_assets):
    expected = one("dense")
    for rank in run_ranks(measure_gradients, 8, THREE_AXES, all_assets, timeout_s=200):
        for found in rank.values():
            assert_same_result(found["whole"], expected["whole"])
            assert_near(found["gradients"], expected["gradients"])
            assert_near_logprobs(found["logprobs"], expected["logprobs"])


@of_cases
def test_checkpoint_and_export_hold_the_weights(measured, one, case, all_assets, folder):
    kind, layout = case
    ranks = measured(case)
    for rank in ranks:
        assert_near(rank["restored"], rank["state"], relative=0.0)
        assert rank["continued"][0] == rank["continued"][1]  # bit for bit
        assert rank["continued"][0] == pytest.approx(one(kind)["continued"][0], rel=1e-4)
    checkpoint = folder / "_".join(case) / "checkpoint"
    version, state = restore((kind, "one"), all_assets, str(checkpoint))
    assert version == 3
    assert_near(state, ranks[0]["state"], relative=0.0)
    exported = HFFolder(checkpoint.with_name("exported"), tokenizer=True)
    adapter = spec_of(kind).adapter(spec_of(kind).model)
    read = dict(read_parameters(exported, adapter, ranks[0]["merged"]))
    assert_near({name: t.numpy() for name, t in read.items()}, ranks[0]["merged"], relative=0.0)
    of_one, of_ranks = (
        read_saved_tensors(folder / f"{kind}_{where}" / "checkpoint").shapes
        for where in ("one", layout)
    )
    assert {name for name in of_ranks if not name.startswith("random.")} == {*of_one} - {
        "random.1.0"
    }


@pytest.mark.medium
def test_checkpoint_of_one_device_loads_in_shards(one, all_assets, folder):
    cases = [("dense", "fsdp2_tp2"), ("dense", "pp2_fsdp2"), ("moe", "fsdp2_ep2_tp2_etp2")]
    for kind in ("dense", "moe"):
        one(kind)
    for rank in run_ranks(restore_all, 4, cases, all_assets, str(folder), timeout_s=100):
        for (kind, _), (version, state) in rank.items():
            assert version == 3
            assert_near(state, one(kind)["state"], relative=0.0)


@of_kinds("dense")
def test_losses_equal_one_device(measured, one, case):
    """Sequences split over ranks have their whole ratio, entropy, KL divergence and denominator."""
    numbers, gradients, logprobs = one("dense")["losses"]
    assert numbers["kl"] > 1e-3
    for rank in measured(case):
        ours, rank_gradients, rank_logprobs = rank["losses"]
        assert ours == pytest.approx(numbers, rel=1e-3)
        assert_near(rank_gradients, gradients, relative=1e-4)
        for actual, expected in zip(rank_logprobs, logprobs, strict=True):
            assert_near_logprobs([actual], [expected])


@of_kinds("dense")
def test_steps_in_the_backward_equal_those_after_it_on_one_device(measured, one, case):
    weights, norms = one("dense")["early"]
    for rank in measured(case):
        if "pp" not in sizes(case[1]):
            assert rank["early"][1] == pytest.approx(norms, rel=1e-5)
            assert_near(rank["early"][0], weights, relative=3e-6 if case[1] == "fsdp2" else 1e-5)


@of_kinds("dense", "lora")
def test_muon_steps_sharded_matrices_like_whole_ones(measured, one, case):
    _, expected = one(case[0])["muon"]
    ranks = measured(case)
    for rank in ranks:
        weights, changes = rank["muon"]
        assert_near(weights, ranks[0]["muon"][0], relative=0.0)
        assert_near(changes, expected, relative=1e-4)


@pytest.mark.medium
@pytest.mark.parametrize("layout", REDUCED)
def test_gradients_are_summed_between_ranks_in_the_reduce_dtype(measured, layout):
    for rank in measured(("dense", layout)):
        exact, rounded = rank["reduced"]["float32"], rank["reduced"]["bfloat16"]
        for name, gradient in rounded.items():
            assert gradient.dtype == exact[name].dtype == "float32"
            assert (gradient == torch.from_numpy(gradient).bfloat16().float().numpy()).all(), name
            difference = abs(gradient - exact[name]).max()
            assert 0.0 < difference < 0.02 * abs(exact[name]).max(), name


@of_kinds("moe")
def test_ranks_keep_their_share_of_the_experts(measured, case):
    size = sizes(case[1])
    ways = math.prod(size.get(axis, 1) for axis in ("fsdp", "etp", "cp", "pp"))
    kept = [
        sum(number for name, number in rank["num_local"].items() if ".experts." in name)
        for rank in measured(case)
    ]
    # Three experts of a pair of ranks are split into two and one; six over four ranks go by two.
    uneven = {"fsdp4_ep2": [3, 3, 6, 6], "fsdp2_cp2": [3, 3, 3, 0]}.get(case[1])
    assert kept == (
        [EXPERTS // ways] * len(kept)
        if uneven is None
        else [EXPERTS // n if n else 0 for n in uneven]
    )


def test_bias_moves_by_the_rate_in_each_step(one, all_assets):
    _, before = restore(("moe", "one"), all_assets, all_assets["moe"])
    after = one("moe")["weights"]
    for name in (name for name in after if name.endswith("bias")):
        moved = (after[name] - before[f"model.{name}"]) / BIAS_RATE
        # Three steps, each up, down or, at exactly the mean, not at all.
        np.testing.assert_allclose(moved, np.round(moved), atol=1e-4)
        assert 1 <= np.abs(moved).max() <= 3 + 1e-4


@of_kinds("lora", "lora_moe")
def test_only_adapters_move_and_their_folder_is_that_of_one_device(
    measured, one, case, all_assets, folder
):
    kind = case[0]
    _, start = restore((kind, "one"), all_assets, all_assets[kind])
    expected = one(kind)
    assert all(".lora_a" in name or name.endswith("_lora.lora_b") for name in expected["gradients"])
    assert len(expected["gradients"]) == 2 * (2 * 4 + 1)
    for rank in measured(case):
        for name, tensor in rank["weights"].items():
            assert np.array_equal(tensor, start[f"model.{name}"]) == ("_lora." not in name), name
        for reopened, trained in rank["reopened"]:
            np.testing.assert_array_equal(reopened, trained)
    theirs, ours = (
        load_file(folder / f"{kind}_{where}" / "adapter" / "adapter_model.safetensors")
        for where in ("one", case[1])
    )
    assert_near(dict(sorted(ours.items())), dict(sorted(theirs.items())))
