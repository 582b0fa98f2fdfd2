import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from rl.utils.processes import seed_everything, use_threads

COUNT_POOLS = """
import os, threading
import pytest
import torch
from rl.utils.processes import use_threads

def work():
    torch.zeros(1_000_000).add_(1)

def computing():
    use_threads(2)
    work()
    computed.set()
    counted.wait(30)

use_threads(1)
computed, counted = threading.Event(), threading.Event()
before = len(os.listdir("/proc/self/task"))
threading.Thread(target=computing).start()
computed.wait(30)
work()
print(len(os.listdir("/proc/self/task")) - before)
counted.set()
"""


def test_each_thread_keeps_its_own_count():
    def ask(count):
        use_threads(count)
        return threading.get_ident()

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        assert one.submit(ask, 1).result() != two.submit(ask, 3).result()
        assert one.submit(torch.get_num_threads).result() == 1
        assert two.submit(torch.get_num_threads).result() == 3
        one.submit(ask, 2).result()
        assert two.submit(torch.get_num_threads).result() == 3


@pytest.mark.medium
def test_thread_with_count_one_starts_no_pool():
    done = subprocess.run(
        [sys.executable, "-c", COUNT_POOLS], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(done.stdout) == 2  # the computing thread and the second thread of its pool


def draw():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_seed_and_offset_determine_the_draws():
    seed_everything(7)
    first = draw()
    seed_everything(7)
    assert draw() == first
    seed_everything(7, offset=1)
    assert all(a != b for a, b in zip(draw(), first, strict=True))
