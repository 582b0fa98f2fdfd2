"""Numbers of an explanation compared with a run that trains real weights in this process."""

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

from actors.explain.explain import explain
from actors.explain.known import find_out
from actors.explain.numbers import bytes_on_rank, staleness, step_arithmetic, tensor_bytes
from configs.sum_digits import tiny
from losses.types import Loss
from rl.config.registry import ResolvedRun
from rl.config.tree import rebuild
from rl.distributed.mesh import Degrees
from rl.distributed.sharding import local_tensor
from rl.local import LocalBackend, LocalRewarder
from rl.loop.config import LoopConfig
from rl.loop.loop import Loop, RolloutSetup
from rl.loop.state import StepCheckpoints
from rl.models import qwen3, qwen3_moe
from rl.models.decoder import persistent_buffers
from rl.models.parallelize_generator import parallelize_decoder_generator
from rl.rollouts.packing import pack
from rl.rollouts.samples import demonstration_sample
from rl.training.checkpoint_files import saved_steps
from rl.training.engine import TrainingEngine
from rl.types import ForwardBackwardResult, SamplingParams, TrainingSample
from rl.weights.plan import outgoing_parts
from tests.support.explained import LAPTOP
from tests.support.fakes import ListSink
from tests.support.loops import run, some_right
from tests.support.simulated import SimulatedPolicy


def small_config(tmp_path, **edits):
    """Return the tiny config with few, short samples in several micro-batches."""
    config: Any = tiny()
    config.dump_folder = str(tmp_path)
    config.warmup = None
    config.trainer.num_threads = 1
    config.task.num_eval = 2
    config.generator.max_model_len = 64
    config.loop = Loop.Config(num_steps=3, groups_per_batch=4, group_size=3, eval_every=2)
    config.loop.sampling.max_tokens = 9
    config.trainer.training.max_tokens_per_microbatch = 100
    config.trainer.checkpoint.interval = 2
    return rebuild(config, {path.replace("__", "."): value for path, value in edits.items()})


@dataclass(kw_only=True)
class Counted:
    """Local backend that counts its calls and always replies with `num_reply_tokens` tokens."""

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
    """Run the loop; return the records of its steps and the backend."""
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
            loop = config.loop.build(
                trainer=counted,
                publisher=counted,
                rollouts=RolloutSetup(
                    generator=counted,
                    rewarder=LocalRewarder(rubric=known.task.rubric(seed=config.seed)),
                    renderer=known.renderer,
                    task=known.task,
                    max_sequence_tokens=config.generator.max_model_len,
                    seed=config.seed,
                ),
                sinks=[sink],
                checkpoints=StepCheckpoints(
                    trainer=counted, config=config.trainer.checkpoint, folder=str(folder)
                ),
            )
            await loop.run()
            return counted

    return sink.records, asyncio.run(whole_run())


def num_inputs(samples):
    return sum(len(sample.token_ids) - 1 for sample in samples)


# Samples have 24 inputs with a one-token reply and 32 with the longest: 4 and 3 of them fit in 100 tokens.
@pytest.mark.medium
def test_samples_micro_batches_and_token_bound_equal_those_of_a_run(tmp_path):
    config = small_config(tmp_path, loop__num_minibatches=2)
    explanation = explained(config)
    step, in_run = explanation["step"], explanation["run"]
    assert step["for"] == "prompts of step 1"
    assert tuple(step[f"micro_batches_of_rank_{end}"] for end in ("fewest", "most")) == (4, 4)
    for num_reply_tokens, end in ((9, "most"), (1, "fewest")):
        records, counted = run_for_real(
            config, num_reply_tokens=num_reply_tokens, folder=tmp_path / f"checkpoints-{end}"
        )
        steps = [record for record in records if "packing/num_micro_batches" in record]
        assert len(steps) == in_run["num_steps"]
        # All prompts of this task have the same length, so every step looks like step 1.
        counts = {record["packing/num_micro_batches"] for record in steps}
        assert counts == {step[f"micro_batches_of_rank_{end}"]}
        assert {len(call) for call in counted.calls} == {step["samples_of_optimizer_step"]}
        assert len(counted.calls) == in_run["optimizer_steps"]
        assert sum(map(len, counted.calls)) == in_run["samples"] == in_run["num_steps"] * step["samples"]
        per_step = len(counted.calls) // in_run["num_steps"]
        assert num_inputs(chain(*counted.calls[:per_step])) == step[f"trained_tokens_{end}"]
        assert counted.num_pushes == in_run["publishes"]
        evaluated = [r["step"] for r in records if "eval/correct" in r]
        assert evaluated == in_run["evaluations_after"] == [0, 2, 3]
        assert sorted(saved_steps(tmp_path / f"checkpoints-{end}")) == in_run["checkpoints_after"] == [2, 3]
        replies = sum(int(sample.mask.sum()) for call in counted.calls for sample in call)
        if end == "most":
            assert replies == in_run["reply_tokens_most"] == 3 * step["reply_tokens_most"]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_micro_batches_of_several_ranks_equal_the_packing(tmp_path, num_ranks):
    config = small_config(tmp_path, loop__groups_per_batch=7, loop__group_size=5)
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
        assert found[f"micro_batches_of_rank_{end}"] == len(packed)
        assert found[f"trained_tokens_{end}"] == num_inputs(samples)


@pytest.mark.parametrize(("max_off_policy_steps", "num_minibatches"), [(0, 2), (2, 2)])
def test_staleness_bound_is_kept_and_reached(max_off_policy_steps, num_minibatches):
    settings = {"max_off_policy_steps": max_off_policy_steps, "num_minibatches": num_minibatches}
    bound = staleness(LoopConfig(**settings))
    policy = SimulatedPolicy(reply=some_right, generate_s=lambda prompt: 0.5, train_s=2.0)
    records, _ = run(policy, num_steps=8, groups_per_batch=2, **settings)
    assert max(policy.age_of_tokens) == bound["policy_versions_most"]
    assert max(record["age/max"] for record in records) == bound["steps_most"]


@pytest.mark.parametrize(("family", "dtype"), [(qwen3, "float32"), (qwen3_moe, "bfloat16")])
def test_bytes_of_a_publish_equal_the_sent_weights(family, dtype):
    spec = family.model_registry("tiny")
    engine = TrainingEngine(
        config=TrainingEngine.Config(), model_spec=spec, hf_assets_path=None, device="cpu"
    )

    sent = outgoing_parts(
        engine.model_state_dict(), dtype=getattr(torch, dtype), buffer_names=engine.buffer_names()
    )
    sizes = tensor_bytes(spec, dtype=dtype)
    assert sum(sizes.values()) == sum(part.num_bytes for part in sent)
    assert len(sizes) == len(sent)
    assert bytes_on_rank(sizes, spec=spec, tensor_parallel_degree=1) == sum(sizes.values())


@pytest.mark.parametrize("family", [qwen3, qwen3_moe])
def test_bytes_of_a_generator_rank_equal_its_shards(family):
    spec = family.model_registry("tiny")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with torch.device("meta"):
            model = spec.model.build()
        buffers = sum(b.nbytes for b in persistent_buffers(model).values())
        parallelize_decoder_generator(model, init_device_mesh("cpu", (2,)))
        held = sum(local_tensor(parameter).nbytes for parameter in model.parameters())
    finally:
        dist.destroy_process_group()
    sizes = tensor_bytes(spec, dtype="float32")
    assert bytes_on_rank(sizes, spec=spec, tensor_parallel_degree=2) == held + buffers
