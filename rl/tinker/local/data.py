"""From the wire's data to training samples, with every check, and back to each datum's logprobs.

A datum's entry i is about what the model predicts after token i; a sample's entry t is about token t as a
target. So a datum of N tokens is a sample of N + 1, whose last token is never read.

Shape legend: N tokens of one datum, K targets of each, T = N + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl.tinker.errors import InvalidRequestError
from rl.tinker.local.losses import (
    ADVANTAGES,
    LOGPROBS,
    RATIO_MASK,
    TARGETS,
    WEIGHTS,
    WireLoss,
    make_loss,
    wire_loss,
)
from rl.tinker.messages import Datum, LossCall
from rl.types import TrainingSample


@dataclass(frozen=True, kw_only=True, slots=True)
class DataRules:
    """What the data of one base model may be."""

    vocab_size: int
    max_tokens: int
    """Of one datum."""
    max_targets: int = 2**25
    """Of one call where a token has several: every token gets as many as the one that has most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WireSamples:
    """The data of one call as the engine takes them."""

    samples: tuple[TrainingSample, ...]
    widths: tuple[int | None, ...]
    """K of each datum; None where its targets are [N]."""

    def logprobs(self, of_samples: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """[N] or [N, K] float32 of each datum, of the engine's [T] or [T, K]."""
        return tuple(
            _of_datum(values[1:], width) for values, width in zip(of_samples, self.widths, strict=True)
        )


def _of_datum(values: np.ndarray, width: int | None) -> np.ndarray:
    if values.ndim == 1:
        return values
    return values[:, 0] if width is None else values[:, :width]


def check_data(data: Sequence[Datum], call: LossCall, rules: DataRules) -> None:
    """Raise InvalidRequestError naming what of the call cannot be: the loss, a setting, a datum's field."""
    loss = wire_loss(call)
    make_loss(call)
    if not data:
        raise InvalidRequestError("data: must have at least one datum")
    for index, datum in enumerate(data):
        _check_datum(datum, loss, rules, where=f"data[{index}]", loss_name=call.name)
    widths = [datum.loss_inputs[TARGETS].shape[1:] or (1,) for datum in data]
    num_tokens, (most,) = sum(len(datum.tokens) for datum in data), max(widths)
    if most > 1 and num_tokens * most > rules.max_targets:
        raise InvalidRequestError(
            f"data: {num_tokens} tokens, of which data[{widths.index((most,))}].{TARGETS} gives each {most} "
            f"targets: must be at most {rules.max_targets} targets together; send data of like widths at once"
        )


def wire_samples(data: Sequence[Datum], call: LossCall, rules: DataRules) -> WireSamples:
    """Samples in the data's order; raises as `check_data`.

    Where all targets are the tokens that follow, the samples are plain ones, whose prompts can be shared.
    Targets of different K in one call are filled up with ones that count for nothing.
    """
    check_data(data, call, rules)
    loss = wire_loss(call)
    targets = [datum.loss_inputs[TARGETS] for datum in data]
    widths = tuple(t.shape[1] if t.ndim == 2 else None for t in targets)
    most = max((width for width in widths if width is not None), default=None)
    plain = most is None and all(_follows(datum) for datum in data)
    samples = tuple(_sample(datum, loss, width=most, plain=plain) for datum in data)
    return WireSamples(samples=samples, widths=widths)


def _follows(datum: Datum) -> bool:
    """Whether each target is the next token."""
    return bool(np.array_equal(datum.loss_inputs[TARGETS][:-1], datum.tokens[1:]))


def _sample(datum: Datum, loss: WireLoss, *, width: int | None, plain: bool) -> TrainingSample:
    inputs = datum.loss_inputs
    targets = inputs[TARGETS]
    weighs = inputs.get(WEIGHTS if LOGPROBS not in loss.required else ADVANTAGES)
    advantages = np.ones(targets.shape, np.float32) if weighs is None else weighs
    mask = advantages != 0 if loss.only_advantages else np.ones(targets.shape, np.bool_)
    last = targets[-1] if plain else 0

    def shifted(values: np.ndarray, dtype: type) -> np.ndarray:
        """[N] or [N, K] as [T] or [T, width]: False or 0 where nothing is predicted."""
        if width is not None and values.ndim == 1:
            values = values[:, None]
        missing = [(1, 0)] if width is None else [(1, 0), (0, width - values.shape[1])]
        return np.pad(values, missing).astype(dtype)

    # A prompt's tokens come with advantages and logprobs of 0: in the mean they would drown the completion's.
    counted = mask if RATIO_MASK in loss.optional else None
    ratio_mask = inputs.get(RATIO_MASK, counted)
    logprobs = inputs.get(LOGPROBS, np.full(targets.shape, np.nan, np.float32))
    return TrainingSample(
        token_ids=np.append(datum.tokens, last).astype(np.int32),
        mask=shifted(mask, np.bool_),
        generator_logprobs=shifted(logprobs, np.float32),
        advantages=shifted(advantages, np.float32),
        policy_versions=np.full(len(datum.tokens) + 1, -1, np.int32),
        targets=None if plain else shifted(targets, np.int64),
        ratio_mask=None if ratio_mask is None else shifted(ratio_mask != 0, np.bool_),
    )


def _check_datum(datum: Datum, loss: WireLoss, rules: DataRules, *, where: str, loss_name: str) -> None:
    tokens, inputs = datum.tokens, datum.loss_inputs
    _check_ids(tokens, rules.vocab_size, where=f"{where}.model_input")
    if tokens.ndim != 1 or not 1 <= len(tokens) <= rules.max_tokens:
        raise InvalidRequestError(
            f"{where}.model_input: has shape {list(tokens.shape)}: must be 1 to {rules.max_tokens} tokens, "
            "the model's context without the last target"
        )
    for name in inputs:
        if name not in loss.inputs:
            raise InvalidRequestError(
                f"{where}.loss_fn_inputs has {name!r}, which {loss_name} does not read: it reads "
                f"{', '.join(loss.inputs)}"
            )
    for name in loss.required:
        if name not in inputs:
            raise InvalidRequestError(f"{where}.loss_fn_inputs has no {name!r}, which {loss_name} needs")
    targets = inputs[TARGETS]
    _check_targets(targets, len(tokens), loss, rules, where=f"{where}.{TARGETS}", loss_name=loss_name)
    for name, values in inputs.items():
        if name != TARGETS:
            _check_values(values, targets.shape, where=f"{where}.{name}")
    ratio_mask = inputs.get(RATIO_MASK)
    if ratio_mask is not None and not np.isin(ratio_mask, (0, 1)).all():
        wrong = ratio_mask[~np.isin(ratio_mask, (0, 1))][0]
        raise InvalidRequestError(f"{where}.{RATIO_MASK}: has {wrong}: must be 0 or 1 each")


def _check_targets(
    targets: np.ndarray, num_tokens: int, loss: WireLoss, rules: DataRules, *, where: str, loss_name: str
) -> None:
    shape = list(targets.shape)
    is_many = targets.ndim == 2 and shape[0] == num_tokens and 1 <= shape[1] <= rules.vocab_size
    if shape != [num_tokens] and not (is_many and loss.many_targets):
        many = f" or [{num_tokens}, K]" if loss.many_targets else ""
        raise InvalidRequestError(
            f"{where}: has shape {shape}: must be [{num_tokens}]{many} with {loss_name}, one for each token "
            "of model_input"
        )
    _check_ids(targets, rules.vocab_size, where=where)


def _check_ids(ids: np.ndarray, vocab_size: int, *, where: str) -> None:
    if ids.dtype.kind not in "iu":
        raise InvalidRequestError(f"{where}: is of {ids.dtype}: must be integers, token ids")
    if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
        outside = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise InvalidRequestError(
            f"{where}: has token id {outside}: must be 0 to {vocab_size - 1}, the model's vocabulary"
        )


def _check_values(values: np.ndarray, shape: tuple[int, ...], *, where: str) -> None:
    if values.dtype.kind not in "iuf":
        raise InvalidRequestError(f"{where}: is of {values.dtype}: must be numbers")
    if values.shape != shape:
        raise InvalidRequestError(
            f"{where}: has shape {list(values.shape)}: must be {list(shape)}, as target_tokens"
        )
    with np.errstate(over="ignore"):
        finite = np.isfinite(values.astype(np.float32))
    if not finite.all():
        raise InvalidRequestError(f"{where}: has {values[~finite][0]}: must be finite numbers of float32")
