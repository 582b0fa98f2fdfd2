"""Features that losses request from the engine: the entropy's gradient, and denominators other than
tokens."""

import dataclasses

import numpy as np
import pytest

from losses.cross_entropy import CrossEntropyLoss
from losses.policy import DrGRPOLoss, GRPOLoss, RLOOLoss
from rl.distributed.compile import CompileConfig
from tests.training.parts import assert_near, gradients, make_engine, make_samples

SAMPLES = make_samples()
NUM_VALID = sum(int((s.mask & np.isfinite(s.generator_logprobs)).sum()) for s in SAMPLES)
BONUS = GRPOLoss(entropy_coef=0.7)


def of_loss(engine, loss, *, parts=((0, 13),)):
    """Return loss and gradients, divided as the optimizer step divides them."""
    results = [engine.forward_backward(SAMPLES[a:b], loss=loss) for a, b in parts]
    scale = engine._gradient.scale()
    return (
        scale * sum(r.loss_sum for r in results),
        {name: scale * g for name, g in gradients(engine).items()},
    )


@pytest.mark.parametrize("change", ["chunks", pytest.param("compiled", marks=pytest.mark.medium)])
def test_entropy_bonus_is_unchanged_by_chunked_logits_and_a_compiled_head(assets, change):
    expected_value, expected = of_loss(make_engine(assets), BONUS)
    if change == "chunks":
        engine = make_engine(assets, logits_chunk_tokens=7)
    else:
        compiled = CompileConfig(enable=True, components=("loss",), backend="aot_eager")
        engine = make_engine(assets, compile=compiled)
    value, actual = of_loss(engine, BONUS)
    assert value == pytest.approx(expected_value, rel=1e-5)
    assert_near(actual, expected)


def test_loss_gets_the_entropy_with_its_gradient_only_on_request(assets):
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


NORMALIZED = {
    "token_mean": GRPOLoss(),
    "sequence_mean": GRPOLoss(normalization="sequence_mean"),
    "constant": DrGRPOLoss(tokens_per_sequence=20),
    "none": GRPOLoss(normalization="none"),
    "of sequences": RLOOLoss(clip_low=1.0, clip_high=50.0),
    "supervised": CrossEntropyLoss(normalization="sequence_mean"),
}


@pytest.mark.parametrize("name", NORMALIZED)
def test_split_calls_equal_one_call_under_every_normalization(assets, name):
    loss = NORMALIZED[name]
    value, whole = of_loss(make_engine(assets), loss)
    # Terms of both signs nearly cancel, so the error of a sum is compared with its terms, not with the sum.
    engine = make_engine(assets)
    terms = [engine.forward_backward([sample], loss=loss).loss_sum for sample in SAMPLES]
    size = engine._gradient.scale() * sum(abs(term) for term in terms)
    for parts in (((0, 5), (5, 13)), tuple((i, i + 1) for i in range(13))):
        engine = make_engine(assets)
        value_of_parts, actual = of_loss(engine, loss, parts=parts)
        assert value_of_parts == pytest.approx(value, abs=1e-5 * size)
        assert_near(actual, whole)
        assert engine._gradient.denominator == {"token_mean": NUM_VALID, "constant": 260, "none": None}.get(
            name, 13
        )
