"""Small data in the official client's types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tinker
from tinker import types

from tests.support.tinker_server import RESULT_TIMEOUT_S

TEXTS = ("seven plus two is nine", "two and two make four", "a rose is a rose", "one, two, three")


def done(future: Any) -> Any:
    return future.result(RESULT_TIMEOUT_S)


def floats(values: Sequence[float]) -> types.TensorData:
    return types.TensorData(data=list(values), dtype="float32", shape=[len(values)])


def ints(values: Sequence[int]) -> types.TensorData:
    return types.TensorData(data=list(values), dtype="int64", shape=[len(values)])


def text_datum(text: str) -> types.Datum:
    """Return a datum in which each byte predicts the next one; the tiny model's tokens are
    bytes.
    """
    tokens = list(text.encode())
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": ints(tokens[1:]),
            "weights": floats([1.0] * (len(tokens) - 1)),
        },
    )


def sampled_datum(
    prompt: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float], advantage: float
) -> types.Datum:
    """Return the datum that the cookbook makes of a sample: the prompt has no advantage."""
    whole = [*prompt, *tokens]
    unlearned = len(prompt) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(whole[:-1]),
        loss_fn_inputs={
            "target_tokens": ints(whole[1:]),
            "logprobs": floats([0.0] * unlearned + list(logprobs)),
            "advantages": floats([0.0] * unlearned + [advantage] * len(tokens)),
        },
    )


def logprobs_of(output: types.ForwardBackwardOutput) -> list[np.ndarray]:
    return [item["logprobs"].to_numpy() for item in output.loss_fn_outputs]


def lora(client: tinker.ServiceClient, *, seed: int = 1, rank: int = 8) -> tinker.TrainingClient:
    model: tinker.TrainingClient = done(
        client.create_lora_training_client("tiny", rank=rank, seed=seed)
    )
    return model


def learn(
    model: tinker.TrainingClient, data: Sequence[types.Datum], *, steps: int, lr: float = 1e-2
) -> list[float]:
    """Submit all steps on the same data at once and return the loss of each step."""
    losses = []
    for _ in range(steps):
        gradient = model.forward_backward(list(data), "cross_entropy")
        done(model.optim_step(types.AdamParams(learning_rate=lr)))
        losses.append(done(gradient).metrics["loss:sum"])
    return losses


def forward(model: tinker.TrainingClient, data: Sequence[types.Datum]) -> list[np.ndarray]:
    """Return logprobs without changing the model."""
    return logprobs_of(done(model.forward(list(data), "cross_entropy")))
