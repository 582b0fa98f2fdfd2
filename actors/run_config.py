"""The root config of a run: a tree of the configs of what it is made of."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from actors.calls import Timeouts
from actors.canary import CanaryConfig
from actors.fleet_config import FleetConfig
from actors.generator import VLLMGenerator
from actors.launch_config import LaunchConfig
from actors.reward import RewardActor
from actors.router import Strategy
from actors.supervision import RecoveryConfig
from actors.trainer import PolicyTrainer
from rl.config.configurable import HIDDEN, ONE_RUN, Configurable
from rl.distributed.seeds import check_seed
from rl.loop import Loop
from rl.machine_limits import LimitsConfig
from rl.models.spec import ModelSpec
from rl.observability.recorder import RecorderConfig
from rl.observability.span_file import TimelineConfig
from rl.rollouts.renderer import RendererConfig
from rl.supervised import SupervisedWarmup
from rl.weights.store import WeightStore

STARTING_POINTS = "starting_points"
"""Folder inside the dump folder that keeps warmed-up models for later runs."""


@dataclass(kw_only=True, slots=True)
class RunConfig(Configurable.Config):
    name: str | None = field(default=None, metadata=ONE_RUN)
    """Folder of the run inside `dump_folder`; by default the config's name and a time stamp."""
    dump_folder: str = "outputs"
    """Where runs, and the starting points they share, are kept."""
    overwrite: bool = field(default=False, metadata=ONE_RUN)
    """Replace a folder of this name that an earlier run left."""
    description: str = ""
    """A line for the reader of config.json."""
    print_config: bool = False
    """Show the resolved config before the start."""
    console_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "WARNING"
    """Log records of the actors from this level up also go to the console."""
    seed: int = 0
    """Of the starting point, of the order of problems and of the sampling."""
    batch_invariant: bool = False
    """Trainer and generator compute bit-identical logprobs, and a request's completion does not depend on
    what it is batched with."""
    model: ModelSpec = field(metadata=HIDDEN)
    hf_assets_path: str | None = None
    """A Qwen3 folder of Hugging Face (config, tokenizer, safetensors) to start from, without
    warm-up; None makes the starting point here."""
    any_model_size: bool = False
    """Take the model's sizes from `hf_assets_path` rather than asking for those of this config."""
    task: Configurable.Config
    dataset: str | None = None
    """Name of a dataset; refused, because problems come from `task`."""
    dataset_path: str | None = None
    """Folder of a dataset; refused, because problems come from `task`."""
    warmup: SupervisedWarmup.Config | None = None
    """Supervised steps that make the starting point; its result is kept for later runs."""
    trainer: PolicyTrainer.Config
    generator: VLLMGenerator.Config
    renderer: RendererConfig = field(default_factory=RendererConfig)
    reward: RewardActor.Config = field(default_factory=RewardActor.Config)
    weights: WeightStore.Config = field(default_factory=WeightStore.Config)
    loop: Loop.Config = field(default_factory=Loop.Config)
    timeouts: Timeouts = field(default_factory=Timeouts)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    router: Strategy = "least_loaded"
    """Which generator a prompt goes to; sticky: a session stays where it was, the rest as least_loaded."""
    recorder: RecorderConfig = field(default_factory=RecorderConfig)
    timeline: TimelineConfig = field(default_factory=TimelineConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    canary: CanaryConfig = field(default_factory=CanaryConfig)

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for field_name, value in (("dataset", self.dataset), ("dataset_path", self.dataset_path)):
            if value is not None:
                raise ValueError(
                    f"{field_name}={value!r}: must be None, as problems come from the config's task: "
                    "choose one by --module and --config, or write one (docs/extending.md)"
                )
        if self.name == STARTING_POINTS:
            raise ValueError(
                f"name={self.name!r} is the folder of the starting points that runs share: choose another"
            )

    @property
    def fleet(self) -> FleetConfig:
        return FleetConfig(**{f.name: getattr(self, f.name) for f in fields(FleetConfig)})
