"""One undisturbed synchronous run, and what has to give its numbers: runs in which trainer,
generator, a host and the controller die, a run that continues from its checkpoint, and a script.
"""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.controller_loop import train
from rl.observability.metrics import read_metrics
from rl.observability.run_folder import read_status
from rl.training.checkpoints.files import list_steps, read_state
from rl.types import LoopPosition
from tests.support.faulty_configs import chaos
from tests.support.runs import run_to_the_end
from tools.chaos import main

pytestmark = pytest.mark.slow
CHAOS = ("--module", "tests.support.faulty_configs", "--config", "chaos")
LIMIT_S = 300


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The undisturbed run and those that lost processes."""

    folder: Path
    status: int
    printed: str

    @property
    def steps(self):
        records = read_metrics(self.folder / "undisturbed" / "metrics.jsonl")
        return [record for record in records if "reward/mean" in record]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        printed = []
        patch.setattr("builtins.print", lambda text, **_: printed.append(text))
        status = main(["--cases", "fixed", "--folder", str(folder), "--limit_s", str(LIMIT_S)])
    return Runs(folder=folder, status=status, printed="\n".join(printed))


@pytest.mark.timeout(4 * LIMIT_S)
def test_each_loss_is_recovered_with_the_same_numbers(runs):
    assert runs.status == 0, runs.printed
    names = json.loads(runs.printed.splitlines()[-1])["recovery_s"]
    assert len(names) == 2
    for step in runs.steps:  # trainer and generator agree in every bit although the weights change
        assert step["logprob_diff/identical"] == 1
        assert step["logprob_diff/max"] == step["logprob_diff/mean"] == 0.0
        assert step["loss/grad_norm"] > 0
    weights = {
        (runs.folder / name / "checkpoints" / "hf" / "model.safetensors").read_bytes()
        for name in ("undisturbed", *names)
    }
    assert len(weights) == 1


@pytest.mark.timeout(4 * LIMIT_S)
def test_continued_run_takes_the_steps_of_an_uninterrupted_one(runs, tmp_path):
    """The continued run pushes its weights another way, which must not matter."""
    whole = runs.folder / "undisturbed" / "checkpoints"
    assert list(list_steps(whole)) == [1, 2, 3, 4]
    assert read_state(whole / "step-2").position == LoopPosition(
        step=2, num_problems=16, evaluated=True, num_records=4
    )
    rest = run_to_the_end(
        tmp_path, "rest", *CHAOS,
        "--trainer.checkpoint.initial_load_path", str(whole),
        "--trainer.checkpoint.load_step", "2",
        "--trainer.checkpoint.initial_load_model_only", "False",
        "--trainer.checkpoint.last_save_model_only", "True",
        "--trainer.checkpoint.last_save_in_hf", "False",
        "--trainer.checkpoint.folder", str(tmp_path / "elsewhere"),
        "--weights.transport", "files",
        limit_s=LIMIT_S,
    )  # fmt: skip
    assert rest.status == 0, rest.output
    assert [record["step"] for record in rest.steps] == [3, 4]
    for continued, went_on in zip(rest.steps, runs.steps[2:], strict=True):
        for key in ("policy_version", "reward/mean", "completion/tokens_mean", "loss/lr"):
            assert continued[key] == went_on[key], key
        for key in ("loss/mean", "loss/grad_norm", "loss/entropy_mean"):
            assert continued[key] == went_on[key], key
    assert list((rest.folder / "weights").rglob("v*")) == []
    assert not (rest.folder / "checkpoints").exists()
    assert f"{tmp_path}/elsewhere/step-4" in rest.output
    assert list(list_steps(tmp_path / "elsewhere")) == [3, 4]
    assert read_state(tmp_path / "elsewhere" / "step-4").model_only


@pytest.mark.timeout(4 * LIMIT_S)
def test_script_over_open_run_has_the_numbers_of_a_controller_run(runs, tmp_path):
    config = chaos()
    config.dump_folder, config.name = str(tmp_path), "script"
    history = asyncio.run(train(config))
    rewards, norms = zip(*history, strict=True)
    expected = [step["reward/mean"] for step in runs.steps]
    assert list(rewards) == pytest.approx(expected, abs=1e-12)
    assert list(norms) == [step["loss/grad_norm"] for step in runs.steps]
    assert min(norms) > 0
    assert read_status(tmp_path / "script") == "finished"
