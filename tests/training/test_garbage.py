import gc
import logging
import weakref

import pytest
import torch

from rl.training.garbage import GarbageCollector
from tests.training.parts import make_engine, make_samples


class Knot:
    """An object in a cycle: only a collection frees it."""

    def __init__(self):
        self.itself = self
        self.tensor = torch.zeros(5)


@pytest.fixture
def collect_every():
    made = []

    def make(every_steps, *, debug=False):
        made.append(GarbageCollector(every_steps=every_steps, debug=debug))
        return made[-1]

    yield make
    for collector in made:
        collector.close()
    assert gc.isenabled()


def test_collects_after_every_second_step_and_at_no_other_time(collect_every):
    collector = collect_every(2)
    assert not gc.isenabled()
    knot = weakref.ref(Knot())
    collector.after_step(1)
    assert knot() is not None
    collector.after_step(2)
    assert knot() is None
    collector.close()
    assert gc.isenabled()


def test_zero_leaves_collecting_to_python(collect_every):
    collector = collect_every(0)
    assert gc.isenabled()
    knot = weakref.ref(Knot())
    collector.after_step(1)
    collector.close()
    assert knot() is not None
    gc.collect()


def test_collection_that_was_off_before_stays_off(collect_every):
    gc.disable()
    try:
        collector = collect_every(1)
        collector.close()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_debug_logs_what_was_found_and_frees_it(collect_every, caplog):
    gc.collect()  # What earlier tests left is not counted.
    collector = collect_every(1, debug=True)
    knot = weakref.ref(Knot())
    with caplog.at_level(logging.INFO, logger="rl.training.garbage"):
        collector.after_step(1)
        collector.after_step(2)
    assert knot() is None
    assert gc.garbage == []
    first, second = (record.getMessage() for record in caplog.records)
    assert "after step 1: " in first
    assert "1 tensors of 20 bytes" in first
    assert "after step 2: " in second
    assert ", 0 tensors" in second


def test_engine_collects_with_its_steps_until_closed():
    engine = make_engine(None, gc_every_steps=2)
    try:
        knot = weakref.ref(Knot())
        alive = []
        for _ in range(2):
            engine.forward_backward(make_samples()[:2])
            engine.optim_step()
            alive.append(knot() is not None)
        assert alive == [True, False]
        assert not gc.isenabled()
    finally:
        engine.close()
    assert gc.isenabled()
