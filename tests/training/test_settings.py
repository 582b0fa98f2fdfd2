"""Settings of a step and of precision, each checked by the numbers that it changes."""

import gc
import logging
import math
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from losses.types import LossOutput
from rl.training.garbage import GarbageCollector
from rl.types import OptimParams
from tests.training.parts import make_engine, make_samples

SAMPLES = make_samples()
LR, BETAS, EPS, WEIGHT_DECAY = 1e-2, (0.9, 0.95), 1e-2, 0.1
"""Settings of `engine_config`."""


def doubles(engine, read):
    return {name: read(p).detach().double() for name, p in engine.policy.parameters.items()}


class AdamWByHand:
    """AdamW by Loshchilov and Hutter (2019), algorithm 2, in float64."""

    def __init__(self, weights):
        self.weights = weights
        self.means = {name: torch.zeros_like(w) for name, w in weights.items()}
        self.squares = {name: torch.zeros_like(w) for name, w in weights.items()}
        self.num_steps = 0

    def step(self, gradients, *, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, max_norm=math.inf):
        self.num_steps += 1
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        for name, gradient in gradients.items():
            g = gradient * min(1.0, max_norm / norm)
            self.means[name] = betas[0] * self.means[name] + (1 - betas[0]) * g
            self.squares[name] = betas[1] * self.squares[name] + (1 - betas[1]) * g**2
            mean = self.means[name] / (1 - betas[0] ** self.num_steps)
            square = self.squares[name] / (1 - betas[1] ** self.num_steps)
            decayed = self.weights[name] * (1 - lr * weight_decay)
            self.weights[name] = decayed - lr * mean / (square.sqrt() + eps)


@pytest.mark.parametrize(
    "params",
    [
        {"lr": 3e-3},
        {"betas": (0.5, 0.95)},
        {"betas": (0.9, 0.6)},
        {"eps": 0.3},
        {"weight_decay": 5.0},
        {"max_norm": 0.05},
    ],
)
def test_each_optim_param_replaces_the_configured_setting_for_one_step(assets, params):
    engine = make_engine(assets, max_norm=math.inf)
    by_hand = AdamWByHand(doubles(engine, lambda p: p.clone()))
    nothing: dict[str, Any] = {}
    for given in (nothing, params, nothing):
        num_tokens = engine.forward_backward(SAMPLES).num_valid_tokens
        gradients = doubles(engine, lambda p, n=num_tokens: p.grad / n)
        engine.optim_step(OptimParams(**given))
        by_hand.step(gradients, **given)
        for name, weight in doubles(engine, lambda p: p).items():
            torch.testing.assert_close(weight, by_hand.weights[name], rtol=1e-5, atol=1e-6, msg=name)


@dataclass(frozen=True)
class Put:
    """Loss with an operation that has no deterministic kernel."""

    def __call__(self, inputs):
        logprobs_T = torch.where(inputs.mask, inputs.logprobs, 0.0)
        put_T = torch.zeros_like(logprobs_T).put(torch.arange(len(logprobs_T)), logprobs_T)
        return LossOutput(loss_sum=put_T.sum(), denominator=None, num_tokens=inputs.mask.sum().float())


def test_deterministic_refuses_an_operation_without_a_deterministic_kernel(assets):
    assert not torch.are_deterministic_algorithms_enabled()
    make_engine(assets)
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        engine = make_engine(assets, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            engine.forward_backward(SAMPLES, loss=Put())
    finally:
        torch.use_deterministic_algorithms(False)
    make_engine(assets).forward_backward(SAMPLES, loss=Put())


def test_parameters_gradients_and_moments_have_the_dtype_and_steps_round_to_it(assets):
    kept = {}
    for dtype in ("float32", "bfloat16"):
        engine = make_engine(assets, dtype=dtype, param_dtype="bfloat16")
        engine.forward_backward(SAMPLES)
        gradients = {p.grad.dtype for p in engine.policy.parameters.values() if p.grad is not None}
        before = doubles(engine, lambda p: p.clone())
        engine.optim_step(OptimParams(lr=1e-6, weight_decay=0.0))
        after = doubles(engine, lambda p: p)
        states = engine.optimizer.state_tensors()
        moments = {states[p]["exp_avg"].dtype for p in engine.policy.parameters.values()}
        parameters = {p.dtype for p in engine.policy.parameters.values()}
        assert parameters == gradients == moments == {getattr(torch, dtype)}
        name = "norm.weight"  # about 1, so that 1e-6 is far below the spacing of bfloat16, 2**-8
        kept[dtype] = torch.equal(before[name], after[name])
    assert kept == {"float32": False, "bfloat16": True}


class Knot:
    """Object in a cycle, which only a collection frees."""

    def __init__(self):
        self.itself = self


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


def test_collection_runs_only_after_every_second_step(collect_every):
    collector = collect_every(2)
    assert not gc.isenabled()
    knot = weakref.ref(Knot())
    collector.after_step(1)
    assert knot() is not None
    collector.after_step(2)
    assert knot() is None
    collector.close()
    assert gc.isenabled()


def test_debug_logs_and_frees_the_garbage_found(collect_every, caplog):
    gc.collect()  # Garbage of earlier tests is not counted.
    collector = collect_every(1, debug=True)
    knot = weakref.ref(Knot())
    with caplog.at_level(logging.INFO, logger="rl.training.garbage"):
        collector.after_step(1)
        collector.after_step(2)
    assert knot() is None
    first, second = (record.getMessage() for record in caplog.records)
    assert "after step 1: " in first
    assert "after step 2: 0 objects" in second
