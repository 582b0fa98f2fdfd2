import random

import numpy as np
import torch

from rl.distributed.seeds import random_states, restore_random_states, seed_everything


def draw():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_same_seed_draws_the_same_and_another_rank_something_else():
    seed_everything(7)
    first = draw()
    seed_everything(7)
    assert draw() == first
    seed_everything(7, offset=1)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_restored_states_continue_where_they_were():
    seed_everything(7)
    draw()
    states = random_states()
    expected = draw()
    draw()
    restore_random_states(states)
    assert draw() == expected
