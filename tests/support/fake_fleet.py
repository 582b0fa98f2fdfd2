"""A fleet without processes: what its actors would answer. The trainer's checkpoints are real folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from actors.calls import ActorCallError, Timeouts
from actors.fleet import Fleet
from actors.replaceable import Replaceable
from actors.sync_check import SyncCheck
from rl.rollouts.rubric import Rubric
from rl.training.checkpoint_files import SavedState, read_state, sum_of_file, write_description
from rl.types import PullResult, PushResult
from rl.weights.store import WeightStore
from tests.support.fakes import FakePolicy, RubricScorer


def reply(prompt: str, sample: int) -> str:
    return f"[ANSWER] {(len(prompt) + sum(prompt.encode()) + sample) % 20}"


@dataclass(kw_only=True)
class FakeTrainer:
    """Its process is killed in the gradient of the step after version `dies_at`."""

    dies_at: int | None = None
    name: str = "trainer"
    timeouts: Timeouts = field(default_factory=Timeouts)
    policy: FakePolicy = field(default_factory=lambda: FakePolicy(reply=reply))
    loaded: list[str] = field(default_factory=list)
    """Names of the folders."""
    is_dead: bool = False

    async def call(self, endpoint: str, *args: Any, limit: str, **kwargs: Any) -> list[Any]:
        if endpoint == "forward_backward" and self.policy.version == self.dies_at:
            self.is_dead = True
        if self.is_dead:
            raise ActorCallError(f"trainer.{endpoint} failed: rank 0 of 1 is dead: its process ended")
        return [await getattr(self, f"_{endpoint}")(*args)]

    async def _forward_backward(self, samples: Sequence[Any], *settings: Any) -> Any:
        return await self.policy.forward_backward(samples)

    async def _optim_step(self, *settings: Any) -> Any:
        return await self.policy.optim_step()

    async def _drop_gradient(self) -> None:
        """There is none."""

    async def _push_model_state_dict(self) -> PushResult:
        return PushResult(policy_version=self.policy.version, num_bytes=0, time_s=0.0)

    async def _save_checkpoint(
        self, folder: str, position: Any, model_only: bool, wait: bool, attachments: dict[str, bytes]
    ) -> None:
        path = Path(folder)
        path.mkdir(parents=True)
        (path / "__0_0.distcp").write_bytes(b"tensors")
        state = SavedState(policy_version=self.policy.version, model_only=model_only, position=position)
        write_description(path, state, {"__0_0.distcp": sum_of_file(path / "__0_0.distcp")}, attachments)

    async def _load_checkpoint(self, folder: str, model_only: bool, exclude: Any) -> int:
        self.loaded.append(Path(folder).name)
        self.policy.version = read_state(folder).policy_version
        return self.policy.version


@dataclass(kw_only=True)
class FakeGenerator:
    name: str = "generator_0"
    timeouts: Timeouts = field(default_factory=Timeouts)
    policy: FakePolicy = field(default_factory=lambda: FakePolicy(reply=reply))

    async def call(self, endpoint: str, *args: Any, limit: str, **kwargs: Any) -> list[Any]:
        if endpoint == "generate":
            return [await self.policy.generate(args[0], sampling=args[1])]
        if endpoint == "pull_model_state_dict":
            self.policy.served_version = args[0]
            return [PullResult(policy_version=args[0], time_s=0.0)]
        return [b"states" if endpoint == "random_states" else None]


@dataclass(kw_only=True)
class FakeReward:
    rubric: Rubric
    name: str = "reward"
    timeouts: Timeouts = field(default_factory=Timeouts)

    def at_rank(self, rank: int) -> FakeReward:
        return self

    async def call(self, endpoint: str, *args: Any, limit: str, **kwargs: Any) -> list[Any]:
        if endpoint == "score":
            groups, _, alone = args
            return [await RubricScorer(rubric=self.rubric).score(groups, alone=alone)]
        return [b"states" if endpoint == "random_states" else None]


class FakeStore:
    async def announce(self, version: int) -> int:
        return 0

    async def prune(self) -> None:
        """Nothing is kept."""


def fake_fleet(trainer: FakeTrainer, *, rubric: Rubric) -> Fleet:
    return Fleet(
        trainer=trainer,
        generators=(FakeGenerator(),),
        reward=cast(Replaceable, FakeReward(rubric=rubric)),
        store=cast(WeightStore, FakeStore()),
        check=SyncCheck(None),
    )
