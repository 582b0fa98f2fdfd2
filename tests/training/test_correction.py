"""The importance correction within the engine: proximal logprobs on their way, layouts, metrics, settings."""

import dataclasses

import numpy as np
import pytest

from losses.correction import ImportanceCorrection
from losses.grpo import GRPOLoss
from losses.types import uses_proximal_logprobs
from rl.config.cli import parse_cli
from rl.config.serialize import read_json, write_json
from rl.distributed.mesh import ParallelismConfig
from rl.training.failures import read_batch, write_batch
from tests.support.distributed import run_ranks
from tests.training.layouts import whole_gradients
from tests.training.parts import make_engine, make_samples, write_assets

CORRECTIONS = {
    "token": ImportanceCorrection(high=1.2),
    "token mask": ImportanceCorrection(mode="mask", low=0.8, high=1.2),
    "sequence": ImportanceCorrection(level="sequence", high=1.5),
    "sequence mask": ImportanceCorrection(level="sequence", mode="mask", low=0.5, high=1.5),
    "sequence mean": ImportanceCorrection(level="sequence_mean", mode="mask", low=0.95, high=1.05),
}
LOSSES = {name: GRPOLoss(correction=correction) for name, correction in CORRECTIONS.items()}


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return write_assets(tmp_path_factory.mktemp("assets") / "model")


@pytest.fixture(scope="module")
def stale(assets):
    """Samples that a policy not far from the engine's drew, its versions changing within a sequence."""
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
    return [dataclasses.replace(s, proximal_logprobs=p) for s, p in zip(samples, proximal, strict=True)]


def gradients(engine):
    return {name: p.grad.clone() for name, p in engine.policy.parameters.items()}


def assert_near(actual, expected, *, relative=1e-5):
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert np.linalg.norm(actual[name] - tensor) <= relative * np.linalg.norm(tensor), name


def by_hand(samples, logprobs, correction):
    """Loss, weights, ratios and number of changed weights, in float64, sample by sample."""
    loss, weights, ratios, num_outside = 0.0, [], [], 0
    for sample, now in zip(samples, logprobs, strict=True):
        valid = sample.mask & np.isfinite(sample.generator_logprobs)
        p, q, old, advantages = (
            values[valid].astype(np.float64)
            for values in (now, sample.generator_logprobs, sample.proximal_logprobs, sample.advantages)
        )
        d = old - q
        if correction.level == "sequence":
            d = np.full_like(d, d.sum())
        elif correction.level == "sequence_mean" and len(d):
            d = np.full_like(d, d.mean())
        rho = np.exp(d)
        outside = (rho < correction.low) | (rho > correction.high)
        w = np.minimum(rho, correction.high) if correction.mode == "truncate" else np.where(outside, 0, rho)
        r = np.exp(p - old)
        loss -= (w * np.minimum(r * advantages, r.clip(0.8, 1.2) * advantages)).sum()
        num_outside += outside.sum()
        weights.append(w)
        ratios.append(r)
    return loss, np.concatenate(weights), np.concatenate(ratios), num_outside


@pytest.mark.parametrize("name", LOSSES)
def test_second_minibatch_of_a_round_is_compared_with_the_policy_before_the_first(assets, stale, name):
    loss, correction = LOSSES[name], CORRECTIONS[name]
    assert uses_proximal_logprobs(loss)
    engine = make_engine(assets)
    prepared = with_proximal(stale, engine.compute_logprobs(stale))
    engine.forward_backward(prepared[:6], loss=loss)
    engine.optim_step()
    second = prepared[6:]
    expected, weights, ratios, num_outside = by_hand(second, engine.compute_logprobs(second), correction)
    result = engine.forward_backward(second, loss=loss)
    assert result.loss_sum == pytest.approx(expected, rel=1e-4)
    assert result.ratio_mean == pytest.approx(ratios.mean(), rel=1e-5)
    assert abs(result.ratio_mean - 1.0) > 1e-3
    metrics = result.loss_metrics
    assert metrics["correction_weight"] == pytest.approx(weights.mean(), rel=1e-5)
    assert metrics["correction_weight_squared"] == pytest.approx((weights**2).mean(), rel=1e-5)
    share = "correction_truncated" if correction.mode == "truncate" else "correction_masked"
    assert metrics[share] == pytest.approx(num_outside / len(weights))
    assert 0.0 < metrics[share] < 1.0
    assert result.denominator == result.num_valid_tokens == len(weights)


def test_without_proximal_logprobs_the_policy_itself_is_taken(assets, stale):
    """Exact for one optimizer step a batch: the same bits as with the logprobs of the same weights."""
    own, given = make_engine(assets), make_engine(assets)
    prepared = with_proximal(stale, given.compute_logprobs(stale))
    for loss in LOSSES.values():  # without a step between, so gradients add up
        result = own.forward_backward(stale, loss=loss)
        filled = given.forward_backward(prepared, loss=loss)
        assert result.loss_sum == filled.loss_sum
        assert result.loss_metrics == filled.loss_metrics
        assert result.ratio_mean == 1.0
        assert_near(gradients(own), gradients(given), relative=0.0)


