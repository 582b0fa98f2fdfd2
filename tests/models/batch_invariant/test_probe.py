from functools import partial

import pytest
import torch
import torch.nn.functional as F

from rl.models.batch_invariant import probe
from rl.models.batch_invariant.probe import (
    check_machine,
    check_rows,
    compare_threads,
    has_equal_bits,
    list_row_counts,
)
from rl.models.qwen3 import model_registry
from rl.utils.caches import CHECKS_VARIABLE

TINY = model_registry("tiny").model


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """No machine is known to have passed."""
    monkeypatch.delenv(CHECKS_VARIABLE, raising=False)


def test_layers_of_the_tiny_model_pass_in_whole_tiles():
    for dtype in (torch.float32, torch.bfloat16):
        check_machine(TINY, dtype=dtype, max_rows=512)


def test_layer_that_depends_on_the_number_of_rows_is_rejected():
    # Products of few rows are summed in another order, hence the tiles.
    message = (
        r"batch_invariant=True: must be False on this machine \(.+, PyTorch 2\..*, \d+ threads\): "
        r"a linear layer 1024 -> 512 in float32 gives other bits in batches of 1.* rows than in "
        r"tiles of 32"
    )
    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0)) / 32
    layer = partial(F.linear, weight=weight)
    with pytest.raises(ValueError, match=message):
        check_rows(
            "a linear layer 1024 -> 512",
            layer,
            width=1024,
            dtype=torch.float32,
            counts=[1, 2, 3, 5, 32],
        )
    check_rows("whole tiles", layer, width=1024, dtype=torch.float32, counts=[32, 64, 96])


def test_layer_that_mixes_rows_is_rejected():
    with pytest.raises(
        ValueError, match="centred in float32 gives other bits in batches of 64, 96 rows"
    ):
        check_rows(
            "centred",
            lambda x: x - x.mean(0),
            width=8,
            dtype=torch.float32,
            counts=list_row_counts(96),
        )


def test_one_thread_and_two_give_the_tiny_model_the_same_bits():
    for dtype in (torch.float32, torch.bfloat16):
        assert has_equal_bits(TINY, dtype=dtype, max_rows=512, num_threads=2, float32_head=True)


@pytest.mark.parametrize("other", [None, "Linear", "RMSNorm"])
def test_gradients_of_every_layer_count(monkeypatch, other):
    # Whether threads divide the sum of a norm's gradient depends on the processor.
    def compare(layer, *, gradients, **_):
        assert gradients
        return type(layer).__name__ != other

    monkeypatch.setattr(probe, "compare_threads", compare)
    equal = has_equal_bits(
        TINY, dtype=torch.float32, max_rows=64, num_threads=2, gradients=True, float32_head=True
    )
    assert equal == (other is None)


def test_random_numbers_of_the_run_do_not_depend_on_the_comparison():
    before = torch.get_rng_state()
    assert has_equal_bits(TINY, dtype=torch.float32, max_rows=64, num_threads=2)
    assert torch.equal(torch.get_rng_state(), before)


def test_model_with_a_very_large_product_is_not_compared(monkeypatch):
    monkeypatch.setattr(probe, "LARGEST_WEIGHT", 128 * 128 - 1)
    assert not has_equal_bits(TINY, dtype=torch.float32, max_rows=64, num_threads=2)


def test_loss_whose_sum_threads_would_divide_is_found():
    # PyTorch divides sums of more than 32,768 numbers.
    assert probe._is_sum_equal(32_000, num_threads=2)
    assert not probe._is_sum_equal(200_000, num_threads=2)


class SumOfAll(torch.nn.Module):
    def forward(self, x):
        return x + x.sum()


def test_layer_whose_threads_divide_a_sum_is_found():
    compare = partial(compare_threads, width=512, dtype=torch.float32, num_threads=2)
    assert not compare(SumOfAll(), rows=512, gradients=False)
    assert not compare(SumOfAll(), rows=512, gradients=True)
    assert compare(torch.nn.Identity(), rows=512, gradients=True)


def test_machine_that_has_passed_is_not_tested_again_unless_something_changed(
    monkeypatch, tmp_path
):
    monkeypatch.setenv(CHECKS_VARIABLE, str(tmp_path / "checks"))
    check = partial(check_machine, TINY, dtype=torch.float32)
    check(max_rows=64)
    (note,) = (tmp_path / "checks").iterdir()

    def refuse(*_, **__):
        raise ValueError("tested")

    monkeypatch.setattr(probe, "check_rows", refuse)
    check(max_rows=64)
    with pytest.raises(ValueError, match="tested"):
        check(max_rows=96)
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    with pytest.raises(ValueError, match="tested"):
        check(max_rows=64)
    monkeypatch.delenv("MKL_CBWR")
    note.unlink()
    with pytest.raises(ValueError, match="tested"):
        check(max_rows=64)
    # A machine that failed is not remembered.
    assert not list((tmp_path / "checks").iterdir())


def test_machine_is_tested_where_nothing_can_be_noted(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv(CHECKS_VARIABLE, str(tmp_path / "file"))
    for _ in range(2):
        check_machine(TINY, dtype=torch.float32, max_rows=64)
