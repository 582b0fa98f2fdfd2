"""Adapters of a mixture's experts in a real engine, and in the training engine that they come from.

A mixture has no batch-invariant products, so logprobs are near each other and not equal.
"""

import asyncio

import numpy as np
import pytest
import torch

from rl.distributed.process_group import World
from rl.models.lora import LoRA
from rl.training.config import TrainingConfig
from rl.training.engine import TrainingEngine
from rl.types import Completion, SamplingParams
from tests.actors.test_vllm_batch_invariant import as_sample
from tests.support.policies import prompts_of, random_model, small_spec, writer
from tests.support.served_engine import serve_engine, write_factors

pytestmark = pytest.mark.medium

SPEC = small_spec(experts=True, tie=False)
MODEL = random_model(SPEC, seed=0)
PROMPTS = prompts_of([5, 1, 40, 150, 33, 64])
LORAS = {
    101: LoRA.Config(rank=4, unembedding=True),
    102: LoRA.Config(rank=1, alpha=2.0, target_modules=("q_proj", "down_proj")),
    103: LoRA.Config(rank=16, alpha=8.0, target_modules=("gate_proj",)),
}
BASE_ID = 12345


def make_trainer(lora, *, seed):
    """Return a trainer of the mixture with this adapter, whose B is not zero."""
    engine = TrainingEngine(
        config=TrainingEngine.Config(
            training=TrainingConfig(max_tokens_per_microbatch=512), converters=(lora,)
        ),
        model_spec=SPEC,
        hf_assets_path=None,
        world=World(),
        device="cpu",
    )
    engine.policy.model.load_state_dict(MODEL.state_dict(), strict=False)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for factor in engine.policy.adapter_state_dict().values():
            factor.copy_(0.1 * torch.randn(factor.shape, generator=generator))
    return engine


def test_trainer_computes_the_logprobs_that_a_mixture_was_sampled_with(tmp_path):
    """Requests of three adapters, and of none, are drawn in the same steps."""
    trainers = {version: make_trainer(lora, seed=version) for version, lora in LORAS.items()}
    plain = make_trainer(LoRA.Config(rank=1), seed=0)
    with torch.no_grad():
        for factor in plain.policy.adapter_state_dict().values():
            factor.zero_()
    sampling = SamplingParams(max_tokens=20, seed=1, num_samples=2)
    with serve_engine(tmp_path, SPEC, max_num_seqs=64) as served:
        engine = served.engine
        served.run(engine.update_weights(writer(MODEL), version=-1, base_id=BASE_ID))

        async def draw():
            for version, trainer in trainers.items():
                await engine.load_adapter(
                    write_factors(trainer),
                    version=version,
                    lora=LORAS[version],
                    base_id=BASE_ID,
                    is_newest=False,
                )
            calls: dict[int | None, asyncio.Task[list[list[Completion]]]] = {}
            async with asyncio.TaskGroup() as group:
                for adapter in (None, *trainers):
                    call = engine.generate(PROMPTS, sampling=sampling, adapter=adapter)
                    calls[adapter] = group.create_task(call)
            return {adapter: call.result() for adapter, call in calls.items()}

        together = served.run(draw())
    texts = {completions[3][0].token_ids.tobytes() for completions in together.values()}
    assert len(texts) == len(together), "every adapter writes something else"
    for adapter, completions in together.items():
        trainer = plain if adapter is None else trainers[adapter]
        samples = [
            as_sample(prompt, completion, temperature=1.0)
            for prompt, of_prompt in zip(PROMPTS, completions, strict=True)
            for completion in of_prompt
        ]
        for given, logprobs in zip(samples, trainer.compute_logprobs(samples), strict=True):
            expected = given.generator_logprobs[given.mask]
            np.testing.assert_allclose(logprobs[given.mask], expected, rtol=0, atol=1e-5)
