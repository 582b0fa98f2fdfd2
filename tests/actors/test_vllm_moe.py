"""A mixture of experts in vLLM on two ranks equals the trainer's model."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from actors.vllm.engine import GeneratorEngine
from rl.distributed.process_group import World
from rl.models.generate import generate
from rl.types import Completion, SamplingParams
from tests.support.distributed import run_ranks
from tests.support.policies import (
    model_folder,
    prompts_of,
    random_model,
    recomputed_logprobs,
    small_spec,
    tokens_of,
    writer,
)

SPEC = small_spec(tie=False, head_dim=32, experts=True)
OLD, NEW = random_model(SPEC, seed=0), random_model(SPEC, seed=1)
PROMPTS = prompts_of([5, 1, 40, 150, 33, 7, 64])
SAMPLING = SamplingParams(max_tokens=31, num_samples=3, temperature=0.8, seed=1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lived:
    """Results of one rank; rank 1 has no completions."""

    first: list[list[Completion]]
    """Completions under the weights of the folder."""
    second: list[list[Completion]]
    """Completions under weights written into the running engine, including the router's bias."""


def live(folder: str) -> Lived:
    return asyncio.run(_live(folder))


async def _live(folder: str) -> Lived:
    world = World.from_env()
    config = GeneratorEngine.Config(
        tensor_parallel_degree=2,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=12,
        max_num_batched_tokens=65,
        cpu_kv_cache_gib=0.05,
        initial_weights="folder",
    )
    assets = model_folder(Path(folder) / str(world.rank), SPEC, OLD)
    engine = GeneratorEngine(config=config, model_spec=SPEC, hf_assets_path=assets, world=world)
    await engine.start()
    first = await engine.generate(PROMPTS, sampling=SAMPLING)
    await engine.update_weights(writer(NEW), version=2)
    second = await engine.generate(PROMPTS, sampling=SAMPLING)
    await asyncio.wait_for(engine.close(), 60)
    return Lived(first=first, second=second)


@pytest.mark.medium
@pytest.mark.timeout(240)
def test_tokens_and_logprobs_equal_those_of_the_trainers_model(tmp_path):
    ranks = run_ranks(live, 2, str(tmp_path), timeout_s=110)
    for model, completions in ((OLD, ranks[0].first), (NEW, ranks[0].second)):
        assert tokens_of(completions) == tokens_of(generate(model, PROMPTS, sampling=SAMPLING))
        differences = np.concatenate(
            [
                completion.logprobs - recomputed_logprobs(model, prompt, completion, SAMPLING)
                for prompt, of_prompt in zip(PROMPTS, completions, strict=True)
                for completion in of_prompt
            ]
        )
        assert differences.shape == (len(PROMPTS) * 3 * 31,)
        assert np.abs(differences).mean() <= 1e-5
    assert ranks[1].first == []
