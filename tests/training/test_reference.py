import asyncio
import dataclasses
from itertools import repeat

import numpy as np
import pytest
import torch

from losses.cross_entropy import CrossEntropyLoss
from losses.grpo import GRPOLoss
from rl.distributed.mesh import ParallelismConfig
from rl.loop import Loop, Seams
from rl.rollouts.grading import scored
from rl.rollouts.group import Group
from rl.rollouts.kl_reward import KLReward
from rl.rollouts.producer import Batch
from rl.step_checkpoints import StepCheckpoints
from rl.step_samples import SampleMaker
from rl.tasks.sum_digits import SumDigits, make_problem
from rl.training.checkpoint_config import CheckpointConfig
from rl.training.engine import TrainingEngine
from rl.training.failures import read_batch, write_batch
from rl.training.reference import ReferenceConfig, check_reference
from rl.types import Score
from tests.support.conversations import conversation, drawn
from tests.support.distributed import run_ranks
from tests.support.fakes import RENDERER, FakePolicy, ListSink, RubricScorer
from tests.support.loops import ListedTask
from tests.training.layouts import whole_gradients
from tests.training.parts import engine_config, make_samples, small_spec, write_assets

SAMPLES = make_samples()


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return write_assets(tmp_path_factory.mktemp("assets") / "model")


def kl_engine(assets, parallelism=None, *, enable=True, kl_coef=0.3, estimator="k3", **training):
    config = engine_config(parallelism=parallelism, **training)
    config.loss = GRPOLoss(kl_coef=kl_coef, kl_estimator=estimator)
    config.reference.enable = enable
    return config.build(model_spec=small_spec(), hf_assets_path=assets, device="cpu")


def gradients(engine):
    return {name: p.grad.clone() for name, p in engine.policy.parameters.items()}


def assert_near(actual, expected, *, relative=1e-5):
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert np.linalg.norm(actual[name] - tensor) <= relative * np.linalg.norm(tensor), name


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_is_exactly_zero_on_the_first_update_and_above_it_later(assets, estimator, param_dtype):
    engine = kl_engine(assets, estimator=estimator, param_dtype=param_dtype)
    assert engine.forward_backward(SAMPLES).loss_metrics["kl"] == 0.0
    engine.optim_step()
    assert abs(engine.forward_backward(SAMPLES).loss_metrics["kl"]) > 1e-5


def test_loss_metric_and_gradient_are_those_of_logprobs_of_the_start(assets):
    engine = kl_engine(assets, estimator="k2")
    start = engine.compute_logprobs(SAMPLES)
    engine.forward_backward(SAMPLES)
    engine.optim_step()
    now = engine.compute_logprobs(SAMPLES)
    result = engine.forward_backward(SAMPLES)

    valid = [s.mask & np.isfinite(s.generator_logprobs) for s in SAMPLES]
    squares = [(p - q)[m] ** 2 / 2 for p, q, m in zip(now, start, valid, strict=True)]
    kl = float(np.concatenate(squares).mean())
    assert result.loss_metrics["kl"] == pytest.approx(kl, rel=1e-3)

    # Brought by the samples, the same numbers make the same loss, with no reference policy in the engine.
    bringing = [dataclasses.replace(s, reference_logprobs=q) for s, q in zip(SAMPLES, start, strict=True)]
    other = kl_engine(assets, enable=False, kl_coef=0.0)
    other.forward_backward(bringing, loss=engine.config.loss)
    other.optim_step()
    brought = other.forward_backward(bringing, loss=engine.config.loss)
    assert brought.loss_sum == result.loss_sum
    assert brought.loss_metrics == result.loss_metrics
    assert_near(gradients(other), gradients(engine), relative=0.0)
    plain = other.forward_backward(SAMPLES, loss=GRPOLoss())
    assert result.loss_sum == pytest.approx(plain.loss_sum + 0.3 * kl * plain.num_valid_tokens, rel=1e-4)


def test_reference_stays_when_the_policy_moves_and_starts_anew_with_other_weights(assets, tmp_path):
    engine = kl_engine(assets)
    engine.forward_backward(SAMPLES)
    engine.optim_step()
    engine.save_checkpoint(str(tmp_path / "checkpoint"))
    engine.export_hf(str(tmp_path / "exported"))
    moved = engine.forward_backward(SAMPLES).loss_metrics["kl"]

    resumed = kl_engine(assets)
    resumed.load_checkpoint(str(tmp_path / "checkpoint"))
    assert resumed.forward_backward(SAMPLES).loss_metrics["kl"] == moved > 0
    resumed.load_checkpoint(str(tmp_path / "exported"))
    assert resumed.forward_backward(SAMPLES).loss_metrics["kl"] == 0.0


def test_reference_has_no_gradient_and_is_not_pushed(assets):
    engine, without = kl_engine(assets), kl_engine(assets, enable=False, kl_coef=0.0)
    engine.forward_backward(SAMPLES)
    assert all(p.grad is None for p in engine.reference._policy.parameters.values())
    assert engine.model_state_dict().keys() == without.model_state_dict().keys()


