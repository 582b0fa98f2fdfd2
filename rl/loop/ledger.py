"""The ledger of a loop's steps: what each has trained, with the settings by which it did."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rl.ledger.writer import Ledger
from rl.loop.config import LoopConfig
from rl.loop.metrics import TrainedMinibatch
from rl.rollouts.group import Group, RolloutId
from rl.rollouts.producer import Batch
from rl.rollouts.trained import TrainedRollout


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLedger:
    """Writes a loop's steps into a ledger."""

    ledger: Ledger
    config: LoopConfig
    loss: Mapping[str, Any]
    """The loss as JSON, with its class."""
    trained_roles: Sequence[str] | None = ("main",)
    """Roles of branches that may be trained on; None: a function of the user's chooses."""

    def choose_ids(self, groups: Sequence[Group]) -> list[RolloutId]:
        """Return the scored rollouts whose tokens are recorded."""
        return self.ledger.choose_ids(groups)

    def step(
        self,
        step: int,
        batch: Batch,
        trained_PG: Sequence[Sequence[TrainedRollout]],
        *,
        trained: Sequence[TrainedMinibatch],
        steps_of_versions: Mapping[int, int],
        outstanding: Collection[int],
    ) -> None:
        """Append a step.

        Args:
            trained_PG: of all scored rollouts, in the order of the batch.
            trained: results of the optimizer steps.
            steps_of_versions: steps after which the weights of each version were pushed.
            outstanding: numbers of the problems that were begun, and that no step has had yet.
        """
        self.ledger.append(
            step,
            batch.groups,
            trained_PG,
            facts={
                "settings": self._describe_settings(),
                "minibatches": [_describe(minibatch) for minibatch in trained],
                "steps_of_versions": {str(v): s for v, s in steps_of_versions.items()},
                "dropped": [[reason, group.number] for reason, group in batch.dropped],
                "outstanding": sorted(outstanding),
            },
        )

    def _describe_settings(self) -> dict[str, Any]:
        """Return the settings that the check computes with."""
        config = self.config
        # Of the step, not of config.json: a resumed run may have changed them.
        return {
            "advantage": asdict(config.advantage),
            "kl_reward": asdict(config.kl_reward),
            "loss": self.loss,
            "trained_roles": None if self.trained_roles is None else [*self.trained_roles],
            "groups_per_batch": config.groups_per_batch,
            "num_minibatches": config.num_minibatches,
            "max_off_policy_steps": config.max_off_policy_steps,
            "mask_truncated_completions": config.mask_truncated_completions,
            "max_sample_tokens": config.max_sample_tokens,
            "temperature": config.sampling.temperature,
        }


def _describe(minibatch: TrainedMinibatch) -> dict[str, Any]:
    """Return what the trainer says of an optimizer step."""
    gradient, update = minibatch.gradient, minibatch.update
    return {
        "policy_version": update.policy_version,
        "grad_norm": update.grad_norm,
        "lr": update.lr,
        "loss_sum": gradient.loss_sum,
        "denominator": gradient.denominator,
        "num_episodes": gradient.num_samples,
        "num_tokens": gradient.num_trained_tokens,
        "advantage_sum": gradient.advantage_sum,
    }
