"""What was said of a run, against what the run then does: real weights, in this process."""

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from actors.explain.arithmetic import step_arithmetic
from actors.explain.explain import explain
from actors.explain.explanation import Range
from actors.explain.known import find_out
from actors.explain.memory import memory
from actors.explain.weights import PublishedWeights, staleness
from configs.sum_digits import tiny
from losses.types import Loss
from rl.config.registry import ResolvedRun
from rl.distributed.mesh import Degrees, ParallelismConfig
from rl.distributed.shards import local_tensor
from rl.local import LocalBackend, LocalScorer
from rl.loop import Loop, Seams
from rl.loop_config import LoopConfig
from rl.models import qwen3, qwen3_moe
from rl.models.buffers import persistent_buffers
from rl.rollouts.age_bound import AgeBound
from rl.rollouts.packing import pack
from rl.rollouts.samples import demonstration_sample
from rl.step_checkpoints import StepCheckpoints
from rl.training.checkpoint_files import saved_steps
from rl.training.engine import TrainingEngine
from rl.types import ForwardBackwardResult, SamplingParams, TrainingSample
from rl.weights.shards import outgoing_parts
from tests.actors.explain.golden import LAPTOP
from tests.support.fakes import ListSink
from tests.support.loops import run, some_right
from tests.support.simulated import SimulatedPolicy
from tests.training import test_memory


def small_config(tmp_path, **edits):
    """The tiny model on few, short samples, several micro-batches of them."""
    config: Any = tiny()
    config.dump_folder = str(tmp_path)
    config.warmup = None
    config.trainer.num_threads = 1
    config.task.num_eval = 2
    config.generator.max_model_len = 64
    config.loop = Loop.Config(num_steps=3, num_prompts=4, num_samples=3, eval_every=2)
    config.loop.sampling.max_tokens = 9
    config.trainer.training.max_tokens_per_microbatch = 100
    config.trainer.checkpoint.interval = 2
    for path, value in edits.items():
        *parents, name = path.split("__")
        owner = config
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, value)
    return config


@dataclass(kw_only=True)
class Counted:
    """A local backend; replies are all of `num_reply_tokens`, whatever they spell."""

    local: LocalBackend
    num_reply_tokens: int
    calls: list[list[TrainingSample]] = field(default_factory=list)
    num_pushes: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.local, name)

    async def generate(
        self, prompts: Sequence[np.ndarray], *, sampling: SamplingParams, session: str | None = None
    ) -> Any:
        endless = replace(sampling, max_tokens=self.num_reply_tokens, stop_token_ids=())
        return await self.local.generate(prompts, sampling=endless)

    async def forward_backward(
        self,
        samples: Sequence[TrainingSample],
        *,
        loss: Loss | None = None,
        return_logprobs: bool | Sequence[int] = False,
    ) -> ForwardBackwardResult:
        self.calls.append(list(samples))
        return await self.local.forward_backward(samples, loss=loss, return_logprobs=return_logprobs)

    async def push(self) -> int:
        self.num_pushes += 1
        return await self.local.push()


def explained(config):
    return explain(ResolvedRun(module="sum_digits", function="tiny", config=config), here=LAPTOP)


def run_for_real(config, *, num_reply_tokens, folder):
    """Records of the loop's steps, and the backend that it ran over."""
    known: Any = find_out(config)
    known.start.make()
    names = [f.name for f in dataclasses.fields(TrainingEngine.Config)]
    engine = TrainingEngine.Config(**{name: getattr(config.trainer, name) for name in names})
    sink = ListSink()

    async def whole_run():
        async with LocalBackend(
            engine, spec=known.spec, hf_assets_path=str(known.start.folder), device="cpu"
        ) as local:
            counted = Counted(local=local, num_reply_tokens=num_reply_tokens)
            seams = Seams(
                sampler=counted,
                learner=counted,
                publisher=counted,
                scorer=LocalScorer(rubric=known.task.rubric(seed=config.seed)),
            )
            loop = config.loop.build(
                seams=seams,
                renderer=known.renderer,
                task=known.task,
                max_sequence_tokens=config.generator.max_model_len,
                sinks=[sink],
                checkpoints=StepCheckpoints(
                    learner=counted, config=config.trainer.checkpoint, folder=str(folder)
                ),
                seed=config.seed,
            )
            await loop.run()
            return counted

    return sink.records, asyncio.run(whole_run())


def num_inputs(samples):
    return sum(len(sample.token_ids) - 1 for sample in samples)


