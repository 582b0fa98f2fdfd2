"""Text for a terminal, and output that nobody reads."""

import io
import os
import sys

import pytest

from rl.observability.console import print_line
from rl.utils.printing import print_error, print_text, replace_controls


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ünïcode, 数学\u3000\u00a0, 👩", "plain, ünïcode, 数学\u3000\u00a0, 👩"),
        ("two\n\tlines", "two\n\tlines"),
        ("\x1b]52;c;aGk=\x07", r"\x1b]52;c;aGk=\x07"),
        ("\x9b31m\r\x00\x7f", r"\x9b31m\r\x00\x7f"),
        ("a\u202eb\u2066c\u200bd\u2028e\udc80", r"a\u202eb\u2066c\u200bd\u2028e\udc80"),
    ],
)
def test_control_characters_are_written_out(text, shown):
    assert replace_controls(text) == shown
    stream = io.StringIO()
    print_text(text, stream=stream)
    print_line(text, stream=stream)
    assert stream.getvalue() == f"{shown}\n{shown}\n"


def test_characters_that_the_stream_lacks_are_written_out():
    for function in (print_text, print_line):
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, encoding="latin-1")
        function("数 é", stream=stream)
        assert raw.getvalue() == rb"\u6570 " + "é\n".encode("latin-1")


def test_pipe_without_a_reader_is_no_error_and_stays_quiet():
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        print_text("first", stream=stream)
        print_text("second", stream=stream)  # goes nowhere


def test_full_disk_is_an_error_of_one_line():
    with (
        open("/dev/full", "w") as stream,
        pytest.raises(ValueError, match="cannot be written: No space left"),
    ):
        print_text("text", stream=stream)


def test_process_without_standard_streams_prints_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    print_text("text")
    print_line("text")
    print_error("text")