def test_switched_off_it_has_no_memory_no_forward_and_no_field(assets):
    without, watched = kl_engine(assets, enable=False, kl_coef=0.0), kl_engine(assets, kl_coef=0.0)
    assert without.reference is None
    num_forwards: dict[str, int] = {}
    for name, engine in (("without", without), ("watched", watched)):
        layer = engine.policy.model.layers[0]
        layer.register_forward_hook(
            lambda *_, name=name: num_forwards.update({name: num_forwards.get(name, 0) + 1})
        )
    of_reference = []
    watched.reference._policy.model.layers[0].register_forward_hook(lambda *_: of_reference.append(1))
    results = [engine.forward_backward(SAMPLES) for engine in (without, watched)]
    num_batches = len(without.policy.pack(SAMPLES))
    assert num_forwards == {"without": num_batches, "watched": num_batches}
    assert len(of_reference) == num_batches
    assert "kl" not in results[0].loss_metrics
    assert without.policy.pack(SAMPLES)[0].reference_logprobs is None
    # Without weight the loss and its gradient are the same bits.
    assert results[0].loss_sum == results[1].loss_sum
    assert_near(gradients(watched), gradients(without), relative=0.0)


def test_loss_without_a_kl_term_costs_no_forward_of_the_reference(assets):
    engine = kl_engine(assets)
    ran = []
    engine.reference._policy.model.register_forward_hook(lambda *_: ran.append(1))
    assert "kl" not in engine.forward_backward(SAMPLES, loss=CrossEntropyLoss()).loss_metrics
    assert ran == []


class EngineLearner(FakePolicy):
    """Asks an engine of this process for the reference policy's logprobs."""

    def __init__(self, engine: TrainingEngine) -> None:
        super().__init__(reply=lambda prompt, i: "")
        self.engine = engine

    async def compute_reference_logprobs(self, samples):
        return self.engine.compute_reference_logprobs(samples)


def test_a_gradient_does_not_compute_again_what_the_penalty_in_the_reward_has_computed(assets):
    engine, ran = kl_engine(assets), []
    rollouts = [conversation((3, drawn(5, 6, 7)), sample=0), conversation((4, drawn(8, 9)), sample=1)]
    scores = [Score(reward=1.0, correct=True), Score(reward=0.0, correct=False)]
    group = Group(
        number=0, rollouts=rollouts, scores=scores, scored=scored(rollouts, scores), generated_at=0.0
    )
    config = Loop.Config(num_prompts=1, num_samples=2, kl_reward=KLReward(coef=0.1))
    maker = SampleMaker(config=config, learner=EngineLearner(engine), adds_proximal=False)
    engine.reference._policy.model.register_forward_hook(lambda *_: ran.append(1))
    (samples,) = asyncio.run(maker.make(Batch(groups=[group], dropped=[]))).minibatches
    assert ran, "the penalty needs them once"
    num_ran = len(ran)
    result = engine.forward_backward(samples)
    assert len(ran) == num_ran
    # The same loss, bit by bit, as where it computes them itself.
    again = kl_engine(assets)
    without = [dataclasses.replace(s, reference_logprobs=None) for s in samples]
    assert again.forward_backward(without).loss_sum == result.loss_sum
    assert_near(gradients(again), gradients(engine), relative=0.0)


def test_weight_without_reference_and_reference_without_use_are_refused_before_the_start(assets):
    with pytest.raises(ValueError, match=r"loss\.kl_coef=0\.3 needs the reference policy"):
        kl_engine(assets, enable=False)
    with pytest.raises(ValueError, match=r"loss\.kl_estimator='k1' has no effect without the reference"):
        kl_engine(assets, enable=False, kl_coef=0.0, estimator="k1")
    with pytest.raises(ValueError, match=r"reference\.enable=True has no effect with loss CrossEntropyLoss"):
        check_reference(ReferenceConfig(enable=True), loss=CrossEntropyLoss())


def test_kl_in_the_reward_needs_a_reference_policy_and_is_use_enough_for_one():
    with pytest.raises(
        ValueError, match=r"a KL divergence in the reward needs the reference policy: reference\."
    ):
        check_reference(ReferenceConfig(), loss=GRPOLoss(), kl_in_reward=True)
    for loss in (GRPOLoss(), CrossEntropyLoss()):
        check_reference(ReferenceConfig(enable=True), loss=loss, kl_in_reward=True)


def test_logprobs_of_the_reference_policy_stay_those_of_the_start(assets):
    engine = kl_engine(assets, kl_coef=0.0)
    start = engine.compute_logprobs(SAMPLES)
    engine.forward_backward(SAMPLES)
    engine.optim_step()
    moved = engine.compute_logprobs(SAMPLES)
    answers = engine.compute_reference_logprobs(SAMPLES)
    for answer, p, q in zip(answers, start, moved, strict=True):
        assert answer.dtype == np.float32
        np.testing.assert_array_equal(answer, p)
        assert not np.array_equal(answer, q)
    assert engine.compute_reference_logprobs([]) == []
    without = kl_engine(assets, enable=False, kl_coef=0.0)
    with pytest.raises(ValueError, match=r"there is no reference policy to ask: reference\.enable is False"):
        without.compute_reference_logprobs(SAMPLES)


