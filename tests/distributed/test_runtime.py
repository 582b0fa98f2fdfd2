import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from rl.utils.processes import seed_everything, use_threads


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


def draw():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_seed_and_offset_determine_the_draws():
    seed_everything(7)
    first = draw()
    seed_everything(7)
    assert draw() == first
    seed_everything(7, offset=1)
    assert all(a != b for a, b in zip(draw(), first, strict=True))
