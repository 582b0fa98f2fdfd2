"""Checkpoints across processes: killed and continued, and opened in other layouts."""

import json

import numpy as np
import pytest

from rl.training.checkpoint_files import saved_steps
from tests.support.distributed import run_ranks
from tests.training.checkpoint_ranks import (
    LAST_STEP,
    PLACES,
    SAVED_STEP,
    continue_training,
    fail_to_save,
    load_state,
    train_and_be_killed,
    train_and_save,
)
from tests.training.parts import write_assets

pytestmark = pytest.mark.medium


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return write_assets(tmp_path_factory.mktemp("assets") / "model")


@pytest.mark.parametrize("layout", ["one", "fsdp2"])
def test_ten_steps_after_a_kill_have_the_losses_of_a_run_that_went_on(assets, tmp_path, layout):
    num_ranks = PLACES[layout][0]
    with pytest.raises(RuntimeError, match="died"):
        run_ranks(train_and_be_killed, num_ranks, layout, assets, str(tmp_path), timeout_s=100)
    for rank, losses in enumerate(
        run_ranks(continue_training, num_ranks, layout, str(tmp_path), timeout_s=100)
    ):
        expected = json.loads((tmp_path / f"losses-{rank}.json").read_text())
        assert len(losses) == LAST_STEP - SAVED_STEP == 10
        assert len(set(losses)) == 10
        assert losses == [tuple(step) for step in expected]  # bit for bit


@pytest.fixture(scope="module")
def saved(assets, tmp_path_factory):
    """Of FSDP2 x TP2: the folder and its state."""
    folder = str(tmp_path_factory.mktemp("saved") / "step-3")
    states = run_ranks(train_and_save, 4, "fsdp2_tp2", assets, folder, timeout_s=150)
    return folder, states[0]


@pytest.mark.parametrize("layout", ["one", "tp2", pytest.param("fsdp4", marks=pytest.mark.slow)])
def test_a_checkpoint_of_fsdp2_x_tp2_opens_in_other_layouts_with_the_same_bits(saved, layout):
    folder, expected = saved
    if layout == "one":
        answers = [load_state(layout, folder)]
    else:
        answers = run_ranks(load_state, PLACES[layout][0], layout, folder, timeout_s=150)
    assert any(name.endswith("exp_avg_sq") for name in expected)
    for version, state in answers:
        assert version == 3
        assert list(state) == list(expected)
        for name, tensor in expected.items():
            np.testing.assert_array_equal(state[name], tensor, err_msg=name)


def test_what_goes_wrong_on_one_rank_is_told_on_all(assets, tmp_path):
    for of_load, of_save in run_ranks(fail_to_save, 2, assets, str(tmp_path), timeout_s=100):
        assert "step-1/__1_0.distcp is corrupted" in of_load
        assert "step-2 was not written" in of_save
        assert "File too large" in of_save
    assert list(saved_steps(tmp_path)) == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
