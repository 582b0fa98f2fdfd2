"""Checkpoints across processes: continued after a kill, and loaded in other layouts."""

import json

import pytest

from rl.training.checkpoint_files import saved_steps
from tests.support.distributed import run_ranks
from tests.training.checkpoint_ranks import (
    LAST_STEP,
    SAVED_STEP,
    continue_training,
    fail_to_save,
    train_and_be_killed,
)

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


def test_error_of_one_rank_is_raised_on_all_ranks(assets, tmp_path):
    for of_load, of_save in run_ranks(fail_to_save, 2, assets, str(tmp_path), timeout_s=100):
        assert "step-1/__1_0.distcp is corrupted" in of_load
        assert "step-2 was not written" in of_save
        assert "File too large" in of_save
    assert list(saved_steps(tmp_path)) == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
