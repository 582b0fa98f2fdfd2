import asyncio
import io
import logging
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest

from rl.observability.console import ConsoleSink, NoConsole
from rl.observability.live import LiveConsole
from rl.observability.metrics import MetricsWriter
from rl.observability.run_folder import METRICS
from rl.observability.sinks.config import ConsoleConfig, SinksConfig, TensorBoardConfig
from rl.observability.sinks.run_sinks import RunSinks, make_console, open_sinks
from rl.stop_request import StopAskedError
from tests.support.event_files import points


def run(folder, steps, *, config, stream=None, error=None):
    """A loop that writes these steps."""

    async def go():
        opened = open_sinks(config, folder=folder, title="try-1", num_steps=9, stream=stream)
        async with opened as sinks:
            with MetricsWriter(folder / METRICS) as metrics, sinks.attempt():
                for step in steps:
                    record = {"step": step, "reward/mean": step / 2}
                    metrics.write(record)
                    sinks.write(record)
                if error is not None:
                    raise error

    asyncio.run(go())


def test_a_run_and_one_that_goes_on_with_it_are_one_curve(tmp_path):
    config = SinksConfig(tensorboard=TensorBoardConfig(enable=True))
    stream = io.StringIO()
    with pytest.raises(StopAskedError):
        run(tmp_path, [1, 2], config=config, stream=stream, error=StopAskedError())
    run(tmp_path, [3], config=config, stream=stream)
    assert points(tmp_path / "tensorboard") == {"reward/mean": [(1, 0.5), (2, 1.0), (3, 1.5)]}
    assert [line.split()[0] for line in stream.getvalue().splitlines()] == ["step", "1", "2", "step", "3"]


def test_nothing_is_written_beside_metrics_where_no_sink_is_asked_for(tmp_path):
    run(tmp_path, [1, 2], config=SinksConfig(console=ConsoleConfig(style="off")))
    assert [entry.name for entry in tmp_path.iterdir()] == [METRICS]


class BrokenConsole:
    def shown(self, records):
        return nullcontext()

    def watch(self, title):
        return nullcontext()

    def write(self, record):
        raise UnicodeEncodeError("ascii", "é", 0, 1, "no such letter")


def test_a_console_that_fails_is_one_warning(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    sinks = RunSinks(console=BrokenConsole(), followers=[], metrics=tmp_path / METRICS, close_s=1.0)
    with sinks.attempt():
        for step in range(5):
            sinks.write({"step": step})
    assert sinks.num_failures == 5
    (record,) = caplog.records
    assert record.message.startswith("the console shows no step: UnicodeEncodeError")


@contextmanager
def breaks(*, when):
    """As a display that cannot be begun, or not be ended."""
    if when == "begins":
        raise OSError(5, "Input/output error")
    try:
        yield
    finally:
        if when == "ends":
            raise OSError(5, "Input/output error")


@pytest.mark.parametrize("when", ["begins", "ends"])
def test_a_display_that_breaks_neither_stops_the_run_nor_hides_what_did(tmp_path, caplog, when):
    class Broken(NoConsole):
        def shown(self, records):
            return breaks(when=when)

        def watch(self, title):
            return breaks(when=when)

    sinks = RunSinks(console=Broken(), followers=[], metrics=tmp_path / METRICS, close_s=1.0)
    with sinks.attempt(), sinks.watch("evaluation"):
        pass
    assert sinks.num_failures == 2
    with pytest.raises(RuntimeError, match="of the loop"), sinks.attempt():
        raise RuntimeError("of the loop")
    (record,) = caplog.records
    assert record.message.startswith("the console shows no step: OSError(5")


@pytest.mark.parametrize(
    ("name", "value"), [("TERM", "dumb"), ("TERM", "unknown"), ("TTY_COMPATIBLE", "0"), ("FORCE_COLOR", "")]
)
def test_a_terminal_on_which_nothing_could_be_drawn_gets_lines(tmp_path, monkeypatch, name, value):
    for unset in ("TTY_COMPATIBLE", "FORCE_COLOR", "TTY_INTERACTIVE"):
        monkeypatch.delenv(unset, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    make = partial(make_console, ConsoleConfig(), num_steps=1, logs=tmp_path, title="x", stream=Terminal())
    assert type(make()) is LiveConsole
    monkeypatch.setenv(name, value)
    assert type(make()) is ConsoleSink


def test_where_there_is_no_terminal_lines_are_printed_unless_the_config_says_otherwise(tmp_path):
    asked: list[tuple[ConsoleConfig, io.StringIO]] = [
        (ConsoleConfig(style="auto"), io.StringIO()),
        (ConsoleConfig(style="lines"), Terminal()),
        (ConsoleConfig(style="off"), Terminal()),
    ]
    kinds = [type(make_console(c, num_steps=1, logs=tmp_path, title="x", stream=s)) for c, s in asked]
    assert kinds == [ConsoleSink, ConsoleSink, NoConsole]


class Terminal(io.StringIO):
    def isatty(self):
        return True
