import contextlib
import gc
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from rl.utils.processes import disable_collections, process_states, restore_process_states
from tests.support.forked import answer_in_fork

ROOT = Path(__file__).parent.parent.parent

EXITING = """
import atexit, threading
from rl.utils.compat import exit_process

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
exit_process(3)
print("never")
"""


def test_exit_joins_threads_and_runs_handlers_without_freeing_objects():
    done = subprocess.run(
        [sys.executable, "-c", EXITING], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines() == ["unflushed", "the thread is done", "registered"]
    assert done.stderr == ""


def test_collections_are_off_during_imports_and_on_again_after_one_fails():
    def imports():
        gc.enable()
        found = [gc.get_freeze_count()]
        with contextlib.suppress(ImportError), disable_collections():
            found.append(gc.isenabled())
            raise ImportError
        return *found, gc.isenabled(), gc.get_freeze_count()

    before, within, afterwards, frozen = answer_in_fork(imports)
    assert (within, afterwards) == (False, True)
    assert frozen > before


def test_restored_random_states_repeat_the_draws():
    def draw():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    states = process_states()
    drawn = [draw() for _ in range(3)]
    assert len(set(drawn)) == 3
    restore_process_states(states)
    assert [draw() for _ in range(3)] == drawn
