"""A generator whose pulls can be broken, and a loss that kills its process."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from monarch.actor import endpoint
from torch import Tensor

from actors.generator import VLLMGenerator
from losses.policy import GRPOLoss
from losses.types import LossInputs, LossOutput
from rl.distributed.process_group import World
from rl.weights.store import Snapshot


class MisusedGenerator(VLLMGenerator):
    @dataclass(kw_only=True, slots=True)
    class Config(VLLMGenerator.Config):
        @classmethod
        def like(cls, config: VLLMGenerator.Config, **changes: Any) -> MisusedGenerator.Config:
            """Return the settings of a generator, with changes, for this class."""
            return cls(**{f.name: getattr(config, f.name) for f in fields(config)} | changes)

    @endpoint
    async def misuse_next_pull(self, stale: Snapshot | None) -> None:
        """Let the next pull take a stale version, or fill tensors that the engine does not use."""
        self.store = _Misused(self, stale)  # type: ignore[assignment]


class _Misused:
    """Weight store that breaks one pull."""

    def __init__(self, generator: VLLMGenerator, stale: Snapshot | None) -> None:
        self.generator = generator
        self.store = generator.store
        self.stale = stale

    async def pull(self, snapshot: Snapshot, *, state_dict: Mapping[str, Tensor]) -> Any:
        self.generator.store = self.store
        if self.stale is not None:
            return await self.store.pull(self.stale, state_dict=state_dict)
        aside = {name: tensor.clone() for name, tensor in state_dict.items()}
        return await self.store.pull(snapshot, state_dict=aside)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadlyLoss:
    """Loss that kills the rank that computes it with SIGKILL; other ranks compute a usual one."""

    rank: int

    def __call__(self, inputs: LossInputs) -> LossOutput:
        if World.from_env().rank == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return GRPOLoss()(inputs)
