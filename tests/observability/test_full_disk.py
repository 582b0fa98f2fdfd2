"""Full disks and read-only folders: a lost file that is required ends the run, any other is a
warning.

Limits on the length of files, in a forked copy of this process, stand for a full disk.
"""

import asyncio
import io
import logging
import os
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from actors.launch.member import record_process
from actors.prepare import prepare_run
from rl.config.registry import resolve
from rl.observability.logs import setup_logging
from rl.observability.metrics import MetricsWriter, cut_back, read_metrics
from rl.observability.recorder import Recorder, RecorderConfig, read_rollouts
from rl.observability.run_folder import RunFolder, read_status
from rl.types import LoopPosition
from rl.utils.errors import RunError
from tests.support.fakes import FakePolicy
from tests.support.forked import answer_in_fork, limit_files
from tests.support.loops import half_right, make_loop
from tests.support.virtual_time import run_in_virtual_time

FULL = "File too large"
NOBODY = 65534


def said(function):
    """Return the error message of `function`."""
    try:
        function()
    except (RunError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class CallsAt:
    """Sink that calls a function when a step is written."""

    def __init__(self, calls):
        self.calls = calls

    def write(self, record):
        self.calls.get(record["step"], lambda: None)()


def test_metrics_that_cannot_be_written_stop_the_run(tmp_path):
    file = tmp_path / "metrics.jsonl"

    def run():
        policy = FakePolicy(reply=half_right)
        loop, _ = make_loop(policy, num_steps=4)
        with MetricsWriter(file) as metrics:
            loop.sinks = [CallsAt({3: lambda: limit_files(file.stat().st_size + 10)}), metrics]
            error = said(lambda: run_in_virtual_time(loop.run()))
        return error, len(policy.saved)

    error, num_saved = answer_in_fork(run)
    says = f"{file} was not written, its previous content is intact: {FULL}"
    assert error == f"UnwrittenError: step 3: {says}"
    assert [record["step"] for record in read_metrics(file)] == [1, 2]
    assert file.read_text().endswith("}\n")  # the 10 bytes that had room are gone
    assert num_saved == 0  # a resumed run repeats the lost step


def test_rollouts_that_cannot_be_written_are_a_warning(tmp_path):
    file = tmp_path / "rollouts.jsonl"

    def run():
        loop, records = make_loop(FakePolicy(reply=half_right), num_steps=5)
        loop.recorder = Recorder(file, config=RecorderConfig())
        # The end of step 1 is written during step 2, and so on.
        loop.sinks = [records, CallsAt({1: lambda: limit_files(0), 4: limit_files})]
        console = io.StringIO()
        undo = setup_logging("controller", console=console)
        asyncio.run(loop.run())
        undo()
        return [record["step"] for record in records.records], console.getvalue()

    done, console = answer_in_fork(run)
    assert done == [1, 2, 3, 4, 5]
    recorded = sorted({line["step"] for line in read_rollouts(file)})
    assert recorded[-1] == 5
    assert len(recorded) < 5
    (warning,) = console.splitlines()
    assert re.fullmatch(
        rf".*WARNING .*/rollouts\.jsonl was not written: {FULL}; the run goes on", warning
    )


def test_logs_that_cannot_be_written_are_one_warning(tmp_path):
    def log():
        console = io.StringIO()
        undo = setup_logging("trainer", rank=2, folder=tmp_path, console=console)
        logger = logging.getLogger("rl.training.engine")
        logger.info("before")
        limit_files(2000)
        for number in range(3):
            logger.info("lost %d %s", number, "x" * 5000)
        limit_files()
        logger.info("after")
        undo()
        return console.getvalue()

    console = answer_in_fork(log)
    first, *warned, last = (tmp_path / "trainer-2.log").read_text().splitlines()
    assert (first.rpartition(": ")[2], last.rpartition(": ")[2]) == ("before", "after")
    assert warned == console.splitlines()  # the warning is short enough for the rest of the disk
    (warning,) = warned
    says = rf".* WARNING  trainer\[2\] .*/trainer-2\.log was not written: {FULL}; the run goes on"
    assert re.fullmatch(says, warning)


def test_run_folder_without_disk_space_is_refused_or_stays_unfinished(tmp_path):
    def finish():
        with RunFolder.create(tmp_path, "run") as folder:
            limit_files(0)
            unfinished = said(folder.mark_finished)
            return unfinished, said(lambda: RunFolder.create(tmp_path / "outputs", "run"))

    unfinished, refused = answer_in_fork(finish)
    says = f"{tmp_path}/run/status.json was not written, its previous content is intact: {FULL}"
    assert unfinished == f"UnwrittenError: {says}"
    assert refused == f"ValueError: {tmp_path}/outputs/run cannot be a run's folder: {FULL}"
    assert read_status(tmp_path / "run") == "running"
    entries = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert entries == [
        "outputs",
        "run",
        "run/.lock",
        "run/checkpoints",
        "run/logs",
        "run/status.json",
    ]


@pytest.mark.parametrize("num_bytes", [0, 200])
def test_full_disk_at_the_start_is_one_line_and_blocks_no_later_start(tmp_path, num_bytes):
    """With 200 bytes the status has room, and config.json has none."""
    request = resolve("tests.support.faulty_configs", "short")
    request.config.dump_folder, request.config.name = str(tmp_path), "run"
    plan = SimpleNamespace(start=SimpleNamespace(folder=tmp_path, make=lambda: None))

    def start():
        limit_files(num_bytes)
        with (
            mock.patch("actors.prepare.make_plan", return_value=plan),
            prepare_run(request),
        ):
            raise AssertionError("not reached")

    what = "run cannot be a run's folder" if num_bytes == 0 else "run/config.json cannot be written"
    for _ in range(2):
        assert answer_in_fork(lambda: said(start)) == f"ValueError: {tmp_path}/{what}: {FULL}"
        assert list(tmp_path.iterdir()) == []
    (tmp_path / "run").mkdir()  # empty, so that it is not new
    assert answer_in_fork(lambda: said(start)) == f"ValueError: {tmp_path}/{what}: {FULL}"
    RunFolder.create(tmp_path, "run").close()


def test_records_that_cannot_be_cut_back_are_unchanged(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with MetricsWriter(file) as metrics:
        for step in range(1, 301):
            metrics.write({"step": step})
    before = file.read_bytes()
    position = LoopPosition(step=200, num_problems=0)

    def cut():
        limit_files(100)
        return said(
            lambda: cut_back(metrics=file, rollouts=tmp_path / "rollouts.jsonl", position=position)
        )

    says = f"{file} was not written, its previous content is intact: {FULL}"
    assert answer_in_fork(cut) == f"UnwrittenError: {says}"
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_read_only_folders_are_refused_stop_the_metrics_and_are_a_warning_for_logs(capsys):
    def go_on(folder):
        if os.geteuid() == 0:  # file permissions do not apply to root
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
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
        return refused, unwritten, capsys.readouterr().err

    with tempfile.TemporaryDirectory(
        prefix="relay-test-"
    ) as name:  # pytest's own folders are private
        folder = Path(name)
        folder.chmod(0o777)
        refused, unwritten, console = answer_in_fork(lambda: go_on(folder))
    path = folder / "run"
    assert (
        refused
        == f"ValueError: {folder}/outputs/today/run cannot be a run's folder: Permission denied"
    )
    says = (
        f"{path}/metrics.jsonl was not written, its previous content is intact: Permission denied"
    )
    assert unwritten == f"UnwrittenError: {says}"
    recorded, logged = console.splitlines()
    assert recorded.endswith(f"{path}/logs: trainer-1 is not recorded: Permission denied")
    assert logged.endswith(
        f"{path}/logs/controller-0.log was not written: Permission denied; the run goes on"
    )
