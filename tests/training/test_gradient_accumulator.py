import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from losses.cross_entropy import CrossEntropyLoss
from losses.grpo import GRPOLoss
from rl.training.errors import NonFiniteLossError
from rl.training.failures import read_batch
from rl.types import OptimParams
from tests.training.parts import (
    assert_near,
    gradients,
    logprobs_of,
    make_engine,
    make_samples,
    plain_model,
    write_assets,
)

SAMPLES = make_samples()
PLAIN_SUM = CrossEntropyLoss(normalization="none")


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return write_assets(tmp_path_factory.mktemp("assets") / "model")


def test_forward_returns_what_forward_backward_does_and_leaves_the_gradient(assets):
    engine, other = make_engine(assets), make_engine(assets)
    for each in (engine, other):
        each.forward_backward(SAMPLES[:4], loss=PLAIN_SUM)
    before = gradients(engine)
    loss = GRPOLoss(entropy_coef=0.1)  # another denominator than the gradient's
    measured = engine.forward(SAMPLES, loss=loss)
    assert_near(gradients(engine), before, relative=0.0)
    reference = make_engine(assets).forward_backward(SAMPLES, loss=loss, return_logprobs=True)
    assert replace(measured, time_s=0.0) == replace(reference, time_s=0.0)
    for ours, theirs in zip(logprobs_of(measured), logprobs_of(reference), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert engine.optim_step().grad_norm == other.optim_step().grad_norm
    assert (
        make_engine(assets).forward(SAMPLES).loss_sum
        == make_engine(assets).forward_backward(SAMPLES).loss_sum
    )


@pytest.mark.parametrize("is_written", [True, False])
def test_samples_are_kept_until_the_step_only_where_a_failure_writes_them(assets, tmp_path, is_written):
    engine = make_engine(assets, failure_folder=str(tmp_path) if is_written else None)
    sample = replace(SAMPLES[0])
    others = sys.getrefcount(sample)
    engine.forward_backward([sample], loss=PLAIN_SUM)
    assert sys.getrefcount(sample) == others + is_written
    engine.optim_step()
    assert sys.getrefcount(sample) == others


def test_forward_alone_leaves_nothing_to_step_with(assets):
    engine = make_engine(assets)
    engine.forward(SAMPLES)
    assert all(p.grad is None for p in engine.policy.parameters.values())
    with pytest.raises(ValueError, match="without an accumulated gradient"):
        engine.optim_step()
    with pytest.raises(ValueError, match="forward got no samples"):
        engine.forward([])


def test_a_forward_whose_loss_is_not_finite_says_so_and_keeps_the_gradient(assets, tmp_path):
    engine = make_engine(assets, failure_folder=str(tmp_path))
    engine.forward_backward(SAMPLES)
    before = gradients(engine)
    broken = replace(SAMPLES[3], advantages=np.full_like(SAMPLES[3].advantages, np.nan))
    with pytest.raises(NonFiniteLossError, match="loss nan"):
        engine.forward([broken])
    assert len(read_batch(tmp_path / "nan_batch_version_0.npz")) == 1
    assert_near(gradients(engine), before, relative=0.0)


def test_dropping_the_gradient_forgets_what_was_accumulated(assets):
    engine, other = make_engine(assets), make_engine(assets)
    engine.forward_backward(SAMPLES[5:], loss=PLAIN_SUM)
    engine.drop_gradient()
    for each in (engine, other):
        each.forward_backward(SAMPLES[:5], loss=GRPOLoss())
    assert_near(gradients(engine), gradients(other), relative=0.0)
    engine.drop_gradient()
    with pytest.raises(ValueError, match="without an accumulated gradient"):
        engine.optim_step()


def test_a_step_without_a_gradient_is_one_with_a_gradient_of_zero(assets):
    engine = make_engine(assets)
    engine.forward_backward(SAMPLES)
    engine.optim_step()
    model = plain_model(engine)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-2, weight_decay=0.1)
    states = engine.optimizer.state_tensors()
    named = dict(model.named_parameters())
    for name, parameter in engine.policy.parameters.items():
        adam.state[named[name]] = {key: value.clone() for key, value in states[parameter].items()}
        named[name].grad = torch.zeros_like(named[name])
    adam.step()
    result = engine.optim_step(allow_empty=True)
    assert (result.grad_norm, result.policy_version) == (0.0, 2)
    assert_near(dict(engine.policy.parameters), named, relative=1e-6)
    assert all(p.grad is None for p in engine.policy.parameters.values())


def test_a_step_of_samples_without_a_valid_token_may_be_one_of_zero(assets):
    engine, other = make_engine(assets), make_engine(assets)
    nothing = replace(SAMPLES[3], mask=np.zeros_like(SAMPLES[3].mask))
    engine.forward_backward([nothing])
    assert engine.optim_step(allow_empty=True).grad_norm == 0.0
    other.optim_step(allow_empty=True)
    assert_near(dict(engine.policy.parameters), dict(other.policy.parameters), relative=0.0)


def test_a_step_that_may_be_empty_is_the_same_where_it_is_not(assets):
    one, other = make_engine(assets), make_engine(assets)
    for engine in (one, other):
        engine.forward_backward(SAMPLES)
    params = OptimParams(max_norm=math.inf)
    assert one.optim_step(params, allow_empty=True).grad_norm == other.optim_step(params).grad_norm
    assert_near(dict(one.policy.parameters), dict(other.policy.parameters), relative=0.0)


# Logprobs of some samples


def test_logprobs_of_some_samples_are_those_of_all_and_change_no_bit_of_the_gradient(assets):
    places = [11, 2, 7]
    whole, some, none = (make_engine(assets) for _ in range(3))
    expected = logprobs_of(whole.forward_backward(SAMPLES, return_logprobs=True))
    result = some.forward_backward(SAMPLES, return_logprobs=places)
    for ours, place in zip(logprobs_of(result), places, strict=True):
        np.testing.assert_array_equal(ours, expected[place])
    plain = none.forward_backward(SAMPLES)
    assert plain.logprobs is None
    assert replace(plain, time_s=0.0) == replace(result, time_s=0.0)
    assert_near(gradients(some), gradients(none), relative=0.0)
    assert none.forward_backward(SAMPLES, return_logprobs=[]).logprobs is None


@pytest.mark.parametrize(
    ("places", "says"),
    [
        ([0, 13], "return_logprobs has 13: must be places of samples, 0 to 12"),
        ([3, 3], r"=\[3, 3\]: .*twice"),
    ],
)
def test_logprobs_of_samples_that_are_not_there_are_refused_before_anything_is_computed(assets, places, says):
    engine = make_engine(assets)
    with pytest.raises(ValueError, match=says):
        engine.forward_backward(SAMPLES, return_logprobs=places)
    assert all(p.grad is None for p in engine.policy.parameters.values())
