import io
import logging
import re
import subprocess
import sys
import warnings

import pytest

from rl.observability import logs
from rl.observability.logs import setup_logging

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (\w+) +trainer\[2\] ([\w.]+): (.*)")
ours = logging.getLogger("rl.training.engine")
theirs = logging.getLogger("some_library")


@pytest.fixture
def console(tmp_path):
    stream = io.StringIO()
    undo = setup_logging(
        "trainer", rank=2, folder=tmp_path / "logs", console_level="WARNING", console=stream
    )
    yield stream
    undo()


def file_lines(tmp_path):
    return (tmp_path / "logs" / "trainer-2.log").read_text().splitlines()


def test_every_line_has_time_level_role_and_rank(console, tmp_path):
    ours.info("two\nlines")
    try:
        raise KeyError("lost")
    except KeyError:
        ours.exception("failed")
    matches = [LINE.fullmatch(line) for line in file_lines(tmp_path)]
    assert all(matches)
    found = [match.groups() for match in matches if match]
    assert found[:3] == [
        ("INFO", "rl.training.engine", "two"),
        ("INFO", "rl.training.engine", "lines"),
        ("ERROR", "rl.training.engine", "failed"),
    ]
    assert found[-1] == ("ERROR", "rl.training.engine", "KeyError: 'lost'")


def test_console_gets_its_level_and_of_libraries_only_errors(console, tmp_path):
    ours.debug("secret")
    ours.info("calm")
    ours.warning("careful")
    theirs.warning("deprecated")
    theirs.error("broken")
    warnings.warn("old style", UserWarning, stacklevel=1)
    in_file = [line.rpartition(": ")[2] for line in file_lines(tmp_path)]
    assert in_file[:4] == ["calm", "careful", "deprecated", "broken"]
    assert "old style" in "".join(file_lines(tmp_path))
    assert [line.rpartition(": ")[2] for line in console.getvalue().splitlines()] == [
        "careful",
        "broken",
    ]


def test_long_record_loses_its_middle(console, tmp_path):
    reply = "a" * 60_000 + "z" * 60_000
    try:
        raise ValueError(reply)
    except ValueError:
        ours.warning("the reply was %r", reply, exc_info=True)
    for text in (console.getvalue(), (tmp_path / "logs" / "trainer-2.log").read_text()):
        found = (
            len(text) < 21_000,
            "the reply was 'aaa" in text,
            "more) ... zz" in text,
            text[-4:],
        )
        assert found == (True, True, True, "zzz\n")  # a failure would show all of the text


def test_log_keeps_the_latest_records_within_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "MAX_LOG_BYTES", 4000)
    undo = setup_logging("trainer", rank=2, folder=tmp_path, console=io.StringIO())
    for number in range(1000):
        ours.info("record %d", number)
    undo()
    files = [tmp_path / "trainer-2.1.log", tmp_path / "trainer-2.log"]
    assert sum(file.stat().st_size for file in files) <= 4000
    numbers = [
        int(line.rpartition(" ")[2]) for file in files for line in file.read_text().splitlines()
    ]
    assert numbers == list(range(numbers[0], 1000))
    assert len(numbers) > 20


def test_second_setup_replaces_the_first(console, tmp_path):
    second = io.StringIO()
    undo = setup_logging("reward", folder=tmp_path / "logs", console=second)
    ours.error("once")
    undo()
    assert console.getvalue() == ""
    assert second.getvalue().count("once") == 1
    assert "reward[0]" in (tmp_path / "logs" / "reward-0.log").read_text()


def test_uncaught_exceptions_of_process_and_thread_are_logged(tmp_path):
    code = (
        "import sys, threading\n"
        "from pathlib import Path\n"
        "from rl.observability.logs import setup_logging\n"
        "setup_logging('trainer', rank=2, folder=Path(sys.argv[1]) / 'logs')\n"
        "thread = threading.Thread(target=lambda: [][0], name='feeder')\n"
        "thread.start(); thread.join()\n"
        "raise RuntimeError('ended badly')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 1
    text = "\n".join(file_lines(tmp_path))
    assert "CRITICAL trainer[2] rl.observability.logs: uncaught exception in feeder" in text
    assert "IndexError: list index out of range" in text
    assert "trainer[2] rl.observability.logs: RuntimeError: ended badly" in text
    assert done.stderr.count("RuntimeError: ended badly") == 1
