"""Fake actors of a run, without processes; the trainer writes real checkpoint folders."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from actors.cluster.clients import TrainerClient, make_router
from actors.cluster.publisher import GeneratorPool
from actors.cluster.recovery import Supervisor
from actors.cluster.rewarder import RewardClient
from actors.config import RecoveryConfig, RunConfig
from actors.preflight.plan import Plan
from actors.run import Run
from rl.models.qwen3 import model_registry
from rl.observability.events import Events
from rl.observability.run_folder import RunFolder
from rl.rollouts.environment import Environments
from rl.rollouts.rubric import Rubric
from rl.starting_point import StartingPoint
from rl.tasks.fingerprint import make_fingerprint
from rl.training.checkpoints.files import read_state
from rl.types import SamplingParams
from rl.utils.errors import RunError
from rl.weights.store import Shard, WeightStore
from tests.support.checkpoints import save_fake
from tests.support.fakes import RENDERER, FakePolicy, RubricRewarder
from tests.support.mortal import Mortal, shard_of


def reply(prompt: str, sample: int) -> str:
    return f"[ANSWER] {(len(prompt) + sum(prompt.encode()) + sample) % 20}"


class FakeTrainer(Mortal):
    """Trainer that dies in the gradient of the step after version `dies_at`."""

    def __init__(self, *, dies_at: int | None = None) -> None:
        super().__init__("trainer")
        self.policy = FakePolicy(reply=reply)
        self.dies_at = dies_at
        self.loaded: list[str] = []
        """Names of the checkpoint folders."""

    async def _forward_backward(self, samples: Sequence[Any], **settings: Any) -> Any:
        if self.policy.version == self.dies_at:
            self.die()
            await asyncio.sleep(0)  # The death is seen first.
        return await self.policy.forward_backward(samples)

    async def _optim_step(self, *settings: Any, **options: Any) -> Any:
        return await self.policy.optim_step()

    async def _push_model_state_dict(self, **model: Any) -> Shard:
        return shard_of(self.policy.version)

    async def _save_checkpoint(
        self, folder: str, *, position: Any, model_only: bool = False, **options: Any
    ) -> None:
        save_fake(
            Path(folder), version=self.policy.version, model_only=model_only, position=position
        )

    async def _load_checkpoint(self, folder: str, **options: Any) -> int:
        self.loaded.append(Path(folder).name)
        self.policy.version = read_state(folder).policy_version
        return self.policy.version


class FakeGenerator(Mortal):
    def __init__(self) -> None:
        super().__init__("generator_0")
        self.policy = FakePolicy(reply=reply)

    async def _generate(self, prompts: Any, *, sampling: SamplingParams, **options: Any) -> Any:
        return await self.policy.generate(prompts, sampling=sampling)

    async def _pull_model_state_dict(self, snapshot: Any, **options: Any) -> tuple[()]:
        self.policy.served_version = snapshot.version
        return ()


class FakeReward(Mortal):
    def __init__(self, *, rubric: Rubric) -> None:
        super().__init__("reward")
        self.rewarder = RubricRewarder(rubric=rubric)

    async def _score(self, groups: Any, alone: bool) -> Any:
        return await self.rewarder.score(groups, alone=alone)


class FakeCluster:
    """Cluster of fakes that replaces a lost trainer by the next one of a list."""

    def __init__(
        self, trainers: Sequence[FakeTrainer], *, rubric: Rubric, config: RecoveryConfig
    ) -> None:
        days = itertools.count(1)
        self.restarts = Supervisor(config, now_s=lambda: next(days) * 86400.0)
        self.trainer, self.reward = trainers[0].group(), FakeReward(rubric=rubric).group()
        self.store = WeightStore.Config().build()
        self.pool = GeneratorPool([FakeGenerator().group()], trainer=self.trainer, store=self.store)
        self._next = iter(trainers[1:])

    async def run_training(self, training: Coroutine[Any, Any, None]) -> None:
        await training

    async def restart_trainer(self, error: RunError, *, at_least: int = 1) -> None:
        if (trainer := next(self._next, None)) is None:
            raise error
        self.restarts.count("trainer", reason=str(error), at_least=at_least)
        self.store.forget()
        self.trainer.take_over(trainer.group())


def fake_run(
    config: RunConfig,
    folder: RunFolder,
    trainers: Sequence[FakeTrainer],
    *,
    make_cluster: Any = FakeCluster,
) -> Run:
    """Return a new run on fake actors."""
    task = config.task.build()
    rubric = task.rubric(seed=0)
    plan = Plan(
        start=StartingPoint(folder=folder.path, spec=model_registry("tiny")),
        source=None,
        resumed=None,
        task=task,
        environments=Environments(make=task.environment, step_timeout_s=20.0),
        renderer=RENDERER,
        parity=None,
        problems=make_fingerprint(task, seed=config.seed),
    )
    cluster = make_cluster(trainers, rubric=rubric, config=config.recovery)
    return Run(
        config=config,
        plan=plan,
        folder=folder,
        events=Events(folder.events),
        cluster=cluster,
        rubric=rubric,
        generator=make_router(cluster.pool),
        trainer=TrainerClient(cluster.trainer),
        publisher=cluster.pool,
        rewarder=RewardClient(cluster.reward, num_procs=1),
        agents=None,
        limits=None,
    )
