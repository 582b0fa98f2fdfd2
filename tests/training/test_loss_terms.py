"""What losses ask of the engine: the entropy's gradient, and denominators other than tokens."""

import dataclasses

import numpy as np
import pytest
import torch

from losses.cross_entropy import CrossEntropyLoss
from losses.dr_grpo import DrGRPOLoss
from losses.grpo import GRPOLoss
from losses.gspo import GSPOLoss
from losses.rloo import RLOOLoss
from rl.distributed.compile import CompileConfig
from rl.distributed.mesh import ParallelismConfig
from tests.support.distributed import run_ranks
from tests.training.layouts import whole_gradients
from tests.training.parts import engine_config, make_engine, make_samples, small_spec, write_assets

SAMPLES = make_samples()
NUM_VALID = sum(int((s.mask & np.isfinite(s.generator_logprobs)).sum()) for s in SAMPLES)
BONUS = GRPOLoss(entropy_coef=0.7)


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return write_assets(tmp_path_factory.mktemp("assets") / "model")


def gradients(engine):
    return {name: p.grad.numpy().copy() for name, p in engine.policy.parameters.items()}


def assert_near(actual, expected, *, relative=1e-5):
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert np.linalg.norm(actual[name] - tensor) <= relative * np.linalg.norm(tensor), name


def of_loss(engine, loss, *, parts=((0, 13),)):
    """Loss and gradients, divided as the optimizer step divides them."""
    results = [engine.forward_backward(SAMPLES[a:b], loss=loss) for a, b in parts]
    scale = engine._step.scale()
    return (
        scale * sum(r.loss_sum for r in results),
        {name: scale * g for name, g in gradients(engine).items()},
    )


def test_bonus_moves_the_policy_by_the_gradient_of_the_mean_entropy(assets):
    """Which a finite difference of the entropy that the engine reports confirms."""
    with_bonus, without = make_engine(assets), make_engine(assets)
    value, bonus = of_loss(with_bonus, BONUS)
    plain_value, plain = of_loss(without, GRPOLoss())
    # One token of a sample was not drawn: its entropy is reported, but is none of the valid tokens'.
    drawn = [dataclasses.replace(s, mask=s.mask & np.isfinite(s.generator_logprobs)) for s in SAMPLES]
    engine = make_engine(assets)
    entropy = engine.forward_backward(drawn).entropy_mean
    assert value == pytest.approx(plain_value - 0.7 * entropy, rel=1e-5)
    direction = {name: (plain[name] - bonus[name]) / 0.7 for name in plain}
    slope = float(sum((d.astype(np.float64) ** 2).sum() for d in direction.values()))
    step = 0.01 / np.sqrt(slope)
    ends = []
    for sign in (1, -1):
        moved = make_engine(assets)
        with torch.no_grad():
            for name, parameter in moved.policy.parameters.items():
                parameter.add_(torch.from_numpy(direction[name]), alpha=sign * step)
        ends.append(moved.forward_backward(drawn).entropy_mean)
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(slope, rel=1e-2)


@pytest.mark.parametrize("change", ["chunks", pytest.param("compiled", marks=pytest.mark.medium)])
def test_bonus_is_the_same_with_chunked_logits_and_a_compiled_head(assets, change):
    expected_value, expected = of_loss(make_engine(assets), BONUS)
    config = engine_config(logits_chunk_tokens=7 if change == "chunks" else None)
    if change == "compiled":
        config.compile = CompileConfig(enable=True, components=("loss",), backend="aot_eager")
    engine = config.build(model_spec=small_spec(), hf_assets_path=assets, device="cpu")
    value, actual = of_loss(engine, BONUS)
    assert value == pytest.approx(expected_value, rel=1e-5)
    assert_near(actual, expected)


def test_a_loss_gets_the_entropy_with_its_gradient_if_it_asks_and_else_nothing(assets):
    seen = []

    @dataclasses.dataclass(kw_only=True)
    class Watching(GRPOLoss):
        def __call__(self, inputs):
            seen.append(inputs.entropy)
            return GRPOLoss.__call__(self, inputs)

    engine = make_engine(assets)
    engine.forward_backward(SAMPLES, loss=Watching())
    assert seen
    assert all(entropy is None for entropy in seen)
    seen.clear()
    engine.forward_backward(SAMPLES, loss=Watching(entropy_coef=0.1))
    assert all(entropy.requires_grad for entropy in seen)


LAYOUTS = {
    "fsdp2_tp2": ParallelismConfig(data_parallel_shard_degree=2, tensor_parallel_degree=2),
    "cp2_tp2": ParallelismConfig(context_parallel_degree=2, tensor_parallel_degree=2),
    "tp2_gathered": ParallelismConfig(
        data_parallel_replicate_degree=2,
        data_parallel_shard_degree=1,
        tensor_parallel_degree=2,
        loss_parallel=False,
    ),
}
BY_SEQUENCE = GSPOLoss(entropy_coef=0.3, clip_low=0.5, clip_high=0.5)
"""With the entropy, ratios of sequences and their number as denominator."""


def in_layouts(assets):
    results = {}
    for name, parallelism in LAYOUTS.items():
        engine = make_engine(assets, parallelism=dataclasses.replace(parallelism))
        result = engine.forward_backward(SAMPLES, loss=BY_SEQUENCE)
        results[name] = (result.loss_sum, result.denominator, whole_gradients(engine))
    return results


@pytest.mark.medium
def test_every_layout_has_the_loss_and_gradients_of_one_device(assets):
    engine = make_engine(assets)
    result = engine.forward_backward(SAMPLES, loss=BY_SEQUENCE)
    for rank in run_ranks(in_layouts, 4, assets, timeout_s=200):
        for name, (loss_sum, denominator, actual) in rank.items():
            assert loss_sum == pytest.approx(result.loss_sum, rel=1e-4), name
            assert denominator == result.denominator == 13
            assert_near(actual, gradients(engine), relative=1e-4)


NORMALIZED = {
    "token_mean": GRPOLoss(),
    "sequence_mean": GRPOLoss(normalization="sequence_mean"),
    "constant": DrGRPOLoss(tokens_per_sequence=20),
    "none": GRPOLoss(normalization="none"),
    "of sequences": RLOOLoss(clip_low=1.0, clip_high=50.0),
    "supervised": CrossEntropyLoss(normalization="sequence_mean"),
}


@pytest.mark.parametrize("name", NORMALIZED)
def test_calls_on_parts_equal_one_call_whatever_the_normalization(assets, name):
    loss = NORMALIZED[name]
    value, whole = of_loss(make_engine(assets), loss)
    # Terms of both signs nearly cancel: a sum's error is compared with its terms, not with what is left.
    engine = make_engine(assets)
    terms = [engine.forward_backward([sample], loss=loss).loss_sum for sample in SAMPLES]
    size = engine._step.scale() * sum(abs(term) for term in terms)
    for parts in (((0, 5), (5, 13)), tuple((i, i + 1) for i in range(13))):
        engine = make_engine(assets)
        value_of_parts, actual = of_loss(engine, loss, parts=parts)
        assert value_of_parts == pytest.approx(value, abs=1e-5 * size)
        assert_near(actual, whole)
        assert engine._step.denominator == {"token_mean": NUM_VALID, "constant": 260, "none": None}.get(
            name, 13
        )
