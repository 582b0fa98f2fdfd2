"""How a process imports and how it ends."""

import contextlib
import gc
import subprocess
import sys
from pathlib import Path

import pytest

from rl.interpreter import without_collections

ROOT = Path(__file__).parent.parent

LEAVING = """
import atexit, threading
from rl.interpreter import leave

class Alive:
    def __del__(self):
        print("freed")

alive = Alive()
go = threading.Event()
def work():
    go.wait(10)
    print("the thread is done")
threading.Thread(target=work).start()
atexit.register(print, "registered")
print("unflushed")
go.set()
leave(3)
print("never")
"""


def test_leaving_waits_for_threads_calls_what_is_registered_and_frees_nothing():
    done = subprocess.run(
        [sys.executable, "-c", LEAVING], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines() == ["unflushed", "the thread is done", "registered"]
    assert done.stderr == ""


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_within_and_what_is_there_is_set_apart(enabled):
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with contextlib.suppress(ImportError), without_collections():
            here = [gc.isenabled()]
            raise ImportError
        assert here == [False]
        assert gc.isenabled() is enabled
        assert gc.is_tracked(here)
        assert not any(found is here for found in gc.get_objects())  # it lists all but what is set apart
    finally:
        (gc.enable if was else gc.disable)()
