"""A loss that is computed here, of logprobs that the backend computed.

C is the custom loss, a function of the logprobs p of the targets. Its gradient by the parameters is
sum dC/dp grad p, and that of cross_entropy, L = - sum w p, is - sum w grad p. So with w = -dC/dp, which does
not depend on the parameters any more, one is the other.

Shape legend: N tokens of one datum, K targets of each.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from tinker import types
from tinker.lib.public_interfaces.custom_loss import LossHandle, check_loss_inputs, run_loss_handle

from rl.tinker.client.convert import data_of, loss_call
from rl.tinker.messages import Datum, ForwardBackwardOutput, LossCall

CustomLoss: TypeAlias = Callable[[list[types.Datum], list[Any]], tuple[Any, dict[str, float]]]
"""From data and their logprobs, each [N] or [N, K] float32 that require a gradient, to a scalar tensor and
metrics."""
CROSS_ENTROPY: LossCall = loss_call("cross_entropy", None)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Surrogate:
    """A cross entropy with the custom loss's gradient, and what the custom loss said."""

    data: list[Datum]
    loss: float
    metrics: dict[str, float]


def check_custom_loss(
    loss_fn: CustomLoss | LossHandle,
    data: Sequence[types.Datum],
    *,
    loss_type_input: str | None,
    session_id: str,
) -> None:
    """Raises ValueError for what could not be computed."""
    if loss_type_input is not None:
        warnings.warn(
            "loss_type_input is deprecated: a custom loss is always given logprobs",
            DeprecationWarning,
            stacklevel=3,
        )
        if loss_type_input != "logprobs":
            raise ValueError(f"loss_type_input={loss_type_input!r}: must be 'logprobs'")
    if isinstance(loss_fn, LossHandle):
        if loss_fn.session_id != session_id:
            raise ValueError(
                f"the loss {loss_fn.name!r} was created in session {loss_fn.session_id}; this client is of "
                f"session {session_id}"
            )
        check_loss_inputs(loss_fn, list(data))
    elif not callable(loss_fn):
        raise ValueError(f"loss_fn={loss_fn!r}: must be a function or a LossHandle")


def forward_data(data: Sequence[types.Datum]) -> list[Datum]:
    """What the logprobs are computed of: targets alone, nothing of which counts.

    Raises:
        ValueError: a datum without targets.
    """
    for i, datum in enumerate(data):
        if "target_tokens" not in datum.loss_fn_inputs:
            raise ValueError(
                f"data[{i}].loss_fn_inputs has no 'target_tokens', whose logprobs the loss is of"
            )
    return [_with_weights(datum, np.zeros(targets_of(datum).shape)) for datum in data_of(data)]


def targets_of(datum: Datum) -> np.ndarray:
    """[N] or [N, K]."""
    return datum.loss_inputs["target_tokens"]


def surrogate(
    data: Sequence[types.Datum],
    loss_fn: CustomLoss | LossHandle,
    *,
    sent: Sequence[Datum],
    output: ForwardBackwardOutput,
) -> Surrogate:
    """The loss and its gradient, from the `output` for what was `sent` of the data (`forward_data`).

    Raises:
        ValueError: the loss is no scalar tensor that depends on every datum's logprobs.
    """
    logprobs = [torch.tensor(values, requires_grad=True) for values in output.logprobs]
    if isinstance(loss_fn, LossHandle):
        loss, metrics = run_loss_handle(loss_fn, list(data), logprobs)
    else:
        loss, metrics = loss_fn(list(data), list(logprobs))
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
        raise ValueError(f"the custom loss is {shown}: must be a scalar tensor computed of the logprobs")
    loss.backward()
    weighted = []
    for i, (datum, logprobs_N) in enumerate(zip(sent, logprobs, strict=True)):
        if logprobs_N.grad is None:
            raise ValueError(f"the custom loss does not depend on the logprobs of data[{i}]")
        weighted.append(_with_weights(datum, -logprobs_N.grad.numpy()))
    return Surrogate(data=weighted, loss=float(loss.detach()), metrics=dict(metrics))


def _with_weights(datum: Datum, weights_N: np.ndarray) -> Datum:
    """This datum's targets, and nothing else of it, with these weights."""
    inputs = {"target_tokens": targets_of(datum), "weights": weights_N.astype(np.float32)}
    return Datum(tokens=datum.tokens, loss_inputs=inputs)


def with_custom_loss(output: ForwardBackwardOutput, computed: Surrogate) -> ForwardBackwardOutput:
    """The surrogate's result, under the custom loss's name."""
    rest = {name: value for name, value in output.metrics.items() if name != "loss:sum"}
    metrics = rest | computed.metrics
    metrics |= {"loss:sum": computed.loss, "surrogate_loss:sum": output.metrics["loss:sum"]}
    return ForwardBackwardOutput(logprobs=output.logprobs, metrics=metrics)
