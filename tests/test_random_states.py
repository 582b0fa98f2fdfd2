import random
import subprocess
import sys

import numpy as np
import torch

from rl.random_states import process_states, restore_process_states


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_what_is_drawn_after_a_restore_is_what_was_drawn_after_the_state_was_taken():
    states = process_states()
    drawn = [draw() for _ in range(3)]
    assert len(set(drawn)) == 3
    restore_process_states(states)
    assert [draw() for _ in range(3)] == drawn


def test_a_process_without_numpy_and_torch_imports_neither_and_takes_states_of_one_that_has_them(tmp_path):
    (tmp_path / "states").write_bytes(process_states())
    first = random.random()
    code = f"""
import random, sys
from pathlib import Path
from rl.random_states import process_states, restore_process_states
process_states()
restore_process_states(Path({str(tmp_path / "states")!r}).read_bytes())
assert random.random() == {first!r}
assert not {{"numpy", "torch"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
