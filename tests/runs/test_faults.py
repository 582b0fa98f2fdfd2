"""Failing runs end with a clear message and leave nothing behind. The leak check of tests/conftest.py covers
processes and shared memory of all runs; tests here look at everything else after an error or one signal.
"""

import re
import signal

import pytest

from rl.models.hf import HFFolder
from rl.observability.run_folder import read_status
from rl.training.checkpoint_files import check_sizes, saved_steps
from rl.training.failures import read_batch
from tests.support.leaks import drop_files_of_others, list_shared_memory
from tests.support.runs import interrupt_after_line, kill_role_after_line, run_to_the_end

pytestmark = [pytest.mark.medium, pytest.mark.timeout(180)]
GRACE_S = 10.0
FAULTY = ("--module", "tests.support.faulty_configs", "--config")


def test_nan_loss_stops_the_run_with_its_step_and_batch_and_leaves_nothing_behind(tmp_path, watch):
    run = run_to_the_end(tmp_path, "nan", *FAULTY, "nan_loss", limit_s=150, env=watch.environment())
    assert run.status == 1
    assert str(watch.left(grace_s=GRACE_S, run_folder=run.folder)) == "nothing"
    assert "nan" in run.output
    assert "step 2: loss nan at policy version 1" in run.output
    assert "Traceback" not in run.output
    assert [r["step"] for r in run.steps] == [1]
    log = (run.folder / "logs" / "controller-0.log").read_text()
    (start,) = re.findall(r"starting from (.*)", log)
    HFFolder(start, tokenizer=True)
    (batch,) = run.folder.glob("nan_batch_version_1*")
    assert len(read_batch(batch)) == 8 * 4
    assert read_status(run.folder) == "running"  # not marked as finished
    assert run.output.splitlines()[-2] == f"continue with --resume {run.folder}"
    # The checkpoint in progress was completed.
    assert list(saved_steps(run.folder / "checkpoints")) == [1]
    check_sizes(run.folder / "checkpoints" / "step-1")


@pytest.mark.slow
def test_difference_stays_flat_with_a_learning_rate_of_zero(tmp_path):
    still = ("--trainer.optimizer.lr", "0", "--task.reward", "noise", "--loop.num_steps", "6")
    run = run_to_the_end(tmp_path, "still", *FAULTY, "short", *still, limit_s=150)
    assert run.status == 0, run.output
    assert all(r["loss/grad_norm"] > 0 for r in run.steps)
    assert all(r["logprob_diff/mean"] < 1e-5 for r in run.steps)
    assert all(abs(r["loss/ratio_mean"] - 1) < 1e-5 for r in run.steps)
    finished, checkpoint, exported, curve, timeline, report, bottleneck, setting = run.output.splitlines()[
        -8:
    ]
    assert finished.startswith("finished: 6 steps in ")
    assert checkpoint.endswith(f" {run.folder}/checkpoints/step-6")
    assert exported.endswith(f" {run.folder}/checkpoints/hf")
    assert curve.endswith(f" {run.folder}/learning_curve.png")
    assert timeline.endswith(f" {run.folder}/timeline.json")
    assert report.endswith(f" python -m rl.report {run.folder}")
    assert re.search(r"  bottleneck      .* of a step.*: ", bottleneck)
    assert re.search(r"  would move it   --[a-z_.]+", setting)


@pytest.mark.slow
def test_broken_sync_stops_a_run_with_a_bound(tmp_path):
    bound = ("--loop.max_logprob_diff", "1e-5")
    run = run_to_the_end(tmp_path, "bound", *FAULTY, "broken_sync", *bound, limit_s=150)
    assert run.status == 1
    assert "step 2: the logprobs of trainer and generator differ" in run.output


def test_killed_trainer_that_is_not_replaced_stops_the_run_with_its_role_rank_and_step(tmp_path):
    before = list_shared_memory()
    run = kill_role_after_line(
        tmp_path, "killed", *FAULTY, "short", "--recovery.max_restarts", "0",
        "--loop.num_steps", "500", "--loop.eval_every", "500", "--loop.sampling.max_tokens", "96",
        line="reward", role="trainer", limit_s=60,
    )  # fmt: skip
    assert run.status == 1, run.output
    assert "evaluation at step 0 (8 problems): done after" in run.output
    # On a busy machine Monarch may take 30 s to report, and the call does not wait for the report.
    reason = r"(.*Killed\(sig=9\)|its process ended)"
    error = rf"step \d+: trainer\.forward_backward failed: rank 0 of 1 is dead: {reason}"
    assert re.fullmatch(rf"error: the run stopped: {error}", run.output.splitlines()[-1]), run.output
    assert "Traceback" not in run.output
    # Only the trainer could have saved the last whole step.
    assert not saved_steps(run.folder / "checkpoints")
    assert f"continue with --resume {run.folder}" not in run.output
    log = (run.folder / "logs" / "controller-0.log").read_text()
    assert re.search(error, log)
    assert "Traceback (most recent call last)" in log
    assert read_status(run.folder) == "running"
    assert not drop_files_of_others(list_shared_memory() - before, own=())


@pytest.mark.parametrize(
    ("signal_number", "status", "line"),
    [
        pytest.param(signal.SIGINT, 130, "reward", id="ctrl-c in a step"),
        pytest.param(signal.SIGTERM, 143, "starting", id="sigterm while starting", marks=pytest.mark.slow),
    ],
)
def test_interrupted_run_leaves_nothing_behind(tmp_path, watch, signal_number, status, line):
    run = interrupt_after_line(
        tmp_path, "stop", *FAULTY, "short", "--loop.num_steps", "500",
        line=line, signal_number=signal_number, limit_s=60, env=watch.environment(),
    )  # fmt: skip
    assert run.status == status, run.output
    assert "Traceback" not in run.output
    assert str(watch.left(grace_s=GRACE_S, run_folder=run.folder)) == "nothing"
    again = run_to_the_end(tmp_path, "stop", *FAULTY, "short", limit_s=60)
    assert again.status == 2
    assert "unfinished run" in again.output