@pytest.mark.parametrize("name", LOSSES)
def test_calls_on_parts_and_other_packings_equal_one_call(assets, stale, name):
    loss = LOSSES[name]
    whole, parts, loose = (
        make_engine(assets),
        make_engine(assets),
        make_engine(assets, max_tokens_per_microbatch=18),
    )
    result = whole.forward_backward(stale, loss=loss)
    results = [parts.forward_backward(part, loss=loss) for part in (stale[:2], stale[2:9], stale[9:])]
    assert sum(part.denominator for part in results) == result.denominator
    assert sum(part.loss_sum for part in results) == pytest.approx(result.loss_sum, rel=1e-5)
    assert_near(gradients(parts), gradients(whole))
    assert loose.forward_backward(stale, loss=loss).loss_metrics == pytest.approx(
        result.loss_metrics, rel=1e-5
    )
    assert_near(gradients(loose), gradients(whole))


def test_proximal_logprobs_of_some_samples_alone_or_of_another_length_are_refused(assets, stale):
    engine = make_engine(assets)
    mixed = [stale[0], dataclasses.replace(stale[1], proximal_logprobs=stale[1].generator_logprobs)]
    with pytest.raises(ValueError, match="proximal_logprobs must be there in all samples or in none"):
        engine.forward_backward(mixed)
    short = [dataclasses.replace(stale[0], proximal_logprobs=np.zeros(1, dtype=np.float32))]
    with pytest.raises(ValueError, match="proximal_logprobs has 1 entries"):
        engine.forward_backward(short)


def test_saved_samples_keep_their_proximal_logprobs(tmp_path, stale):
    brought = [dataclasses.replace(s, proximal_logprobs=s.generator_logprobs + 1) for s in stale[:3]]
    write_batch(tmp_path / "batch.npz", brought)
    for sample, original in zip(read_batch(tmp_path / "batch.npz"), brought, strict=True):
        np.testing.assert_array_equal(sample.proximal_logprobs, original.proximal_logprobs)
        assert sample.reference_logprobs is None


LAYOUTS = {
    "fsdp2_tp2": ParallelismConfig(data_parallel_shard_degree=2, tensor_parallel_degree=2),
    # A rank has the first and the last quarter of a micro-batch's 40 tokens, or those between.
    "cp2_tp2": ParallelismConfig(context_parallel_degree=2, tensor_parallel_degree=2),
}


def measured(assets, samples, parallelism):
    """Of an engine on this rank: sum and metrics of each loss, and the gradients of all together."""
    engine = make_engine(assets, parallelism=parallelism)
    results = {name: engine.forward_backward(samples, loss=loss) for name, loss in LOSSES.items()}
    said = {name: (result.loss_sum, dict(result.loss_metrics)) for name, result in results.items()}
    return said, whole_gradients(engine)


def measured_in_every_layout(assets, samples):
    return {name: measured(assets, samples, dataclasses.replace(layout)) for name, layout in LAYOUTS.items()}


@pytest.mark.medium
def test_sequences_cut_over_ranks_have_the_weights_and_gradients_of_one_device(assets, stale):
    """Of given proximal logprobs, so that no rounding decides what is within the bounds."""
    random = np.random.default_rng(6)
    proximal = [s.generator_logprobs + 0.2 * random.standard_normal(len(s.mask)) for s in stale]
    samples = with_proximal(stale, [p.astype(np.float32) for p in proximal])
    expected_said, expected = measured(assets, samples, None)
    for rank in run_ranks(measured_in_every_layout, 4, assets, samples, timeout_s=200):
        for layout, (said, tensors) in rank.items():
            for name, (loss_sum, metrics) in said.items():
                assert loss_sum == pytest.approx(expected_said[name][0], rel=1e-4), (layout, name)
                assert metrics == pytest.approx(expected_said[name][1], rel=1e-4), (layout, name)
            assert_near(tensors, expected, relative=1e-4)


WHERE = {"default_module": "tests.training.corrected_configs", "default_config": "corrected"}


def test_correction_is_set_by_a_registry_function_the_command_line_and_a_file(tmp_path):
    argv = ["--trainer.loss.correction.mode", "mask", "--trainer.loss.correction.low", "0.5"]
    run = parse_cli(argv, **WHERE)
    assert run.config.trainer.loss.correction == ImportanceCorrection(level="sequence", mode="mask", low=0.5)
    write_json(run, tmp_path / "config.json")
    assert read_json(tmp_path / "config.json").config.trainer.loss == run.config.trainer.loss
    off = parse_cli(["--trainer.loss.correction", "None"], **WHERE)
    assert off.config.trainer.loss == GRPOLoss()


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("low", "0.5", "loss.correction: low=0.5 has no effect with mode='truncate'"),
        ("high", "0.5", "loss.correction: high=0.5: must be at least 1"),
        ("level", "word", "'word' is not of type 'token' | 'sequence' | 'sequence_mean'"),
    ],
)
def test_what_cannot_be_is_refused_before_the_start(field, value, says, capsys):
    with pytest.raises(SystemExit):
        parse_cli([f"--trainer.loss.correction.{field}", value], **WHERE)
    assert says in capsys.readouterr().err
