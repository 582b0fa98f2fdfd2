"""What of a step's rollouts is known token by token once it has trained on them, for those that are recorded.

Shape legend: T tokens of a sample, C of them that the model produced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypedDict

import numpy as np

from rl.observability.recorder import TrainedRollout
from rl.rollouts.group import Place
from rl.rollouts.producer import Batch
from rl.step_samples import StepSamples
from rl.types import ForwardBackwardResult, Rollout, TrainingSample


class Asked(TypedDict, total=False):
    """Arguments of `Learner.forward_backward`; none where nothing is wanted."""

    return_logprobs: Sequence[int]


class StepTokens:
    """The trainer's logprobs of recorded rollouts, of the gradient's own pass: nothing is computed for them.

    A sample of the step's first minibatch has those of the weights before the step. Where a step has several
    updates, later ones have them too if the loss needs them (`proximal_logprobs`), else those of the weights
    that their own gradient is of.
    """

    def __init__(self, made: StepSamples, batch: Batch, wanted: Iterable[Place]) -> None:
        """`wanted`: the places of the rollouts that are recorded with their tokens."""
        self._made = made
        self._batch = batch
        self._wanted = set(wanted)
        self._logprobs: dict[Place, np.ndarray] = {}
        self._samples: dict[Place, TrainingSample] = {}
        for places, samples in zip(made.places, made.minibatches, strict=True):
            for place, sample in zip(places, samples, strict=True):
                if place in self._wanted:
                    self._samples[place] = sample
                    if sample.proximal_logprobs is not None:
                        self._logprobs[place] = sample.proximal_logprobs

    def asked(self, number: int) -> Asked:
        """For the gradient of this minibatch."""
        missing = self._missing(number)
        return {"return_logprobs": missing} if missing else {}

    def add(self, number: int, gradient: ForwardBackwardResult) -> None:
        """What came of it; a learner may give no logprobs."""
        places = self._made.places[number]
        for index, logprobs_T in zip(self._missing(number), gradient.logprobs or (), strict=False):
            self._logprobs[places[index]] = logprobs_T

    def trained(self) -> list[list[TrainedRollout]]:
        """Of each scored rollout of each group, as far as it is known now."""
        return [
            [
                self._trained((p, g), group.scored[g].rollout, advantages_C)
                for g, advantages_C in enumerate(of_group)
            ]
            for p, (group, of_group) in enumerate(
                zip(self._batch.groups, self._made.advantages_PG, strict=True)
            )
        ]

    def _missing(self, number: int) -> list[int]:
        """Samples of a minibatch that are recorded and have no logprobs of the trainer's yet."""
        places = enumerate(self._made.places[number])
        return [i for i, place in places if place in self._wanted and place not in self._logprobs]

    def _trained(self, place: Place, rollout: Rollout, advantages_C: np.ndarray) -> TrainedRollout:
        if place not in self._wanted:
            return TrainedRollout(advantages=advantages_C)
        produced_T = _produced(rollout)
        mask_C = np.zeros(len(advantages_C), dtype=bool)
        logprobs_C = None
        if (sample := self._samples.get(place)) is not None:  # else it was too long
            mask_C = _filled(sample.mask, len(produced_T), np.False_)[produced_T]
        if (logprobs_T := self._logprobs.get(place)) is not None:
            logprobs_C = _filled(logprobs_T, len(produced_T), np.float32(np.nan))[produced_T]
        return TrainedRollout(advantages=advantages_C, mask=mask_C, trainer_logprobs=logprobs_C)


def _produced(rollout: Rollout) -> np.ndarray:
    """[T] bool: which of its tokens the model produced."""
    parts = [
        np.full(len(ids), is_reply)
        for turn in rollout.turns
        for ids, is_reply in ((turn.prompt_ids, False), (turn.completion.token_ids, True))
    ]
    return np.concatenate(parts)


def _filled(values: np.ndarray, num: int, rest: np.generic) -> np.ndarray:
    """`num` values, those that are missing at the end being `rest`: of a sample that was cut."""
    return np.concatenate([values, np.full(num - len(values), rest, dtype=values.dtype)])
