"""What a full disk does to each file of a run: what the run needs ends it by name, the rest is a warning."""

import asyncio
import io
import json
import logging
import math
import re

import pytest

from rl.config.registry import resolve
from rl.config.serialize import write_json
from rl.errors import RunError
from rl.observability.console import ConsoleSink
from rl.observability.curve import draw_learning_curve
from rl.observability.cut_back import cut_back
from rl.observability.logs import setup_logging
from rl.observability.metrics import MetricsWriter, read_metrics
from rl.observability.recorder import Recorder, RecorderConfig, read_rollouts
from rl.observability.run_folder import RunFolder, read_status
from rl.observability.whole_lines import WholeLines
from rl.training.failures import non_finite
from rl.types import LoopPosition
from tests.support.disks import FULL, SmallDisk, on_small_disk
from tests.support.fakes import FakePolicy
from tests.support.loops import half_right, make_loop
from tests.support.virtual_time import run_in_virtual_time
from tests.training.parts import make_samples


def said(function):
    """The message that it ends with."""
    try:
        function()
    except (RunError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class FillsAt:
    """A sink that fills the disk, or frees it, when a step is written."""

    def __init__(self, disk: SmallDisk, *, full: int, free: int = 0) -> None:
        self.disk, self.full, self.free = disk, full, free

    def write(self, record):
        if record["step"] == self.full:
            self.disk.fill()
        elif record["step"] == self.free:
            self.disk.free()


def test_a_piece_that_does_not_fit_leaves_nothing_of_itself(tmp_path):
    def append(disk):
        file = WholeLines(disk.folder / "lines")
        file.append("first\n")
        disk.fill()
        error = ""
        try:
            file.append("x" * 20_000 + "\n")  # part of it has room in the file's first page
        except OSError as full:
            error = str(full.strerror)
        without = (disk.folder / "lines").read_text()
        disk.free()
        file.append("second\n")
        file.sync()
        file.close()
        return json.dumps([error, without, (disk.folder / "lines").read_text()])

    error, without, after = json.loads(on_small_disk(append, tmp_path))
    assert error in ("No space left on device", "File too large")
    assert (without, after) == ("first\n", "first\nsecond\n")


def test_metrics_that_cannot_be_written_stop_the_run_with_step_file_and_reason(tmp_path):
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
    says = (
        rf"UnwrittenError: step 3: {tmp_path}/metrics\.jsonl was not written, what was there is as it was: "
    )
    assert_matches(says + FULL, error)
    assert (steps, whole) == ([1, 2], True)
    assert num_saved == 0  # weights of a step whose line is lost: the run goes on from before it


def test_metrics_that_cannot_be_begun_are_named(tmp_path):
    def begin(disk):
        disk.fill()
        return said(lambda: MetricsWriter(disk.folder / "away" / "metrics.jsonl"))

    says = r"UnwrittenError: .*/away/metrics\.jsonl was not written, .*: No such file or directory"
    assert_matches(says, on_small_disk(begin, tmp_path))


def test_rollouts_that_cannot_be_written_are_a_warning_and_training_goes_on(tmp_path):
    def run(disk):
        loop, records = make_loop(FakePolicy(reply=half_right), num_steps=5)
        loop.recorder = Recorder(disk.folder / "rollouts.jsonl", config=RecorderConfig())
        # What step 1 leaves is written beside step 2, and so on.
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
    says = (
        rf".*WARNING .*/rollouts\.jsonl was not written: {FULL}; training goes on, and what fits later is .*"
    )
    assert_matches(says, warning)


def test_logs_that_cannot_be_written_are_said_once_on_the_console_and_go_on_later(tmp_path):
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
    assert [line.rpartition(": ")[2] for line in written.splitlines()] == ["before", "after"]
    (warning,) = console.splitlines()
    says = (
        rf".* WARNING  trainer\[2\] .*/trainer-2\.log was not written: {FULL}; all goes on, and what fits .*"
    )
    assert_matches(says, warning)


def test_a_console_on_a_full_disk_ends_nothing(tmp_path):
    def show(disk):
        with (disk.folder / "out.txt").open("w") as stream:
            sink = ConsoleSink(stream=stream)
            disk.fill()
            for step in range(2000):  # more than a stream keeps for later
                sink.write({"step": step})
            disk.free()
            sink.write({"step": 7777})
        return (disk.folder / "out.txt").read_text()[-400:]

    assert "   7777  " in on_small_disk(show, tmp_path)


def test_a_status_that_cannot_be_written_is_named_and_the_run_stays_unfinished(tmp_path):
    def finish(disk):
        with RunFolder.create(disk.folder, "run") as folder:
            disk.fill()
            error = said(folder.mark_finished)
            return json.dumps([error, read_status(folder.path), disk.entries()])

    error, status, entries = json.loads(on_small_disk(finish, tmp_path))
    assert_matches(
        rf"UnwrittenError: .*/run/status\.json was not written, what was there is .*: {FULL}", error
    )
    assert status == "running"
    assert entries == ["run", "run/.lock", "run/checkpoints", "run/logs", "run/status.json"]


@pytest.mark.parametrize("existing", [False, True])
def test_a_run_that_has_no_room_to_begin_is_refused_and_leaves_nothing(tmp_path, existing):
    def begin(disk):
        if existing:
            (disk.folder / "outputs" / "run").mkdir(parents=True)
        disk.fill()
        return json.dumps([said(lambda: RunFolder.create(disk.folder / "outputs", "run")), disk.entries()])

    error, entries = json.loads(on_small_disk(begin, tmp_path))
    assert_matches(rf"ValueError: .*/outputs/run (cannot be a run's folder|cannot be made): {FULL}", error)
    assert entries == (["outputs", "outputs/run"] if existing else [])


def test_records_that_cannot_be_cut_back_stay_as_they_are(tmp_path):
    def cut(disk):
        metrics = disk.folder / "metrics.jsonl"
        with MetricsWriter(metrics) as writer:
            for step in range(1, 300):
                _Longer(writer).write({"step": step})
        before = metrics.read_bytes()
        disk.fill()
        at = LoopPosition(step=200, num_problems=0)
        rollouts = disk.folder / "rollouts.jsonl"
        error = said(lambda: cut_back(metrics=metrics, rollouts=rollouts, position=at))
        return json.dumps([error, metrics.read_bytes() == before, disk.entries()])

    error, same, entries = json.loads(on_small_disk(cut, tmp_path, num_bytes=8 << 20))
    assert_matches(rf"UnwrittenError: .*/metrics\.jsonl was not written, what was there is .*: {FULL}", error)
    assert (same, entries) == (True, ["metrics.jsonl"])


def test_a_config_that_cannot_be_written_again_stays_as_it_is(tmp_path):
    def write(disk):
        run = resolve("configs.sum_digits", "tiny")
        write_json(run, disk.folder / "config.json")
        before = (disk.folder / "config.json").read_text()
        disk.fill()
        try:
            write_json(run, disk.folder / "config.json")
        except OSError as error:
            same = (disk.folder / "config.json").read_text() == before
            return json.dumps([error.strerror, same, disk.entries()])
        return "no error"

    error, same, entries = json.loads(on_small_disk(write, tmp_path))
    assert_matches(FULL, error)
    assert (same, entries) == (True, ["config.json"])


def test_a_learning_curve_that_has_no_room_is_a_warning_and_leaves_no_part_of_it(tmp_path):
    def draw(disk):
        with MetricsWriter(disk.folder / "metrics.jsonl") as metrics:
            for step in range(1, 4):
                metrics.write({"step": step, "reward/mean": 0.1 * step})
        disk.fill()
        console = io.StringIO()
        undo = setup_logging("controller", console=console)
        draw_learning_curve(disk.folder / "metrics.jsonl", disk.folder / "learning_curve.png")
        undo()
        return json.dumps([console.getvalue(), disk.entries()])

    console, entries = json.loads(on_small_disk(draw, tmp_path))
    assert_matches(rf".*WARNING .*/learning_curve\.png was not written: {FULL}\n", console)
    assert entries == ["metrics.jsonl"]


def test_a_loss_that_is_not_finite_is_told_also_where_its_batch_has_no_room(tmp_path):
    def stop(disk):
        disk.fill()
        error = non_finite(
            f"loss {math.nan}", policy_version=4, samples=make_samples(), folder=str(disk.folder)
        )
        return json.dumps([str(error), error.batch_file, disk.entries()])

    error, file, entries = json.loads(on_small_disk(stop, tmp_path))
    assert (error, file, entries) == ("loss nan at policy version 4", None, [])


class _Longer:
    """Writes records that need a page of their own, so that a full disk has no room for any."""

    def __init__(self, sink):
        self.sink = sink

    def write(self, record):
        self.sink.write({**record, **{f"filler/{number:04}": float(number) for number in range(400)}})


def assert_matches(pattern, text):
    assert re.fullmatch(pattern, text, flags=re.DOTALL), text
