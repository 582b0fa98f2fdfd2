"""Runs that fail or are stopped end with a clear message and leave nothing behind: no process,
port, shared memory, lock or temporary file. `tests.support.leaks` looks for them.
"""

import re
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from rl.models.files.hf import HFFolder
from rl.observability.run_folder import read_status
from rl.training.checkpoints.files import check_files, list_steps
from rl.training.failures import read_batch
from tests.support.leaks import Watch, drop_files_of_others, list_shared_memory
from tests.support.runs import kill_role, run_to_the_end

pytestmark = [pytest.mark.medium, pytest.mark.timeout(300)]
LONG = (pytest.mark.slow, pytest.mark.long)
GRACE_S = 10.0
FAULTY = ("--module", "tests.support.faulty_configs", "--config")


@pytest.fixture
def watch():
    """Watcher of what a run leaves on the machine, in a folder whose path is short enough for
    sockets.
    """
    with tempfile.TemporaryDirectory(prefix="relay-t-", dir="/tmp") as folder:
        watch = Watch(Path(folder))
        yield watch
        watch.end()


def test_nan_loss_stops_the_run_with_its_step_and_batch_and_leaves_nothing_behind(tmp_path, watch):
    run = run_to_the_end(tmp_path, "nan", *FAULTY, "nan_loss", limit_s=150, env=watch.environment())
    assert run.status == 1
    assert watch.left(grace_s=GRACE_S, run_folder=run.folder) == []
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
    assert list(list_steps(run.folder / "checkpoints")) == [1]
    check_files(run.folder / "checkpoints" / "step-1", tensors=True)


@pytest.mark.slow
@pytest.mark.long
def test_killed_trainer_that_is_not_replaced_stops_the_run_with_its_role_rank_and_step(tmp_path):
    before = list_shared_memory()
    run = run_to_the_end(
        tmp_path, "killed", *FAULTY, "short", "--recovery.max_restarts", "0",
        "--loop.num_steps", "500", "--loop.eval_every", "500", "--loop.sampling.max_tokens", "96",
        after=("reward", kill_role("trainer")), limit_s=150,
    )  # fmt: skip
    assert run.status == 1, run.output
    assert "evaluation at step 0 (8 problems): done after" in run.output
    # On a busy machine Monarch may take 30 s to report, and the call does not wait for the report.
    reason = r"(.*Killed\(sig=9\)|its process ended)"
    error = rf"step \d+: trainer\.forward_backward failed: rank 0 of 1 is dead: {reason}"
    assert re.fullmatch(rf"error: the run stopped: {error}", run.output.splitlines()[-1]), (
        run.output
    )
    assert "Traceback" not in run.output
    # Only the trainer could have saved the last whole step.
    assert not list_steps(run.folder / "checkpoints")
    assert f"continue with --resume {run.folder}" not in run.output
    log = (run.folder / "logs" / "controller-0.log").read_text()
    assert re.search(error, log)
    assert "Traceback (most recent call last)" in log
    assert read_status(run.folder) == "running"
    assert not drop_files_of_others(list_shared_memory() - before, own=())


@pytest.mark.parametrize(
    ("options", "line"),
    [
        pytest.param((), "reward", id="in a step"),
        pytest.param((), "starting", id="in the start", marks=LONG),
        pytest.param(("--launch.hosts", "process"), "reward", id="on simulated hosts", marks=LONG),
    ],
)
def test_killed_controller_leaves_nothing_behind(tmp_path, watch, options, line):
    run = run_to_the_end(
        tmp_path, "killed", *FAULTY, "short", "--loop.num_steps", "500", *options,
        after=(line, subprocess.Popen.kill), limit_s=150, env=watch.environment(),
    )  # fmt: skip
    assert run.status == -signal.SIGKILL
    assert watch.left(grace_s=GRACE_S, run_folder=run.folder) == []
