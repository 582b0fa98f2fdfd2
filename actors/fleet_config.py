"""What the actors of a run are made of: the part of a run's config that their start needs."""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.calls import Timeouts
from actors.generator import VLLMGenerator
from actors.launch_config import LaunchConfig
from actors.reward import RewardActor
from actors.supervision import RecoveryConfig
from actors.trainer import PolicyTrainer


@dataclass(kw_only=True, slots=True)
class FleetConfig:
    """What the actors of a run are made of."""

    trainer: PolicyTrainer.Config
    generator: VLLMGenerator.Config
    reward: RewardActor.Config
    timeouts: Timeouts
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
