"""Checkpoints across processes: continued after a kill, and loaded in other layouts."""

import json

import numpy as np
import pytest

from rl.training.checkpoint_files import saved_steps
from tests.support.distributed import run_ranks
from tests.training.checkpoint_ranks import (
    LAST_STEP,
    SAVED_STEP,
    continue_training,
    fail_to_save,
    load_state,
    train_and_be_killed,
    train_and_save,
)
from tests.training.layouts import num_ranks

pytestmark = pytest.mark.medium


def test_ten_steps_after_a_kill_have_the_losses_of_an_uninterrupted_run(assets, tmp_path):
    layout, size = "fsdp2", 2
    with pytest.raises(RuntimeError, match="died"):
        run_ranks(train_and_be_killed, size, layout, assets, str(tmp_path), timeout_s=100)
    for rank, losses in enumerate(run_ranks(continue_training, size, layout, str(tmp_path), timeout_s=100)):
        expected = json.loads((tmp_path / f"losses-{rank}.json").read_text())
        assert len(losses) == LAST_STEP - SAVED_STEP == 10
        assert len(set(losses)) == 10
        assert losses == [tuple(step) for step in expected]  # bit for bit


@pytest.fixture(scope="module")
def saved(assets, tmp_path_factory):
    """Return the checkpoint of FSDP2 x TP2 and its state."""
    folder = str(tmp_path_factory.mktemp("saved") / "step-3")
    states = run_ranks(train_and_save, 4, "fsdp2_tp2", assets, folder, timeout_s=150)
    return folder, states[0]


@pytest.mark.parametrize("layout", ["one", "tp2"])
def test_checkpoint_of_fsdp2_x_tp2_loads_in_other_layouts_with_the_same_bits(saved, layout):
    folder, expected = saved
    if layout == "one":
        answers = [load_state(layout, folder)]
    else:
        answers = run_ranks(load_state, num_ranks(layout), layout, folder, timeout_s=150)
    assert any(name.endswith("exp_avg_sq") for name in expected)
    for version, state in answers:
        assert version == 3
        assert list(state) == list(expected)
        for name, tensor in expected.items():
            np.testing.assert_array_equal(state[name], tensor, err_msg=name)


def test_error_of_one_rank_is_raised_on_all_ranks(assets, tmp_path):
    for of_load, of_save in run_ranks(fail_to_save, 2, assets, str(tmp_path), timeout_s=100):
        assert "step-1/__1_0.distcp is corrupted" in of_load
        assert "step-2 was not written" in of_save
        assert "File too large" in of_save
    assert list(saved_steps(tmp_path)) == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
