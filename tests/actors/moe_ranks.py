"""Mixture-of-experts generator on one or two ranks, for `test_vllm_moe.py`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.tensor import DTensor

from actors.vllm.engine import GeneratorEngine
from rl.distributed.process_group import World
from rl.types import Completion, SamplingParams
from tests.support.policies import (
    config_folder,
    model_folder,
    prompts_of,
    random_model,
    small_spec,
    writer,
)

SPEC = small_spec(tie=False, head_dim=32, experts=True)
PROMPTS = prompts_of([5, 1, 40, 150, 33, 7, 64])
SAMPLING = SamplingParams(max_tokens=31, num_samples=3, temperature=0.8, seed=1)

Completions = list[list[Completion]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lived:
    """Results of one rank; rank 1 has no completions."""

    placements: dict[str, str]
    """Placements in the first layer's mixture; empty for plain tensors."""
    first: Completions
    """Completions under the weights of seed 0."""
    second: Completions
    """Completions under the weights of seed 1, including the bias."""


def live(folder: str) -> Lived:
    """Generate before and after writing weights into the running engine; a single rank starts from a folder."""
    return asyncio.run(_live(folder))


async def _live(folder: str) -> Lived:
    world = World.from_env()
    from_folder = world.size == 1
    config = GeneratorEngine.Config(
        tensor_parallel_degree=world.size,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=12,
        max_num_batched_tokens=65,
        cpu_kv_cache_gib=0.05,
        initial_weights="folder" if from_folder else "store",
    )
    old, new = random_model(SPEC, seed=0), random_model(SPEC, seed=1)
    path = Path(folder) / str(world.rank)
    assets = model_folder(path, SPEC, old) if from_folder else config_folder(path, SPEC)
    engine = GeneratorEngine(config=config, model_spec=SPEC, hf_assets_path=assets, world=world)
    await engine.start()
    if not from_folder:
        await engine.update_weights(writer(old), version=1)
    first = await engine.generate(PROMPTS, sampling=SAMPLING)
    await engine.update_weights(writer(new), version=2)
    second = await engine.generate(PROMPTS, sampling=SAMPLING)
    placements = {
        name.removeprefix("layers.0.feed_forward."): str(tensor.placements[0])
        for name, tensor in engine.model_state_dict().items()
        if isinstance(tensor, DTensor) and name.startswith("layers.0.feed_forward.")
    }
    await asyncio.wait_for(engine.close(), 60)
    return Lived(placements=placements, first=first, second=second)
