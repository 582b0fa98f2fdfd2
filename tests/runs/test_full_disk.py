"""A whole run on a disk that becomes full."""

import re
import subprocess
import sys

import pytest

from rl.observability.metrics import read_metrics
from rl.observability.run_folder import read_status
from tests.support.disks import FULL
from tests.support.runs import ROOT, SHORT, command

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]
MODEL_MB, CHECKPOINT_MB = 3.2, 9.7
DISK = int((MODEL_MB + 1.6 * CHECKPOINT_MB) * 1e6)
"""Bytes for the starting model and one checkpoint; the second checkpoint does not fit."""
LONGEST = int(2 * MODEL_MB * 1e6)
"""File size limit in place of a small disk; no checkpoint fits."""


def test_full_disk_stops_the_run_and_keeps_everything_saved_before(tmp_path):
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    saving = ("--trainer.checkpoint.interval", "1", "--trainer.checkpoint.async_mode", "async")
    run = command(disk, "full", *SHORT, *saving, "--loop.num_steps", "4")
    ran = subprocess.run(
        [sys.executable, "-m", "tests.support.on_disk", str(disk), str(DISK), str(LONGEST), str(kept), *run],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 1, ran.stdout
    assert "Traceback" not in ran.stdout
    folder = kept / "full"
    saved = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert saved in (["step-1"], [])  # none if files are limited to this size
    failed = len(saved) + 1
    says = (
        rf"error: the run stopped: after step \d: checkpoint {disk}/full/checkpoints/step-{failed} was not "
    )
    says += rf"written, earlier checkpoints are unchanged: .*{FULL}.*"
    assert re.search(says, ran.stdout), ran.stdout
    steps = [record["step"] for record in read_metrics(folder / "metrics.jsonl") if "reward/mean" in record]
    assert steps[:failed] == list(range(1, failed + 1))
    assert (folder / "metrics.jsonl").read_text().endswith("}\n")
    assert read_status(folder) == "running"
    assert [path for path in folder.rglob(".*") if path.name not in (".lock", ".metadata")] == []
