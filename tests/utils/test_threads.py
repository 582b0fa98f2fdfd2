import asyncio
import threading

import pytest

from rl.utils.threads import run_aside


def test_run_aside_returns_the_result_or_raises_the_functions_error():
    def fail():
        raise TimeoutError("of its own")

    assert asyncio.run(run_aside(threading.get_ident, name="test")) != threading.get_ident()
    with pytest.raises(TimeoutError, match=r"^of its own$"):
        asyncio.run(run_aside(fail, name="test", limit_s=20.0))


def test_run_aside_stops_waiting_at_its_limit():
    gate = threading.Event()
    with pytest.raises(TimeoutError, match=r"^removal: not done after 0\.05 s$"):
        asyncio.run(run_aside(gate.wait, name="removal", limit_s=0.05))
    gate.set()
