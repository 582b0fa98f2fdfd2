"""Signals that end a run, in this process."""

import asyncio
import contextlib
import signal
import time

import pytest

from rl.utils.processes import REPEAT_S, handle_end_signals


@pytest.fixture
def handled():
    """Handled end signals, in a running event loop."""

    @contextlib.contextmanager
    def handle():
        signals: list[int] = []
        with handle_end_signals(signals.append, loop=asyncio.get_running_loop()):
            yield signals

    return handle


def test_end_of_the_terminal_counts_once_and_never_after_another_signal(handled):
    async def act():
        with handled() as signals:
            for number in (signal.SIGHUP, signal.SIGHUP):
                signal.raise_signal(number)
            first = [*signals]
        with handled() as signals:
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
                signal.raise_signal(number)
            return first, signals

    first, second = asyncio.run(act())
    assert first == [signal.SIGHUP]
    assert second == [signal.SIGINT, signal.SIGTERM]


def test_signal_that_is_sent_twice_at_once_counts_once_and_a_later_one_again(handled):
    async def act():
        with handled() as signals:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            at_once = [*signals]
            time.sleep(REPEAT_S)
            signal.raise_signal(signal.SIGTERM)
            return at_once, signals

    assert asyncio.run(act()) == ([signal.SIGTERM], [signal.SIGTERM] * 2)


def test_signal_that_was_ignored_before_stays_ignored(handled):
    async def act():
        with handled() as signals:
            signal.raise_signal(signal.SIGHUP)
            return signals

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    try:
        assert asyncio.run(act()) == []
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