def test_reference_logprobs_of_some_samples_alone_are_refused(assets):
    engine = kl_engine(assets)
    mixed = [SAMPLES[0], dataclasses.replace(SAMPLES[1], reference_logprobs=SAMPLES[1].generator_logprobs)]
    with pytest.raises(ValueError, match="in all samples or in none: sample 1 has"):
        engine.forward_backward(mixed)
    short = [dataclasses.replace(SAMPLES[0], reference_logprobs=np.zeros(1, dtype=np.float32))]
    with pytest.raises(ValueError, match="reference_logprobs has 1 entries"):
        engine.forward_backward(short)


def test_saved_samples_keep_their_reference_logprobs(tmp_path):
    brought = [dataclasses.replace(s, reference_logprobs=s.generator_logprobs + 1) for s in SAMPLES[:3]]
    write_batch(tmp_path / "batch.npz", brought)
    for sample, original in zip(read_batch(tmp_path / "batch.npz"), brought, strict=True):
        np.testing.assert_array_equal(sample.reference_logprobs, original.reference_logprobs)
    write_batch(tmp_path / "plain.npz", SAMPLES[:3])
    assert read_batch(tmp_path / "plain.npz")[0].reference_logprobs is None


@dataclasses.dataclass(kw_only=True)
class InProcess(FakePolicy):
    """A made-up sampler, whose learner is a real engine."""

    engine: TrainingEngine

    async def forward_backward(self, samples, *, loss=None, return_logprobs=False):
        return self.engine.forward_backward(samples, loss=loss, return_logprobs=return_logprobs)

    async def optim_step(self, params=None):
        result = self.engine.optim_step(params)
        self.version = result.policy_version
        return result


def test_loop_reports_the_kl_which_grows_from_zero(assets):
    engine = kl_engine(assets, max_tokens_per_microbatch=200)
    policy = InProcess(reply=lambda prompt, i: "[ANSWER] 10" if i % 2 else "no", engine=engine)
    sink = ListSink()
    problem = make_problem([12, 34])
    loop = Loop.Config(num_steps=3, num_prompts=1, num_samples=4, eval_every=0).build(
        seams=Seams(
            sampler=policy,
            learner=policy,
            publisher=policy,
            scorer=RubricScorer(rubric=SumDigits.Config(num_integers=2).build().rubric(seed=0)),
        ),
        renderer=RENDERER,
        task=ListedTask(train=repeat(problem), held_out=[problem]),
        max_sequence_tokens=72,
        sinks=[sink],
        checkpoints=StepCheckpoints(learner=policy, config=CheckpointConfig(), folder="none"),
        seed=0,
    )
    asyncio.run(loop.run())
    first, second, third = (float(record["loss/kl"] or 0.0) for record in sink.records)
    assert first == 0.0
    assert 0.0 < second < third


LAYOUTS = {
    "fsdp4": ParallelismConfig(data_parallel_shard_degree=4),
    "hsdp2x2": ParallelismConfig(data_parallel_replicate_degree=2, data_parallel_shard_degree=2),
    "fsdp2_tp2": ParallelismConfig(data_parallel_shard_degree=2, tensor_parallel_degree=2),
    "cp2_tp2": ParallelismConfig(context_parallel_degree=2, tensor_parallel_degree=2),
}


def two_steps(assets, parallelism):
    """KL before any step and after one, and the gradients then."""
    engine = kl_engine(assets, parallelism)
    first = engine.forward_backward(SAMPLES)
    engine.optim_step()
    second = engine.forward_backward(SAMPLES)
    kls = first.loss_metrics["kl"], second.loss_metrics["kl"]
    of_reference = np.concatenate(engine.compute_reference_logprobs(SAMPLES))
    return kls, second.loss_sum, whole_gradients(engine), of_reference


def two_steps_in_every_layout(assets):
    return {name: two_steps(assets, dataclasses.replace(layout)) for name, layout in LAYOUTS.items()}


@pytest.mark.medium
def test_every_layout_has_the_kl_and_gradient_of_one_device(assets):
    (zero, kl), loss_sum, expected, of_reference = two_steps(assets, None)
    assert zero == 0.0
    for rank in run_ranks(two_steps_in_every_layout, 4, assets, timeout_s=200):
        for name, (kls, rank_loss_sum, rank_gradients, answers) in rank.items():
            np.testing.assert_allclose(answers, of_reference, atol=1e-4, err_msg=name)
            assert kls[0] == 0.0, name
            assert kls[1] == pytest.approx(kl, rel=1e-3), name
            assert rank_loss_sum == pytest.approx(loss_sum, rel=1e-4), name
            assert_near(rank_gradients, expected, relative=1e-4)


def test_reference_is_kept_in_the_dtype_of_the_forward(assets):
    engine = kl_engine(assets, param_dtype="bfloat16")
    assert {p.dtype for p in engine.reference._policy.parameters.values()} == {torch.bfloat16}
    assert {p.dtype for p in engine.policy.parameters.values()} == {torch.float32}
