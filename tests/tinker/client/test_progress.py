"""What takes long is shown on one line that goes away."""

import asyncio
import contextlib
import io

from rl.tinker.client.progress import Progress, somebody_looks


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def shown(stream):
    """What a terminal's line shows at the end."""
    line = ""
    for part in stream.getvalue().split("\r"):
        line = part + line[len(part) :]
    return line.rstrip()


def test_only_what_takes_long_is_shown_and_counted():
    clock = Clock()

    async def run():
        progress = Progress(shown=True, stream=io.StringIO(), clock=clock)
        with contextlib.ExitStack() as calls:
            calls.enter_context(progress.show("forward_backward"))
            clock.now = 2.0
            for _ in range(3):
                calls.enter_context(progress.show("sample"))
            assert progress.line() == "tinker: forward_backward 2 s"
            clock.now = 5.4
            assert progress.line() == "tinker: forward_backward 5 s; sample (3) 3 s"
        assert progress.line() == ""

    asyncio.run(run())


def test_the_line_is_gone_when_the_call_has_ended():
    clock, terminal = Clock(), Terminal()

    async def run():
        progress = Progress(stream=terminal, clock=clock)
        with progress.show("starting the backend"):
            progress.draw()
            assert terminal.getvalue() == ""
            clock.now = 61.0
            progress.draw()
            assert shown(terminal) == "tinker: starting the backend 61 s"
        assert shown(terminal) == ""

    asyncio.run(run())


def test_nothing_is_written_where_nobody_looks():
    clock, file = Clock(), io.StringIO()

    async def run():
        progress = Progress(stream=file, clock=clock)
        with progress.show("sample"):
            clock.now = 100.0
            progress.draw()

    asyncio.run(run())
    assert file.getvalue() == ""
    assert not somebody_looks(file)
    assert somebody_looks(Terminal())


def test_a_stream_that_was_closed_disturbs_nobody():
    clock, terminal = Clock(), Terminal()

    async def run():
        progress = Progress(stream=terminal, clock=clock)
        with progress.show("sample"):
            clock.now = 2.0
            terminal.close()
            progress._draw_again()

    asyncio.run(run())
