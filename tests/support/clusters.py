"""Clusters of real actors for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from actors.cluster.clients import Router, TrainerClient, make_router
from actors.cluster.cluster import start_cluster
from actors.cluster.group import ActorGroup
from actors.cluster.parity import ParityText
from actors.config import ClusterConfig, RecoveryConfig, Timeouts
from actors.generator import VLLMGenerator
from actors.launch.member import LogSettings
from actors.reward import RewardActor
from actors.trainer import PolicyTrainer
from rl.distributed.mesh import ParallelismConfig
from rl.models.files.hf import write_random_model
from rl.models.qwen3 import model_registry
from rl.rollouts.samples import policy_sample
from rl.tasks.sum_digits import make_problem
from rl.training.config import TrainingConfig
from rl.training.optimizer import Optimizer
from rl.types import SamplingParams, TrainingSample
from rl.utils.processes import ProcessId
from rl.weights.store import WeightStore
from tests.support import reward_functions
from tests.support.fakes import prompt_of, rollout_of
from tests.support.monarch_meshes import Meshes

SPEC = replace(model_registry("tiny"), batch_invariant=True)
PROMPTS = [prompt_of(make_problem([n, 30 + n])) for n in range(11, 17)]
TOKENS = [prompt.token_ids for prompt in PROMPTS]
SAMPLING = SamplingParams(max_tokens=200, num_samples=2, seed=1)
TEXT = np.concatenate(TOKENS[:2])
LIMIT_S = 200.0
"""Deadline in seconds of a start on a busy machine; docs/running.md has the times of an idle one.
"""
CONFIG = ClusterConfig(
    trainer=PolicyTrainer.Config(
        num_procs=2,
        parallelism=ParallelismConfig(data_parallel_shard_degree=2),
        optimizer=Optimizer.Config(lr=1e-2),
        training=TrainingConfig(max_tokens_per_microbatch=512),
    ),
    generator=VLLMGenerator.Config(
        num_replicas=2, dtype="float32", max_model_len=256, cpu_kv_cache_gib=0.05
    ),
    reward=RewardActor.Config(num_procs=2, time_limit_s=60),
    timeouts=Timeouts(close_s=10),
    recovery=RecoveryConfig(max_restarts=20, pause_s=0.0),
)


class RunningCluster:
    """Cluster that serves the starting weights, and records its losses and recoveries."""

    def __init__(self, meshes: Meshes, folder: Path, *, config: ClusterConfig) -> None:
        self._meshes = meshes
        self.folder = folder
        self.assets = str(write_random_model(folder / "assets", spec=SPEC, seed=0))
        self.told: list[tuple[str, dict[str, Any]]] = []
        starting = start_cluster(
            config,
            launcher=meshes.launcher,
            store=WeightStore.Config().build(dtype="float32"),
            parity=ParityText(token_ids=TEXT, max_diff=0.0),
            model_spec=SPEC,
            hf_assets_path=self.assets,
            rubric=reward_functions.alone(),
            trainer_arguments={"model_spec": SPEC, "failure_folder": str(folder)},
            logs=LogSettings(folder=folder / "logs", console_level="ERROR"),
            events=lambda event, /, **fields: self.told.append((event, fields)),
        )
        self.cluster = self.run(starting)
        self.pool = self.cluster.pool
        self.run(self.publish())

    def run(self, steps: Awaitable[Any]) -> Any:
        return self._meshes.run(steps, timeout_s=LIMIT_S)

    @property
    def trainer(self) -> TrainerClient:
        return TrainerClient(self.cluster.trainer)

    @property
    def router(self) -> Router:
        return make_router(self.pool)

    async def publish(self) -> int:
        """Push and serve the weights; return their version."""
        version = await self.pool.push()
        checked = await self.pool.pull(version)
        assert checked.parity_diff == 0.0
        return version

    async def train(self) -> None:
        """Train up to a version that is not published yet."""
        samples = await self.samples()
        version: int | None = None
        while version is None or version in self.cluster.store.versions():
            await self.trainer.forward_backward(samples)
            version = (await self.trainer.optim_step()).policy_version

    async def draw(self) -> list[tuple[list[int], list[float], list[int]]]:
        """Return tokens, logprobs and versions of every completion."""
        groups = await self.router.generate(TOKENS, sampling=SAMPLING)
        return [
            (c.token_ids.tolist(), c.logprobs.tolist(), c.policy_versions.tolist())
            for group in groups
            for c in group
        ]

    async def samples(self) -> list[TrainingSample]:
        """Draw two completions of each prompt, the first with a positive advantage."""
        groups = await self.router.generate(TOKENS, sampling=replace(SAMPLING, max_tokens=12))
        return [
            policy_sample(
                rollout_of(prompt, c, sample=i, text=""),
                advantages_C=np.full(len(c.token_ids), 1.0 - 2 * i),
                temperature=1.0,
            )
            for prompt, group in zip(PROMPTS, groups, strict=True)
            for i, c in enumerate(group)
        ]

    async def all_up(self) -> None:
        """Wait until every generator serves."""
        while len(self.pool.list_up()) < len(self.pool.members):
            await asyncio.sleep(0.05)

    def lost(self) -> list[str]:
        """Return the roles lost since the last call, after checking that each has recovered."""
        told, self.told[:] = list(self.told), []
        roles = [fields["role"] for event, fields in told if event == "lost"]
        assert sorted(f["role"] for event, f in told if event == "recovered") == sorted(roles)
        return roles


def processes(group: ActorGroup) -> dict[int, ProcessId]:
    return dict(group.processes)


def assert_equal_bits(ours: Any, theirs: Any) -> None:
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)
