"""Functions that run aside, see `rl.worker_thread`."""

import asyncio
import threading

import pytest

from rl.worker_thread import run_aside


def test_what_runs_aside_gives_its_result_or_its_error():
    def fail():
        raise TimeoutError("of its own")

    assert asyncio.run(run_aside(threading.get_ident, name="test")) != threading.get_ident()
    with pytest.raises(TimeoutError, match=r"^of its own$"):
        asyncio.run(run_aside(fail, name="test", limit_s=20.0))


def test_what_takes_too_long_is_left_behind_with_a_word():
    gate = threading.Event()
    with pytest.raises(TimeoutError, match=r"^removal: not done after 0\.05 s$"):
        asyncio.run(run_aside(gate.wait, name="removal", limit_s=0.05))
    gate.set()
