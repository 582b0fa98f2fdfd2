"""A whole healthy run while the wall clock jumps by hours every second: what it does, and what it leaves."""

import datetime
import re
import subprocess

import pytest

from rl.observability.metrics import read_metrics
from rl.observability.run_folder import read_status
from tests.support.jumping_clock import HOURS, jumping_clock
from tests.support.runs import ROOT, SHORT, command

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(240)]
NUM_STEPS = 5


def test_jumping_clock_changes_no_step_and_no_duration_and_the_run_leaves_nothing_behind(tmp_path, watch):
    options = (
        "--loop.num_steps",
        str(NUM_STEPS),
        "--loop.eval_every",
        "2",
        "--loop.max_off_policy_steps",
        "1",
    )
    saving = ("--trainer.checkpoint.interval", "2", "--trainer.checkpoint.async_mode", "async")
    done = subprocess.run(
        command(tmp_path, "jumps", *SHORT, *options, *saving),
        cwd=ROOT,
        env=watch.environment() | jumping_clock(tmp_path),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout
    folder = tmp_path / "jumps"
    assert str(watch.left(grace_s=10.0, run_folder=folder)) == "nothing"
    assert read_status(folder) == "finished"
    log = (folder / "logs" / "controller-0.log").read_text()
    stamps = re.findall(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", log, flags=re.MULTILINE)
    times = [datetime.datetime.fromisoformat(stamp) for stamp in stamps]
    ahead = max(times) - min(times)
    assert ahead > datetime.timedelta(hours=max(HOURS))  # the clock did jump, here and in the logs
    records = read_metrics(folder / "metrics.jsonl")
    steps = [record for record in records if "reward/mean" in record]
    assert [record["step"] for record in steps] == list(range(1, NUM_STEPS + 1))
    durations = [record[name] for record in records for name in record if name.startswith("time/")]
    assert len(durations) > 5 * NUM_STEPS
    assert all(0 <= duration < 200 for duration in durations)
