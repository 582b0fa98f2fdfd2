"""Trainer sleep: its tensors hold no memory meanwhile, and every bit is back afterwards.

On a CPU what moves is moved from one piece of the host's memory to another, by the code that moves
it from a GPU; page-locked memory and what a GPU's allocator gives back are not tested here.
"""

import numpy as np
import pytest

from losses.policy import GRPOLoss
from rl.distributed.sharding import local_tensor
from rl.training.config import ReferenceConfig
from rl.training.sleep import TrainerSleep
from tests.support.distributed import run_ranks
from tests.training.layouts import parallelism
from tests.training.parts import built, engine_config, make_samples, step

SAMPLES = make_samples()


def make(assets, *, layout="one", name="AdamW"):
    """Return an engine with a reference policy, so that everything that can move is present."""
    config = engine_config(
        parallelism=parallelism(layout),
        loss=GRPOLoss(kl_coef=0.1),
        reference=ReferenceConfig(enable=True),
    )
    config.optimizer.name = name
    return built(config, assets)


def tensors(engine):
    """Return this rank's tensors by name: weights, optimizer state, reference policy."""
    found = {f"weights {name}": p.data for name, p in engine.policy.parameters.items()}
    for number, state in enumerate(engine.optimizer.state_tensors().values()):
        found |= {f"state {number} {name}": tensor for name, tensor in state.items()}
    return found | {f"reference {n}": p.data for n, p in engine.reference.policy.parameters.items()}


def held(engine):
    """Return the number of bytes behind the tensors, and their bits."""
    locals_ = {name: local_tensor(tensor) for name, tensor in tensors(engine).items()}
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in locals_.values()
    }
    return sum(storages.values()), {name: t.clone().numpy() for name, t in locals_.items()}


def train(engine, *, sleeps):
    """Take three steps and return their numbers and all bits after them; sleep before each step, or
    never.
    """
    sleep = TrainerSleep(engine)
    numbers = []
    for _ in range(3):
        if sleeps:
            there, before = held(engine)
            assert sleep.sleep() == there > 0
            assert sleep.asleep
            assert {
                local_tensor(t).untyped_storage().nbytes() for t in tensors(engine).values()
            } == {0}
            assert sleep.sleep() == 0
            assert sleep.wake() == there
            assert sleep.wake() == 0
            assert not sleep.asleep
            after = held(engine)[1]
            assert all(np.array_equal(after[name], bits) for name, bits in before.items())
        numbers.append(step(engine))
    logprobs = engine.compute_logprobs(SAMPLES)
    bits = held(engine)[1]
    return (
        numbers,
        [logprob.tolist() for logprob in logprobs],
        {n: b.tolist() for n, b in bits.items()},
    )


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_sleep_between_steps_changes_no_bit_and_makes_no_optimizer_state(assets, name):
    engine = make(assets, name=name)
    assert TrainerSleep(engine).sleep() > 0
    assert engine.optimizer.list_tensors() == []
    slept, awake = (train(make(assets, name=name), sleeps=sleeps) for sleeps in (True, False))
    assert slept == awake


@pytest.mark.medium
def test_sleep_restores_the_shards_of_each_rank(assets):
    both = run_ranks(with_and_without, 2, assets, "fsdp2", timeout_s=100)
    for slept, awake in both:
        assert slept == awake
    assert both[0][0][0] == both[1][0][0]


def with_and_without(assets, layout):
    first, second = make(assets, layout=layout), make(assets, layout=layout)
    both = train(first, sleeps=True), train(second, sleeps=False)
    first.close()
    return both


def test_sleep_with_an_accumulated_gradient_is_refused(assets):
    engine = make(assets)
    engine.forward_backward(SAMPLES)
    sleep = TrainerSleep(engine)
    with pytest.raises(
        ValueError, match="sleep with a gradient accumulated: call optim_step first"
    ):
        sleep.sleep()
    assert not sleep.asleep
    engine.optim_step()
    assert sleep.sleep() > 0
