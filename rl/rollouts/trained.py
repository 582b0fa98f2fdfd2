"""What is known of the training on a rollout's tokens: the vocabulary of recorder and ledger.

Shape legend: C tokens that the model produced, in all trained turns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TRAINED, ROLE, TRUNCATED, TOO_LONG, UNWEIGHTED = range(5)
"""Reasons of a token's mask. ROLE: its turn is in no trained branch; TRUNCATED: the rollout ran out
of tokens (`loop.mask_truncated_completions`); TOO_LONG: the sample was cut or left out
(`loop.max_sample_tokens`); UNWEIGHTED: the client of a Tinker session gave it no weight."""
REASONS = ("trained", "role", "truncated", "too long", "no weight")
"""Names of the reasons."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainedRollout:
    """Training data of a scored rollout's tokens; None if unknown."""

    advantages: np.ndarray
    """[C] float32."""
    minibatch: int = -1
    """Optimizer step of the batch that has trained on it; -1 if none has."""
    reasons: np.ndarray | None = None
    """[C] int8, TRAINED for tokens that the trainer was to train on, or why not."""
    trainer_logprobs: np.ndarray | None = None
    """[C] float32, nats, of the pass that computed the gradient; NaN for tokens that the loss was
    not applied to."""
    trainer_advantages: np.ndarray | None = None
    """[C] float32, as the loss has read them; NaN likewise."""
    proximal_logprobs: np.ndarray | None = None
    """[C] float32, nats, of the trainer before a step of several minibatches."""
    reference_logprobs: np.ndarray | None = None
    """[C] float32, nats, of the reference policy, if a KL is part of the reward."""

    @property
    def mask(self) -> np.ndarray | None:
        """[C] bool, True for tokens that were trained on."""
        return None if self.reasons is None else self.reasons == TRAINED

    @property
    def by_token(self) -> dict[str, np.ndarray]:
        """The arrays that are known, by the name of a ledger's column."""
        arrays = {
            "advantages": self.advantages,
            "mask": self.reasons,
            "trainer_logprobs": self.trainer_logprobs,
            "trainer_advantages": self.trainer_advantages,
            "proximal_logprobs": self.proximal_logprobs,
            "reference_logprobs": self.reference_logprobs,
        }
        return {name: array for name, array in arrays.items() if array is not None}
