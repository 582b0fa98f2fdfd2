"""The loss of a recorded minibatch, computed again from what the ledger has of its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, get_args, get_type_hints

import numpy as np
import torch

from losses.types import Loss, LossInputs, LossOutput, uses_entropy
from rl.config.json import load_values
from rl.ledger.files import GIVEN
from rl.ledger.step import LedgerStep

PACKAGE = "losses."
"""Prefix of the classes that are taken: reading a ledger must not run code that it names."""


def load_loss(described: Mapping[str, Any]) -> Loss | None:
    """Return a loss of relay's own by its JSON; None for one of somebody else."""
    values = dict(described)
    name = str(values.pop("class"))
    if not name.startswith(PACKAGE):
        return None
    module, _, kind = name.rpartition(".")
    make = getattr(import_module(module), kind)
    # Some settings are needed to make any loss of the class; parts are loaded into it then.
    plain = {key: value for key, value in values.items() if not isinstance(value, dict | list)}
    loss: Loss = load_values(make(**plain, **_make_parts(make, values)), values)
    return loss


def _make_parts(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a loss that it has, and that a new one of its class would not have."""
    parts: dict[str, Any] = {}
    for name, hint in get_type_hints(kind).items():
        if isinstance(values.get(name), dict) and type(None) in get_args(hint):
            (part,) = (arg for arg in get_args(hint) if arg is not type(None))
            parts[name] = part()
    return parts


def knows_sum(loss: Loss) -> bool:
    """Return whether the ledger has all that the loss reads."""
    reads_reference = getattr(loss, "uses_reference", False) and getattr(loss, "kl_coef", 1.0)
    return not (uses_entropy(loss) or reads_reference)


def compute_loss(loss: Loss, step: LedgerStep, *, minibatch: int) -> LossOutput:
    """Return sum and denominator of a minibatch, as if it had been one micro-batch."""
    is_read_N = step.turns["minibatch"] == minibatch
    is_read_T = is_read_N[step.turn_of_token] & step.is_trained
    # An episode is one sequence for the loss, however many rows it has.
    episodes = step.turns["group"].astype(np.int64) << 32 | step.turns["member"]
    known, numbers_N = np.unique(episodes[is_read_N], return_inverse=True)
    of_turn = np.zeros(step.num_turns, dtype=np.int64)
    of_turn[is_read_N] = numbers_N

    def take(name: str) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(step.tokens[name][is_read_T]))

    # Tokens that the loss was not applied to count in no sum, so that they can be left out.
    logprobs_T = take("trainer_logprobs")
    proximal = take("proximal_logprobs") if "proximal_logprobs" in step.tokens else None
    return loss(
        LossInputs(
            logprobs=logprobs_T,
            generator_logprobs=take(GIVEN if GIVEN in step.tokens else "logprobs"),
            advantages=take("trainer_advantages"),
            mask=torch.ones(len(logprobs_T), dtype=torch.bool),
            sequence_ids=torch.from_numpy(of_turn[step.turn_of_token[is_read_T]]),
            num_sequences=len(known),
            # Stand-ins: the sum is not compared where the loss reads them.
            reference_logprobs=torch.zeros_like(logprobs_T),
            proximal_logprobs=proximal,
            entropy=torch.zeros_like(logprobs_T),
        )
    )
