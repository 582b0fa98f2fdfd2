import dataclasses

import numpy as np
import pytest
import torch

from losses.correction import ImportanceCorrection
from losses.policy import GRPOLoss
from losses.types import uses_proximal_logprobs
from rl.training.config import ReferenceConfig
from tests.training.parts import assert_near, gradients, make_engine, make_samples

SAMPLES = make_samples()


def kl_engine(assets, *, enable=True, kl_coef=0.3, estimator="k3", **settings):
    loss = GRPOLoss(kl_coef=kl_coef, kl_estimator=estimator)
    return make_engine(assets, loss=loss, reference=ReferenceConfig(enable=enable), **settings)


@pytest.mark.parametrize(
    ("estimator", "param_dtype"), [("k1", "float32"), ("k2", "bfloat16"), ("k3", "bfloat16")]
)
def test_kl_is_exactly_zero_on_the_first_update_and_positive_later(assets, estimator, param_dtype):
    engine = kl_engine(assets, estimator=estimator, param_dtype=param_dtype)
    kept = {p.dtype for p in engine.reference.policy.parameters.values()}
    assert kept == {
        getattr(torch, param_dtype)
    }  # the dtype of the forward, not that of the weights
    assert engine.forward_backward(SAMPLES).loss_metrics["kl"] == 0.0
    engine.optim_step()
    assert abs(engine.forward_backward(SAMPLES).loss_metrics["kl"]) > 1e-5


def test_loss_metric_and_gradient_use_logprobs_of_the_initial_weights(assets):
    engine = kl_engine(assets, estimator="k2")
    start = engine.compute_logprobs(SAMPLES)
    engine.forward_backward(SAMPLES)
    engine.optim_step()
    now = engine.compute_logprobs(SAMPLES)
    for answer, p in zip(engine.compute_reference_logprobs(SAMPLES), start, strict=True):
        np.testing.assert_array_equal(answer, p)
    assert engine.compute_reference_logprobs([]) == []
    result = engine.forward_backward(SAMPLES)

    valid = [s.mask & np.isfinite(s.generator_logprobs) for s in SAMPLES]
    squares = [(p - q)[m] ** 2 / 2 for p, q, m in zip(now, start, valid, strict=True)]
    kl = float(np.concatenate(squares).mean())
    assert result.loss_metrics["kl"] == pytest.approx(kl, rel=1e-3)

    # Samples that bring the same numbers make the same loss, without a reference policy in the
    # engine.
    bringing = [
        dataclasses.replace(s, reference_logprobs=q) for s, q in zip(SAMPLES, start, strict=True)
    ]
    other = kl_engine(assets, enable=False, kl_coef=0.0)
    other.forward_backward(bringing, loss=engine.config.loss)
    other.optim_step()
    brought = other.forward_backward(bringing, loss=engine.config.loss)
    assert brought.loss_sum == result.loss_sum
    assert brought.loss_metrics == result.loss_metrics
    assert_near(gradients(other), gradients(engine), relative=0.0)
    plain = other.forward_backward(SAMPLES, loss=GRPOLoss())
    assert result.loss_sum == pytest.approx(
        plain.loss_sum + 0.3 * kl * plain.num_valid_tokens, rel=1e-4
    )


def test_disabled_reference_has_no_memory_forward_or_field(assets):
    without, watched = kl_engine(assets, enable=False, kl_coef=0.0), kl_engine(assets, kl_coef=0.0)
    assert without.reference is None
    with pytest.raises(
        ValueError, match=r"there is no reference policy to ask: reference\.enable is False"
    ):
        without.compute_reference_logprobs(SAMPLES)
    results = [engine.forward_backward(SAMPLES) for engine in (without, watched)]
    assert "kl" not in results[0].loss_metrics
    assert without.policy.pack(SAMPLES)[0].reference_logprobs is None
    # With zero weight the loss and its gradient have the same bits.
    assert results[0].loss_sum == results[1].loss_sum
    assert_near(gradients(watched), gradients(without), relative=0.0)


TRUNCATED = GRPOLoss(correction=ImportanceCorrection(level="sequence", high=1.5))
MASKED = GRPOLoss(correction=ImportanceCorrection(mode="mask", low=0.8, high=1.2))


@pytest.fixture(scope="module")
def stale(assets):
    """Return samples drawn by a policy close to the engine's, with versions that change within a
    sequence.
    """
    samples = make_samples()
    random = np.random.default_rng(5)
    made = []
    for sample, p in zip(samples, make_engine(assets).compute_logprobs(samples), strict=True):
        drawn = np.isfinite(sample.generator_logprobs)
        half = np.arange(len(p)) < len(p) // 2
        noise = np.where(half, 0.3, 0.1) * random.standard_normal(len(p))
        made.append(
            dataclasses.replace(
                sample,
                generator_logprobs=np.where(drawn, p + noise, np.nan).astype(np.float32),
                policy_versions=np.where(drawn, np.where(half, 3, 4), -1).astype(np.int32),
            )
        )
    return made


def with_proximal(samples, proximal):
    return [
        dataclasses.replace(s, proximal_logprobs=p) for s, p in zip(samples, proximal, strict=True)
    ]


def test_ratio_compares_with_the_policy_before_the_first_minibatch(assets, stale):
    assert uses_proximal_logprobs(TRUNCATED)
    engine = make_engine(assets)
    prepared = with_proximal(stale, engine.compute_logprobs(stale))
    engine.forward_backward(prepared[:6], loss=TRUNCATED)
    engine.optim_step()
    second = prepared[6:]
    logprobs = engine.compute_logprobs(second)
    ratios = [
        np.exp(p - s.proximal_logprobs)[s.mask & np.isfinite(s.generator_logprobs)]
        for p, s in zip(logprobs, second, strict=True)
    ]
    result = engine.forward_backward(second, loss=TRUNCATED)
    assert result.ratio_mean == pytest.approx(np.concatenate(ratios).mean(), rel=1e-5)
    assert abs(result.ratio_mean - 1.0) > 1e-3
    assert 0.0 < result.loss_metrics["correction_truncated"] < 1.0
    assert result.denominator == result.num_valid_tokens == sum(map(len, ratios))


def test_proximal_logprobs_default_to_the_current_policy(assets, stale):
    """The bits are those with given logprobs of the same weights, so one optimizer step per batch
    is exact."""
    own, given = make_engine(assets), make_engine(assets)
    prepared = with_proximal(stale, given.compute_logprobs(stale))
    for loss in (TRUNCATED, MASKED):  # no step in between, so gradients add up
        result = own.forward_backward(stale, loss=loss)
        filled = given.forward_backward(prepared, loss=loss)
        assert result.loss_sum == filled.loss_sum
        assert result.loss_metrics == filled.loss_metrics
        assert result.ratio_mean == 1.0
        assert_near(gradients(own), gradients(given), relative=0.0)


@pytest.mark.parametrize("field", ["reference_logprobs", "proximal_logprobs"])
def test_logprobs_of_only_some_samples_or_another_length_are_refused(assets, field):
    def with_field(sample, values):
        return dataclasses.replace(sample, **{field: values})

    engine = make_engine(assets)
    with pytest.raises(ValueError, match=f"{field} must be set in all samples or in none"):
        engine.forward_backward([SAMPLES[0], with_field(SAMPLES[1], SAMPLES[1].generator_logprobs)])
    with pytest.raises(ValueError, match=f"{field} has shape"):
        engine.forward_backward([with_field(SAMPLES[0], np.zeros(1, dtype=np.float32))])