# Samples of 24 inputs with a reply of one token and of 32 with the longest: 4 and 3 of them fit 100 tokens.
@pytest.mark.medium
@pytest.mark.parametrize(
    ("edits", "micro_batches"),
    [
        pytest.param({}, (3, 4), id="one optimizer step"),
        pytest.param({"loop__num_minibatches": 2}, (4, 4), id="two optimizer steps"),
        pytest.param({"trainer__training__share_prompts": False}, (3, 4), id="prompts apart"),
        pytest.param(
            {"trainer__training__max_sequences_per_microbatch": 2}, (6, 6), id="two samples at once"
        ),
    ],
)
def test_samples_micro_batches_and_token_bound_are_exactly_those_of_a_run(tmp_path, edits, micro_batches):
    config = small_config(tmp_path, **edits)
    step, in_run = explained(config).step, explained(config).run
    assert step.exact_prompts
    assert (step.micro_batches.fewest, step.micro_batches.most) == micro_batches
    for num_reply_tokens, end in ((9, "most"), (1, "fewest")):
        records, counted = run_for_real(
            config, num_reply_tokens=num_reply_tokens, folder=tmp_path / f"checkpoints-{end}"
        )
        steps = [record for record in records if "packing/num_micro_batches" in record]
        assert len(steps) == in_run.num_steps
        # Prompts of this task are of one length, so that every step is as step 1.
        assert {record["packing/num_micro_batches"] for record in steps} == {getattr(step.micro_batches, end)}
        assert {len(call) for call in counted.calls} == {step.samples_of_optimizer_step}
        assert len(counted.calls) == in_run.optimizer_steps
        assert sum(map(len, counted.calls)) == in_run.samples == in_run.num_steps * step.samples
        per_step = len(counted.calls) // in_run.num_steps
        assert num_inputs(chain(*counted.calls[:per_step])) == getattr(step.trained_tokens, end)
        assert counted.num_pushes == in_run.publishes
        assert tuple(r["step"] for r in records if "eval/correct" in r) == in_run.evaluations == (0, 2, 3)
        assert tuple(sorted(saved_steps(tmp_path / f"checkpoints-{end}"))) == in_run.checkpoints == (2, 3)
        replies = sum(int(sample.mask.sum()) for call in counted.calls for sample in call)
        if end == "most":
            assert replies == in_run.reply_tokens_most == in_run.num_steps * step.reply_tokens_most


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_micro_batches_of_several_ranks_are_those_of_the_packing(tmp_path, num_ranks):
    config = small_config(tmp_path, loop__num_prompts=7, loop__num_samples=5)
    known: Any = find_out(config)
    found = step_arithmetic(known, degrees=Degrees(dp_replicate=1, dp_shard=num_ranks, tp=1))
    prompts = known.prompts(7)
    for length, end in ((1, "fewest"), (9, "most")):
        samples = [
            demonstration_sample(prompt, np.arange(length, dtype=np.int32))
            for prompt in prompts
            for _ in range(5)
        ]
        packed = pack(samples, max_tokens=100, share_prompts=True, num_ranks=num_ranks)
        assert getattr(found.micro_batches, end) == len(packed)
        assert getattr(found.trained_tokens, end) == num_inputs(samples)


def test_a_limit_of_samples_bounds_what_is_trained_on(tmp_path):
    config = small_config(tmp_path, loop__max_sample_tokens=30, loop__long_samples="truncate")
    assert explained(config).step.trained_tokens == Range(fewest=12 * 24, most=12 * 29)


# Ages


@pytest.mark.parametrize(("max_policy_age", "num_minibatches"), [(0, 1), (0, 2), (1, 1), (2, 2)])
def test_the_bound_on_ages_is_kept_and_reached(max_policy_age, num_minibatches):
    bound = staleness(LoopConfig(max_policy_age=max_policy_age, num_minibatches=num_minibatches))
    policy = SimulatedPolicy(reply=some_right, generate_s=lambda prompt: 0.5, train_s=2.0)
    records, _ = run(
        policy, num_steps=8, max_policy_age=max_policy_age, num_minibatches=num_minibatches, num_prompts=2
    )
    assert max(policy.age_of_tokens) == bound.updates
    assert max(record["age/max"] for record in records) == bound.steps


@pytest.mark.parametrize("max_policy_age", [0, 1, 3])
def test_as_many_prompts_are_ahead_as_may_start(max_policy_age):
    bound = AgeBound(max_age=max_policy_age, num_prompts=4, num_steps=100)
    for group in range(100):
        if bound.may_start():
            bound.start(group)
    assert len(bound.outstanding) == (
        staleness(LoopConfig(max_policy_age=max_policy_age, num_prompts=4)).groups_ahead
    )


# Bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [qwen3, qwen3_moe])
def test_bytes_of_a_publish_are_those_of_the_weights_that_are_sent(family, dtype):
    spec = family.model_registry("tiny")
    engine = TrainingEngine(
        config=TrainingEngine.Config(), model_spec=spec, hf_assets_path=None, device="cpu"
    )

    sent = outgoing_parts(
        engine.model_state_dict(),
        key_prefix="",
        dtype=getattr(torch, dtype),
        buffer_names=engine.buffer_names(),
    )
    weights = PublishedWeights(spec=spec, dtype=dtype)
    assert weights.num_bytes == sum(part.num_bytes for part in sent)
    assert weights.num_tensors == len(sent)
    assert weights.on_rank(1) == weights.num_bytes


@pytest.mark.parametrize("family", [qwen3, qwen3_moe])
def test_a_generators_rank_holds_what_its_layout_gives_it(family):

    spec = family.model_registry("tiny")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with torch.device("meta"):
            model = spec.model.build()
        buffers = sum(b.nbytes for b in persistent_buffers(model).values())
        spec.parallelize_generator(model, init_device_mesh("cpu", (2,)))
        held = sum(local_tensor(parameter).nbytes for parameter in model.parameters())
    finally:
        dist.destroy_process_group()
    assert PublishedWeights(spec=spec, dtype="float32").on_rank(2) == held + buffers


@pytest.mark.medium
@pytest.mark.parametrize("name", ["parameters", "mixed", "logits bf16, entropy", "LoRA, pushed"])
def test_memory_of_the_trainer_is_within_15_percent_of_what_tensors_hold(tmp_path, name):
    case = test_memory.CASES[name]
    config = tiny()
    config.dump_folder, config.model, config.batch_invariant = str(tmp_path), case.shape.spec(), False
    engine = case.config()
    for f in dataclasses.fields(engine):
        setattr(config.trainer, f.name, getattr(engine, f.name))
    known: Any = find_out(config)
    degrees = ParallelismConfig().degrees(1)
    found: Any = memory(known, degrees=degrees, machine=LAPTOP, on_gpu=False).trainer
    peak = test_memory.measure(case)
    assert peak > 200e6
    assert found.total == pytest.approx(peak, rel=test_memory.BOUND)
    assert found.fits == (found.total <= LAPTOP.memory_bytes)
