"""Checkpoints across processes: continued after a kill, and errors of one rank raised on all."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from rl.training.checkpoint_config import CheckpointConfig
from rl.training.checkpoint_files import saved_steps, step_folder
from rl.training.engine import TrainingEngine
from rl.training.failures import CheckpointError
from rl.training.optimizer import LRSchedule
from tests.support.distributed import run_ranks
from tests.support.forked import limit_files
from tests.training import parts
from tests.training.layouts import parallelism
from tests.training.parts import make_samples

pytestmark = pytest.mark.medium
SAVED_STEP, LAST_STEP = 5, 15
Losses = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


def make_engine(layout: str, assets: str | None) -> TrainingEngine:
    return parts.make_engine(
        assets,
        parallelism=parallelism(layout),
        checkpoint=CheckpointConfig(async_mode="async", keep_latest_k=0),
        lr_scheduler=LRSchedule.Config(warmup_steps=8),
    )


def train(engine: TrainingEngine, *, until: int) -> Losses:
    """Take the steps up to `until`, each with its own samples."""
    losses = []
    while engine.policy_version < until:
        first = engine.policy_version % 5
        result = engine.forward_backward(make_samples()[first : first + 7])
        losses.append((result.loss_sum, engine.optim_step().grad_norm))
    return losses


def train_and_be_killed(layout: str, assets: str, folder: str) -> None:
    """Save on the way, note the losses, and die in the save after the last step."""
    engine = make_engine(layout, assets)
    losses = train(engine, until=SAVED_STEP)
    engine.save_checkpoint(str(step_folder(folder, SAVED_STEP)), wait=False)
    losses += train(engine, until=LAST_STEP)
    Path(folder, f"losses-{os.environ['RANK']}.json").write_text(json.dumps(losses[SAVED_STEP:]))
    engine.checkpointer.wait()
    if dist.is_initialized():
        dist.barrier()
    engine.save_checkpoint(str(step_folder(folder, LAST_STEP)), wait=False)
    os.kill(os.getpid(), signal.SIGKILL)


def continue_training(layout: str, folder: str) -> Losses:
    """Take the steps after the saved one, in an engine that started from other weights."""
    engine = make_engine(layout, None)
    assert engine.load_checkpoint(str(step_folder(folder, SAVED_STEP))) == SAVED_STEP
    losses = train(engine, until=LAST_STEP)
    engine.close()
    return losses


def fail_to_save(assets: str, folder: str) -> tuple[str, str]:
    """Fill the disk of rank 1 only; return each rank's errors of the save and of loading a file damaged on
    rank 1."""
    engine = make_engine("fsdp2", assets)
    engine.save_checkpoint(str(step_folder(folder, 1)))
    damaged = next(Path(folder, "step-1").glob("__1_*"))
    content = bytearray(damaged.read_bytes())
    dist.barrier()
    if os.environ["RANK"] == "1":
        content[-5] ^= 1
        damaged.write_bytes(content)
    dist.barrier()
    try:
        engine.load_checkpoint(str(step_folder(folder, 1)))
        of_load = "nothing raised"
    except ValueError as error:
        of_load = str(error)
    if os.environ["RANK"] == "1":
        limit_files(2_000)
    try:
        engine.save_checkpoint(str(step_folder(folder, 2)), wait=False)
        engine.checkpointer.wait()
        of_save = "nothing raised"
    except CheckpointError as error:
        of_save = str(error)
    return of_load, of_save


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
