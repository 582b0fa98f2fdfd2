import io
import math

import pytest

from rl.observability.console import ROWS_PER_HEADER, ConsoleSink, progress
from rl.observability.metrics import Mean, Record

STEP: Record = {
    "step": 3,
    "policy_version": 4,
    "reward/mean": Mean(1.0, 2),
    "reward/correct": 0.25,
    "loss/mean": -0.01234,
    "logprob_diff/mean": 1.26e-6,
    "perf/generated_tokens_per_s": 3812.4,
    "perf/trained_tokens_per_s": 12104.0,
    "time/step_s": 0.523,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_step_is_one_line_aligned_under_its_header():
    stream = io.StringIO()
    ConsoleSink(stream=stream).write(STEP)
    assert stream.getvalue() == (
        "   step   reward  correct     loss  logprob diff  gen tok/s  train tok/s   step s  version\n"
        "      3    0.500    0.250  -0.0123       1.3e-06      3,812       12,104     0.52        4\n"
    )


def test_missing_and_non_finite_numbers_keep_the_columns():
    stream = io.StringIO()
    ConsoleSink(stream=stream).write({"step": 3, "reward/mean": math.nan, "loss/mean": None})
    header, line = stream.getvalue().splitlines()
    assert len(line) == len(header)
    assert line.split() == ["3", "nan", *["-"] * 7]


def test_header_comes_back():
    stream = io.StringIO()
    sink = ConsoleSink(stream=stream)
    for step in range(ROWS_PER_HEADER + 1):
        sink.write({**STEP, "step": step})
    lines = stream.getvalue().splitlines()
    assert [i for i, line in enumerate(lines) if "reward" in line] == [0, ROWS_PER_HEADER + 1]


def test_evaluation_is_a_sentence():
    stream = io.StringIO()
    ConsoleSink(stream=stream).write({"step": 20, "eval/correct": 0.4531, "eval/num_problems": 256})
    assert stream.getvalue() == "evaluation at step 20: correct 0.453 of 256 problems\n"


def test_progress_without_a_terminal_is_a_plain_line_an_interval():
    stream, clock = io.StringIO(), Clock()
    with progress("warm-up", total=1500, stream=stream, interval_s=10, clock=clock) as advance:
        for _ in range(150):
            clock.now_s += 0.3
            advance(10, note="loss 0.5")
    assert stream.getvalue() == (
        "warm-up: started\n"
        "warm-up: 340/1,500 (loss 0.5)\n"
        "warm-up: 680/1,500 (loss 0.5)\n"
        "warm-up: 1,020/1,500 (loss 0.5)\n"
        "warm-up: 1,360/1,500 (loss 0.5)\n"
        "warm-up: 1,500/1,500 (loss 0.5), done after 45.0 s\n"
    )


def test_progress_of_unknown_length_says_when_it_is_done():
    stream, clock = io.StringIO(), Clock()
    with progress("compiling", stream=stream, clock=clock):
        clock.now_s += 7.2
    assert stream.getvalue() == "compiling: started\ncompiling: done after 7.2 s\n"


def test_progress_that_fails_says_it_stopped():
    stream = io.StringIO()

    def fail() -> None:
        with progress("warm-up", total=9, stream=stream, clock=Clock()) as advance:
            advance()
            raise RuntimeError("no loss")

    with pytest.raises(RuntimeError, match="no loss"):
        fail()
    assert stream.getvalue() == "warm-up: started\nwarm-up: 1/9, stopped after 0.0 s\n"


def test_progress_on_a_terminal_is_a_bar_that_is_wiped(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with progress("warm-up", total=2, stream=stream) as advance:
        advance(2, note="loss 0.5")
    shown = stream.getvalue()
    assert "\x1b[" in shown
    assert "warm-up" in shown
    assert "2/2" in shown
    assert "loss 0.5" in shown
    assert "started" not in shown
    wiped = "\x1b[1A\x1b[2K"  # up a line, erase it
    assert wiped in shown.rpartition("loss 0.5")[2]


def test_progress_on_a_dumb_terminal_is_plain(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with progress("warm-up", total=1, stream=stream) as advance:
        advance()
    assert "\x1b" not in stream.getvalue()
    assert "warm-up: 1/1, done after" in stream.getvalue()
