import io
import re

import pytest
from rich.console import Console

from rl.observability.activity import STATE_FOLDER, Activity
from rl.observability.console import COLUMNS
from rl.observability.live import (
    DROPPED_FIRST,
    FEWEST_ROWS,
    LiveConsole,
    _Progress,
    evaluation_line,
    fitting,
)
from tests.support.screen import OnTerminal, Screen, output_of

PROGRAM = "tests.support.shown_run"


def test_a_terminal_shows_the_last_steps_evaluations_time_left_and_what_each_process_does(tmp_path):
    with OnTerminal(PROGRAM, str(tmp_path)) as terminal:
        shown = terminal.until(lambda text: "10/20 steps" in text and "evaluation: correct 0.500" in text)
        lines = shown.splitlines()
        assert lines[0] == "try-1"
        assert lines[1].split() == " ".join(column.title for column in COLUMNS).split()
        assert [line.split()[:2] for line in lines[2:6]] == [
            ["7", "0.700"], ["8", "0.800"], ["9", "0.900"], ["10", "1.000"],
        ]  # fmt: skip
        assert lines[6] == "evaluation: correct 0.500 at step 10, 0.250 at step 0, of 64 problems"
        assert re.fullmatch(r"━+.* 10/20 steps, \d+ s passed, about \d+ s left", lines[7])
        assert re.fullmatch(r"generator_0 +generate \(2 times\) +\d+\.\d s", lines[8])
        assert re.fullmatch(r"trainer 0-1 +forward_backward of version 10 +\d+\.\d s", lines[9])
        assert len(lines) == 10
        assert not terminal.screen.cursor_is_shown
        terminal.go_on()
        # What is printed meanwhile goes above, and the table stays whole.
        shown = terminal.until(lambda text: text.startswith("generator_0 is lost\ntry-1\n"))
        terminal.go_on()
        shown = terminal.until(lambda text: "now: evaluation at step 10 (64 problems)" in text)
        assert len(shown.splitlines()) == 12
        for _ in range(2):
            terminal.go_on()
        assert terminal.end() == 0
        lines = terminal.screen.text.splitlines()
    assert terminal.screen.cursor_is_shown
    assert lines[:2] == ["generator_0 is lost", "try-1"]
    assert [line.split()[0] for line in lines[3:7]] == ["17", "18", "19", "20"]
    assert re.fullmatch(r"━+ +20/20 steps, \d+ s passed", lines[8])
    assert lines[9:] == ["finished: 20 steps"]


@pytest.mark.medium
def test_a_narrow_terminal_does_without_some_columns_and_breaks_no_line(tmp_path):
    with OnTerminal(PROGRAM, str(tmp_path), width=60) as terminal:
        shown = terminal.until(lambda text: "10/20 steps" in text)
        titles = re.split(" {2,}", shown.splitlines()[1].strip())
        assert titles == ["step", "reward", "correct", "loss", "logprob diff", "step s"]
        assert [line.split()[0] for line in shown.splitlines()[2:6]] == ["7", "8", "9", "10"]


@pytest.mark.medium
def test_a_terminal_that_is_closed_ends_nothing(tmp_path):
    with OnTerminal(PROGRAM, str(tmp_path)) as terminal:
        terminal.until(lambda text: "10/20 steps" in text)
        terminal.hang_up()
        for _ in range(4):
            terminal.go_on()
        assert terminal.process.wait(timeout=40) == 0


def test_where_there_is_no_terminal_each_step_is_a_line_without_control_characters(tmp_path):
    lines = output_of(PROGRAM, str(tmp_path)).splitlines()
    assert "\x1b" not in "".join(lines)
    assert [line.split()[0] for line in lines[1:8]] == [str(step) for step in range(4, 11)]
    assert lines[8] == "evaluation at step 10: correct 0.500 of 64 problems"
    assert lines[9] == "generator_0 is lost"
    assert lines[10].startswith("evaluation at step 10 (64 problems): started")
    assert lines[-1] == "finished: 20 steps"


@pytest.mark.parametrize(
    ("width", "dropped"),
    [
        (90, []),  # 74 of columns, 16 between them
        (89, ["version"]),
        (80, ["version", "train tok/s"]),
        (60, ["version", "train tok/s", "gen tok/s"]),
        (33, ["version", "train tok/s", "gen tok/s", "logprob diff", "loss", "step s"]),  # of 34
        (10, list(DROPPED_FIRST)),
    ],
)
def test_columns_are_dropped_in_an_order_until_they_fit(width, dropped):
    titles = [column.title for column in fitting(COLUMNS, width)]
    assert titles == [column.title for column in COLUMNS if column.title not in dropped]


@pytest.mark.parametrize(
    ("height", "first"),
    [
        (40, 29),  # 12 steps
        (20, 29),  # title, header, evaluation, progress and 4 processes beside them
        (15, 34),
        (4, 38),
    ],
)
def test_a_low_terminal_shows_the_newest_steps_and_all_that_is_beside_them(tmp_path, height, first):
    for rank in range(4):
        activity = Activity()
        activity.start(tmp_path / STATE_FOLDER, role=f"generator_{rank}", rank=0)
        activity.stop()
    stream = io.StringIO()
    live = LiveConsole(title="try-1", num_steps=80, num_rows=12, logs=tmp_path, stream=stream)
    terminal = Console(file=io.StringIO(), width=120, height=height)
    steps = [{"step": step, "reward/mean": 0.5} for step in range(41)]
    with live.shown([{"step": 0, "eval/correct": 0.5}, *steps]):
        lines = terminal.render_lines(live._draw(), pad=False)
    shown = ["".join(segment.text for segment in line) for line in lines]
    assert [int(line.split()[0]) for line in shown[2:-6]] == list(range(first, 41))
    assert len(shown) <= max(height, 2 + FEWEST_ROWS + 6)


def test_time_left_is_by_the_pace_of_the_last_twenty_steps():
    progress = _Progress(num_steps=100)
    progress.mark(0.0, 0)
    assert progress.left_s(5.0) is None
    now_s = 0.0
    for step in range(1, 31):
        now_s += 10.0 if step <= 10 else 2.0
        progress.mark(now_s, step)
    assert progress.left_s(now_s) == 70 * 2.0
    assert progress.left_s(now_s + 5) == 70 * 2.0 - 5
    assert progress.left_s(now_s + 500) == 0


def test_evaluations_are_told_by_their_last_first_and_best():
    def at(step, correct):
        return {"step": step, "eval/correct": correct, "eval/num_problems": 512}

    assert evaluation_line([]) == ""
    assert evaluation_line([at(0, 0.25)]) == "evaluation: correct 0.250 at step 0, of 512 problems"
    assert evaluation_line([at(0, 0.25), at(20, 0.75), at(40, 0.5)]) == (
        "evaluation: correct 0.500 at step 40, 0.250 at step 0, best 0.750 at step 20, of 512 problems"
    )


def test_the_screen_of_these_tests_moves_up_and_erases_as_a_terminal_does():
    screen = Screen(width=8)
    screen.feed("ab\r\ncd\r\n\x1b[1A\x1b[2K\x1b[")
    screen.feed("1A\x1b[31mxy\x1b[0mz\r\n123456789")
    assert screen.text == "xyz\n12345678\n9"
    with pytest.raises(ValueError, match=r"\[3J"):
        screen.feed("\x1b[3J")
