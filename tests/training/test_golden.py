"""Losses of ten steps equal those recorded in golden.json, on a machine that it knows."""

import pytest

from tests.support.distributed import run_ranks
from tests.training import golden

pytestmark = pytest.mark.medium


def run_all():
    """Return machine and steps by option, from a process with one thread from its start."""
    runs = {option: golden.run_steps(option) for option in golden.NEUTRAL}
    return golden.machine(), runs | {"plain": golden.run_steps(), "again": golden.run_steps()}


@pytest.fixture(scope="module")
def ran():
    ((machine, runs),) = run_ranks(run_all, 1, timeout_s=55)
    return machine, runs


def test_two_runs_and_runs_with_neutral_options_have_the_same_bits(ran):
    _, runs = ran
    losses = [loss for loss, _ in runs["plain"]]
    assert len(set(losses)) == golden.NUM_STEPS  # losses are not constant: each step has other samples
    assert [name for name, steps in runs.items() if steps != runs["plain"]] == []


def test_losses_are_those_recorded_for_this_machine(ran):
    machine, runs = ran
    expected = golden.recorded().get(machine)
    if expected is None:  # the test above, of two runs, must be enough
        assert runs["plain"] == runs["again"]
        return
    assert runs["plain"] == expected, (
        "numbers changed: if they were meant to, `make golden` renews the record"
    )
