"""Checkpoints of whole runs."""

import pytest

from rl.training.checkpoint_files import read_state, saved_steps
from rl.types import LoopPosition
from tests.support.runs import SHORT, run_to_the_end

pytestmark = [pytest.mark.medium, pytest.mark.timeout(450)]


def checkpoint(**fields):
    return [
        text
        for name, value in fields.items()
        for text in (f"--trainer.checkpoint.{name}", str(value))
    ]


@pytest.mark.slow
def test_continued_run_takes_the_steps_of_an_uninterrupted_one(tmp_path):
    """The continued run publishes its weights another way, which must not matter."""
    elsewhere = tmp_path / "elsewhere"
    whole = run_to_the_end(
        tmp_path, "whole", *SHORT, "--loop.num_steps", "4",
        *checkpoint(folder=elsewhere, interval=2, async_mode="async", create_seed_checkpoint=True),
        limit_s=200,
    )  # fmt: skip
    assert whole.status == 0, whole.output
    assert f"{elsewhere}/step-4" in whole.output
    assert not (whole.folder / "checkpoints").exists()
    assert list(saved_steps(elsewhere)) == [0, 2, 4]
    assert (elsewhere / "hf" / "model.safetensors").is_file()
    assert read_state(elsewhere / "step-2").position == LoopPosition(
        step=2, num_problems=16, evaluated=True, num_records=2
    )

    rest = run_to_the_end(
        tmp_path, "rest", *SHORT, "--loop.num_steps", "4",
        *checkpoint(initial_load_path=elsewhere, load_step=2, initial_load_model_only=False),
        *checkpoint(last_save_model_only=True, last_save_in_hf=False),
        "--weights.transport", "files",
        limit_s=200,
    )  # fmt: skip
    assert rest.status == 0, rest.output
    assert [record["step"] for record in rest.steps] == [3, 4]
    for continued, went_on in zip(rest.steps, whole.steps[2:], strict=True):
        for key in ("policy_version", "reward/mean", "completion/tokens_mean", "loss/lr"):
            assert continued[key] == went_on[key], key
        for key in ("loss/mean", "loss/grad_norm", "loss/entropy_mean"):
            assert continued[key] == pytest.approx(went_on[key], rel=1e-4), key
    assert list((rest.folder / "weights").rglob("v*")) == []
    assert [path.name for path in (rest.folder / "checkpoints").iterdir()] == ["step-4"]
    assert read_state(rest.folder / "checkpoints" / "step-4").model_only
