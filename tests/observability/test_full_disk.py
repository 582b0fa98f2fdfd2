"""Full disks and read-only folders: a lost file that is required ends the run, any other is a warning."""

import asyncio
import io
import json
import logging
import re
import tempfile
from pathlib import Path

import pytest

from actors.members import record_process
from rl.observability.logs import setup_logging
from rl.observability.metrics import MetricsWriter, read_metrics
from rl.observability.recorder import Recorder, RecorderConfig, read_rollouts
from rl.observability.run_folder import RunFolder, read_status
from rl.utils.errors import RunError
from tests.support.disks import FULL, SmallDisk, on_small_disk, run_unprivileged
from tests.support.fakes import FakePolicy
from tests.support.loops import half_right, make_loop
from tests.support.virtual_time import run_in_virtual_time


def said(function):
    """Return the error message of `function`."""
    try:
        function()
    except (RunError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class FillsAt:
    """Sink that fills or frees the disk when a step is written."""

    def __init__(self, disk: SmallDisk, *, full: int, free: int = 0) -> None:
        self.disk, self.full, self.free = disk, full, free

    def write(self, record):
        if record["step"] == self.full:
            self.disk.fill()
        elif record["step"] == self.free:
            self.disk.free()


class _Longer:
    """Recorder of records that each need a page, so that a full disk has room for none."""

    def __init__(self, sink):
        self.sink = sink

    def write(self, record):
        self.sink.write({**record, **{f"filler/{number:04}": float(number) for number in range(400)}})


def assert_matches(pattern, text):
    assert re.fullmatch(pattern, text, flags=re.DOTALL), text


def test_metrics_that_cannot_be_written_stop_the_run(tmp_path):
    def run(disk):
        policy = FakePolicy(reply=half_right)
        loop, _ = make_loop(policy, num_steps=4)
        with MetricsWriter(disk.folder / "metrics.jsonl") as metrics:
            loop.sinks = [FillsAt(disk, full=3), _Longer(metrics)]
            error = said(lambda: run_in_virtual_time(loop.run()))
        steps = [record["step"] for record in read_metrics(disk.folder / "metrics.jsonl")]
        whole = (disk.folder / "metrics.jsonl").read_text().endswith("}\n")
        return json.dumps([error, steps, whole, len(policy.saved)])

    error, steps, whole, num_saved = json.loads(on_small_disk(run, tmp_path))
    says = rf"UnwrittenError: step 3: {tmp_path}/metrics\.jsonl was not written, its previous content is intact: "
    assert_matches(says + FULL, error)
    assert (steps, whole) == ([1, 2], True)
    assert num_saved == 0  # a resumed run repeats the lost step


def test_rollouts_that_cannot_be_written_are_a_warning(tmp_path):
    def run(disk):
        loop, records = make_loop(FakePolicy(reply=half_right), num_steps=5)
        loop.recorder = Recorder(disk.folder / "rollouts.jsonl", config=RecorderConfig())
        # The end of step 1 is written during step 2, and so on.
        loop.sinks = [records, FillsAt(disk, full=1, free=4)]
        console = io.StringIO()
        undo = setup_logging("controller", console=console)
        asyncio.run(loop.run())
        undo()
        steps = sorted({line["step"] for line in read_rollouts(disk.folder / "rollouts.jsonl")})
        return json.dumps([[r["step"] for r in records.records], steps, console.getvalue()])

    done, recorded, console = json.loads(on_small_disk(run, tmp_path, num_bytes=1 << 20))
    assert done == [1, 2, 3, 4, 5]
    assert recorded[-1] == 5
    assert len(recorded) < 5
    (warning,) = console.splitlines()
    says = rf".*WARNING .*/rollouts\.jsonl was not written: {FULL}; the run goes on"
    assert_matches(says, warning)


def test_logs_that_cannot_be_written_are_one_warning(tmp_path):
    def log(disk):
        console = io.StringIO()
        undo = setup_logging("trainer", rank=2, folder=disk.folder, console=console)
        logger = logging.getLogger("rl.training.engine")
        logger.info("before")
        disk.fill()
        for number in range(3):
            logger.info("lost %d %s", number, "x" * 5000)
        disk.free()
        logger.info("after")
        undo()
        return json.dumps([(disk.folder / "trainer-2.log").read_text(), console.getvalue()])

    written, console = json.loads(on_small_disk(log, tmp_path))
    first, *warned, last = written.splitlines()
    assert (first.rpartition(": ")[2], last.rpartition(": ")[2]) == ("before", "after")
    assert warned == console.splitlines()  # a warning is short enough for the rest of a page
    (warning,) = console.splitlines()
    says = rf".* WARNING  trainer\[2\] .*/trainer-2\.log was not written: {FULL}; the run goes on"
    assert_matches(says, warning)


def test_run_folder_without_disk_space_is_refused_or_stays_unfinished(tmp_path):
    def finish(disk):
        with RunFolder.create(disk.folder, "run") as folder:
            disk.fill()
            unfinished = said(folder.mark_finished)
            refused = said(lambda: RunFolder.create(disk.folder / "outputs", "run"))
            return json.dumps([unfinished, refused, read_status(folder.path), disk.entries()])

    unfinished, refused, status, entries = json.loads(on_small_disk(finish, tmp_path))
    assert_matches(
        rf"UnwrittenError: .*/run/status\.json was not written, its previous content .*: {FULL}", unfinished
    )
    assert_matches(rf"ValueError: .*/outputs/run cannot be a run's folder: {FULL}", refused)
    assert status == "running"
    assert entries == ["outputs", "run", "run/.lock", "run/checkpoints", "run/logs", "run/status.json"]


# Folders without write permission, seen by an unprivileged process


@pytest.fixture
def folder():
    """Yield a folder that everybody can enter and write to, unlike pytest's own folders."""
    with tempfile.TemporaryDirectory(prefix="relay-test-") as path:
        Path(path).chmod(0o777)
        yield Path(path)


def test_read_only_folders_are_refused_stop_the_metrics_and_are_a_warning_for_logs(folder, capsys):
    def go_on():
        (folder / "outputs").mkdir()
        (folder / "outputs").chmod(0o555)
        refused = said(lambda: RunFolder.create(folder / "outputs" / "today", "run"))
        with RunFolder.create(folder, "run") as made:
            made.path.chmod(0o555)
            made.logs.chmod(0o555)
            undo = setup_logging("controller", folder=made.logs)
            unwritten = said(lambda: MetricsWriter(made.metrics))
            record_process(made.logs, role="trainer", rank=1)
            undo()
        return json.dumps([refused, unwritten, capsys.readouterr().err])

    refused, unwritten, console = json.loads(run_unprivileged(go_on))
    path = folder / "run"
    assert refused == f"ValueError: {folder}/outputs/today/run cannot be a run's folder: Permission denied"
    says = f"{path}/metrics.jsonl was not written, its previous content is intact: Permission denied"
    assert unwritten == f"UnwrittenError: {says}"
    recorded, logged = console.splitlines()
    assert recorded.endswith(f"{path}/logs: trainer-1 is not recorded: Permission denied")
    assert logged.endswith(
        f"{path}/logs/controller-0.log was not written: Permission denied; the run goes on"
    )
