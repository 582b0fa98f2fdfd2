import contextlib
import io
import re
import sys

import pytest

from rl.observability.console import (
    COLUMNS,
    MIN_ROWS,
    ROWS_PER_HEADER,
    Console,
    ConsoleConfig,
    LineConsole,
    LiveConsole,
    fit_columns,
    make_console,
    print_line,
    show_progress,
)
from rl.observability.metrics import Mean, Record
from rl.observability.spans import SpanRecorder

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
    is_closed = False

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.is_closed:
            raise OSError(5, "Input/output error")
        return super().write(text)


def test_step_is_one_line_aligned_under_its_header():
    stream = io.StringIO()
    console = LineConsole(stream=stream)
    for _ in range(ROWS_PER_HEADER + 1):
        console.write(STEP)
    header, first, *_, again, last = stream.getvalue().splitlines(keepends=True)
    assert (again, last) == (header, first)
    assert header + first == (
        "   step   reward  correct     loss  logprob diff  gen tok/s  train tok/s   step s  "
        "version\n      3    0.500    0.250  -0.0123       1.3e-06      3,812       12,104     "
        "0.52        4\n"
    )


def test_progress_is_one_line_per_interval():
    stream, now_s = io.StringIO(), 100.0
    with show_progress(
        "warm-up", total=1500, stream=stream, interval_s=10, clock=lambda: now_s
    ) as advance:
        for _ in range(150):
            now_s += 0.3
            advance(10, note="loss 0.5")
    assert stream.getvalue() == (
        "warm-up: started\n"
        "warm-up: 340/1,500 (loss 0.5)\n"
        "warm-up: 680/1,500 (loss 0.5)\n"
        "warm-up: 1,020/1,500 (loss 0.5)\n"
        "warm-up: 1,360/1,500 (loss 0.5)\n"
        "warm-up: 1,500/1,500 (loss 0.5), done after 45.0 s\n"
    )


# Live table


