"""Fake actors of a run, without processes; the trainer writes real checkpoint folders."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from actors.backend import RewardClient, TrainerClient
from actors.calls import ActorCallError
from actors.config import RecoveryConfig, RunConfig, Timeouts
from actors.plan import Plan
from actors.pool import GeneratorPool
from actors.recovery import Role, Supervisor
from actors.run import Run, make_router
from rl.observability.events import Events
from rl.observability.run_folder import RunFolder
from rl.rollouts.environment import Environments
from rl.rollouts.rubric import Rubric
from rl.starting_point import StartingPoint
from rl.training.checkpoint_files import SavedState, read_state, sum_of_file, write_description
from rl.utils.errors import RunError
from rl.weights.store import Shard, WeightStore
from tests.support.fakes import RENDERER, FakePolicy, RubricRewarder
from tests.support.mortal import shard_of


def reply(prompt: str, sample: int) -> str:
    return f"[ANSWER] {(len(prompt) + sum(prompt.encode()) + sample) % 20}"


@dataclass(kw_only=True)
class FakeTrainer:
    """Trainer whose process is killed in the gradient of the step after version `dies_at`."""

    dies_at: int | None = None
    name: str = "trainer"
    timeouts: Timeouts = field(default_factory=Timeouts)
    policy: FakePolicy = field(default_factory=lambda: FakePolicy(reply=reply))
    loaded: list[str] = field(default_factory=list)
    """Names of the checkpoint folders."""
    is_dead: bool = False

    async def call(self, endpoint: str, *args: Any, extra_s: float = 0.0, **kwargs: Any) -> list[Any]:
        if endpoint == "forward_backward" and self.policy.version == self.dies_at:
            self.is_dead = True
        if self.is_dead:
            raise ActorCallError(f"trainer.{endpoint} failed: rank 0 of 1 is dead: its process ended")
        return [await getattr(self, f"_{endpoint}")(*args, **kwargs)]

    def dead(self) -> list[int]:
        return [0] if self.is_dead else []

    async def while_alive(self, answer: Awaitable[Any], what: str) -> Any:
        return await answer

    async def _forward_backward(self, samples: Sequence[Any], **settings: Any) -> Any:
        return await self.policy.forward_backward(samples)

    async def _optim_step(self, *settings: Any, **options: Any) -> Any:
        return await self.policy.optim_step()

    async def _drop_gradient(self) -> None:
        """There is none."""

    async def _push_model_state_dict(self, **model: Any) -> Shard:
        return shard_of(self.policy.version)

    async def _save_checkpoint(
        self, folder: str, *, position: Any, model_only: bool = False, wait: bool = True
    ) -> None:
        path = Path(folder)
        path.mkdir(parents=True)
        (path / "__0_0.distcp").write_bytes(b"tensors")
        state = SavedState(policy_version=self.policy.version, model_only=model_only, position=position)
        write_description(path, state, {"__0_0.distcp": sum_of_file(path / "__0_0.distcp")})

    async def _load_checkpoint(self, folder: str, **options: Any) -> int:
        self.loaded.append(Path(folder).name)
        self.policy.version = read_state(folder).policy_version
        return self.policy.version


@dataclass(kw_only=True)
class FakeGenerator:
    name: str = "generator_0"
    timeouts: Timeouts = field(default_factory=Timeouts)
    policy: FakePolicy = field(default_factory=lambda: FakePolicy(reply=reply))

    async def call(self, endpoint: str, *args: Any, extra_s: float = 0.0, **kwargs: Any) -> list[Any]:
        if endpoint == "generate":
            return [await self.policy.generate(args[0], sampling=kwargs["sampling"])]
        if endpoint == "pull_model_state_dict":
            self.policy.served_version = args[0].version
            return [()]
        return [None]


@dataclass(kw_only=True)
class FakeReward:
    rubric: Rubric
    name: str = "reward"
    timeouts: Timeouts = field(default_factory=Timeouts)

    def at_rank(self, rank: int) -> FakeReward:
        return self

    async def call(self, endpoint: str, *args: Any, extra_s: float = 0.0, **kwargs: Any) -> list[Any]:
        if endpoint == "score":
            groups, alone = args
            return [await RubricRewarder(rubric=self.rubric).score(groups, alone=alone)]
        return [None]


class FakeCluster:
    """Cluster of fakes that replaces a lost trainer by the next one of a list."""

    def __init__(self, trainers: Sequence[FakeTrainer], *, rubric: Rubric, config: RecoveryConfig) -> None:
        days = itertools.count(1)
        self.restarts = Supervisor(config, now_s=lambda: next(days) * 86400.0)
        self.trainer, generator, self.reward = (
            Role(cast(Any, group)) for group in (trainers[0], FakeGenerator(), FakeReward(rubric=rubric))
        )
        self.store = WeightStore.Config().build()
        self.pool = GeneratorPool([generator], trainer=self.trainer, store=self.store)
        self._next = iter(trainers[1:])

    async def while_trainer_lives(self, training: Coroutine[Any, Any, None]) -> None:
        await training

    async def restart_trainer(self, error: RunError, *, at_least: int = 1) -> None:
        if (trainer := next(self._next, None)) is None:
            raise error
        self.restarts.count("trainer", reason=str(error), at_least=at_least)
        self.store.forget()
        self.trainer.replace(cast(Any, trainer))


def fake_run(
    config: RunConfig, folder: RunFolder, trainers: Sequence[FakeTrainer], *, make_cluster: Any = FakeCluster
) -> Run:
    """Return a new run on fake actors."""
    task = config.task.build()
    rubric = task.rubric(seed=0)
    plan = Plan(
        start=StartingPoint(folder=folder.path, spec=config.model),
        source=None,
        resumed=None,
        task=task,
        environments=Environments(make=task.environment, step_timeout_s=20.0),
        renderer=RENDERER,
        parity=None,
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
        limits=None,
    )
