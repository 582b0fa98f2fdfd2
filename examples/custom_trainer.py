"""A trainer of your own: one more field in its config, one method changed, nothing else touched.

    python -m rl.train --module examples.custom_trainer --config tiny_annealed_clip \
        --trainer.final_max_norm 0.05

The gradient's clip norm falls over the first steps from `training.max_norm` to `final_max_norm`.
The new field is an option of the command line and a line in config.json like any other.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from actors.controller import Controller
from actors.trainer import PolicyTrainer
from configs.sum_digits import tiny
from rl.config.tree import check_bounds
from rl.trainer_types import OptimParams, OptimStepResult
from rl.training.engine import TrainingEngine


class AnnealedClipTrainer(PolicyTrainer):
    """Trainer actor whose engine lowers the clip norm."""

    @dataclass(kw_only=True, slots=True)
    class Config(PolicyTrainer.Config):
        """The trainer's options, and those of the annealing."""

        final_max_norm: float = 0.1
        """Gradient clip norm after the annealing."""
        anneal_steps: int = 20
        """Steps over which the clip norm falls."""

        def __post_init__(self) -> None:
            # Not super(): a dataclass with slots is another class than the one that `super` was
            # compiled in.
            PolicyTrainer.Config.__post_init__(self)
            check_bounds(self, "final_max_norm", above=0)
            check_bounds(self, "anneal_steps", at_least=1)

    def make_engine(self, hf_assets_path: str) -> TrainingEngine:
        assert isinstance(self.config, AnnealedClipTrainer.Config)
        return AnnealedClipEngine(
            config=self.config,
            model_spec=self.model_spec,
            hf_assets_path=hf_assets_path,
            failure_folder=self.failure_folder,
        )


class AnnealedClipEngine(TrainingEngine):
    """Engine that gives each step a clip norm of its own."""

    def optim_step(
        self, params: OptimParams | None = None, *, allow_empty: bool = False
    ) -> OptimStepResult:
        config = self.config
        assert isinstance(config, AnnealedClipTrainer.Config)
        # The version counts the steps and is in checkpoints, so a resumed run goes on as it was.
        progress = min(1.0, self.policy_version / config.anneal_steps)
        max_norm = config.training.max_norm * (1 - progress) + config.final_max_norm * progress
        params = params or OptimParams()
        # A caller of the engine may still choose a norm of its own.
        if params.max_norm is None:
            params = replace(params, max_norm=max_norm)
        return super().optim_step(params, allow_empty=allow_empty)


def tiny_annealed_clip() -> Controller.Config:
    """The tiny run with the trainer above: call another config, edit what it returns."""
    config = tiny()
    shared = {field.name: getattr(config.trainer, field.name) for field in fields(config.trainer)}
    config.trainer = AnnealedClipTrainer.Config(**shared, final_max_norm=0.2)
    return config