@contextlib.contextmanager
def shown(stream, folder, monkeypatch):
    """Show a run of 20 steps on the stream, with three earlier ones."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", stream)
    console = make_console(ConsoleConfig(num_rows=4), num_steps=20, logs=folder, title="try-1")
    with console.show([{"step": step, "reward/mean": 0.5} for step in range(1, 4)]):
        for step in range(4, 11):
            console.write({**STEP, "step": step})
        console.write({"step": 10, "eval/correct": 0.5, "eval/num_problems": 64})
        yield console
        console.write({**STEP, "step": 20})
    print_line("finished: 20 steps")


def test_live_table_is_wiped_and_lines_appear_above_it(tmp_path, monkeypatch):
    terminal = Terminal()
    with shown(terminal, tmp_path, monkeypatch):
        print("generator_0 is lost")
    before, lost, rest = terminal.getvalue().partition("generator_0 is lost")
    assert lost
    assert "\x1b[?25l" in before  # the cursor is hidden
    assert rest.rindex("20/20 steps") < rest.index("finished: 20 steps")
    assert "\x1b[?25h" in rest


def test_run_continues_after_its_terminal_is_closed(tmp_path, monkeypatch):
    terminal = Terminal()
    with shown(terminal, tmp_path, monkeypatch) as console:
        terminal.is_closed = True
        with console.watch("evaluation"):
            print_line("generator_0 is lost")
    assert "finished" not in terminal.getvalue()


def test_output_to_a_file_has_plain_lines(tmp_path, monkeypatch):
    file = io.StringIO()
    with shown(file, tmp_path, monkeypatch) as console, console.watch("evaluation"):
        pass
    lines = file.getvalue().splitlines()
    assert "\x1b" not in "".join(lines)
    assert [line.split()[0] for line in lines[1:8]] == [str(step) for step in range(4, 11)]
    assert lines[8:10] == [
        "evaluation at step 10: correct 0.500 of 64 problems",
        "evaluation: started",
    ]
    assert lines[-1] == "finished: 20 steps"


FOUND = {
    "replies_cut_off": "Replies are cut off. Since step 1 100% of the replies are cut off at 4 "
    "tokens, before they end, and 0% are right. `--loop.sampling.max_tokens 8`, or a prompt that "
    "asks for short replies.",
    "slow_reward": "The reward is slow. Since step 3 ...",
}


def test_finding_is_a_line_when_it_first_arises():
    stream = io.StringIO()
    console = LineConsole(stream=stream)
    text = FOUND["replies_cut_off"]
    console.show_findings({"replies_cut_off": text})
    console.show_findings({})
    console.show_findings({"replies_cut_off": text.replace("100%", "99%")})
    console.show_findings(FOUND)
    assert stream.getvalue().splitlines() == [
        f"finding: {text}",
        "finding: The reward is slow. Since step 3 ...",
    ]


@pytest.mark.parametrize(("height", "num_rows"), [(40, 12), (12, 5)])
def test_findings_stand_below_the_live_table_within_its_width(tmp_path, height, num_rows):
    live = LiveConsole(
        title="try-1", num_steps=80, num_rows=12, logs=tmp_path, stream=io.StringIO()
    )
    with live.show([{"step": step, "reward/mean": 0.5} for step in range(40)]):
        live.show_findings(FOUND)
        lines = as_lines(live._draw(width=90, height=height), width=90, height=height)
        assert len(lines) <= height
        assert max(map(len, lines)) <= 90
        below = lines[2 + num_rows + 1 :]
        assert [line.rstrip() for line in below] == [
            "finding: Replies are cut off. Since step 1 100% of the replies are cut off at 4 "
            "tokens,",
            "  before they end, and 0% are right. `--loop.sampling.max_tokens 8`, or a prompt that "
            "asks",
            "  for short replies.",
            "finding: The reward is slow. Since step 3 ...",
        ]
        live.show_findings({})
        assert not [
            line
            for line in as_lines(live._draw(width=90, height=height), width=90, height=height)
            if "finding" in line
        ]


@pytest.mark.parametrize(("width", "num"), [(90, 9), (89, 8), (60, 6), (10, 1)])
def test_narrow_terminal_shows_the_first_columns(width, num):
    assert fit_columns(width) == list(COLUMNS[:num])


def as_lines(view, *, width, height):
    from rich.console import Console

    lines = Console(file=io.StringIO(), width=width, height=height).render_lines(view, pad=False)
    return ["".join(segment.text for segment in line) for line in lines]


@pytest.mark.parametrize(("height", "first"), [(40, 29), (20, 29), (15, 33), (4, 38)])
def test_live_table_shows_the_newest_steps_and_everything_below_them(tmp_path, height, first):
    for rank in range(2):
        recorder = SpanRecorder()
        recorder.start(tmp_path, role=f"generator_{rank}", rank=0)
        for _ in range(2 * rank):
            recorder.begin("generate", 40)
    live = LiveConsole(
        title="try-1", num_steps=80, num_rows=12, logs=tmp_path, stream=io.StringIO()
    )
    steps = [{"step": step, "reward/mean": 0.5} for step in range(40)]
    evaluation = {"step": 40, "eval/correct": 0.5, "eval/num_problems": 64}
    with live.show(steps), live.watch("evaluation at step 40"):
        live.write({"step": 40, "reward/mean": 0.5})
        live.write(evaluation)
        title, header, *shown = as_lines(
            live._draw(width=120, height=height), width=120, height=height
        )
    rows, below = shown[:-5], shown[-5:]
    assert title == "try-1"
    assert header.split() == " ".join(column.title for column in COLUMNS).split()
    assert [line.split()[:2] for line in rows] == [[str(n), "0.500"] for n in range(first, 41)]
    patterns = (
        "evaluation: step 40: correct 0.500 of 64 problems",
        r"━+.* 40/80 steps, 0:00:00 passed, (-:--:--|0:00:0\d) left",
        "now: evaluation at step 40",
        r"generator_0\[0\]  idle for \d+\.\d s",
        r"generator_1\[0\]  generate \(2 times\) of version 40 for \d+\.\d s",
    )
    for line, pattern in zip(below, patterns, strict=True):
        assert re.fullmatch(pattern, line.rstrip()), line
    assert len(shown) + 2 <= max(height, 2 + MIN_ROWS + 5)


def test_style_and_the_terminal_select_the_console(tmp_path, monkeypatch):
    for unset in ("TTY_COMPATIBLE", "FORCE_COLOR", "TTY_INTERACTIVE"):
        monkeypatch.delenv(unset, raising=False)
    monkeypatch.setenv("TERM", "xterm")

    def kind(style="auto", stream=None):
        stream = Terminal() if stream is None else stream
        made = make_console(
            ConsoleConfig(style=style), num_steps=1, logs=tmp_path, title="x", stream=stream
        )
        return type(made)

    assert kind() is LiveConsole
    assert kind(stream=io.StringIO()) is kind("lines") is LineConsole
    assert kind("off") is Console
    monkeypatch.setenv("TERM", "dumb")
    assert kind() is LineConsole
