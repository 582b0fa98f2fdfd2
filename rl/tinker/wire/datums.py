"""Data, losses and optimizer settings of the wire, checked and translated into relay's own.

A datum's entry i belongs to the model's prediction after token i; a sample's entry t belongs to
token t as a target. A datum of N tokens is therefore a sample of N + 1, whose last token is never
read.

All losses are plain sums over the tokens of a call, without any division; docs/tinker.md has their
formulas. The mean of gspo is taken over sequence_ratio_mask or, without one, over the tokens with
an advantage.

Shape legend: N tokens of one datum, K targets of each, T = N + 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial

import numpy as np
from tinker import types as wire

from losses.cross_entropy import CrossEntropyLoss
from losses.policy import CISPOLoss, DROLoss, GSPOLoss, ImportanceSamplingLoss, PPOLoss
from losses.types import Loss
from rl.tinker.types import (
    BELOW_1,
    MAX_FLOAT,
    BaseModelInfo,
    Datum,
    InvalidRequestError,
    check_range,
)
from rl.trainer_types import ForwardBackwardResult, OptimParams
from rl.types import TrainingSample

TARGETS, WEIGHTS, LOGPROBS, ADVANTAGES = "target_tokens", "weights", "logprobs", "advantages"
RATIO_MASK = "sequence_ratio_mask"
LOW, HIGH = "clip_low_threshold", "clip_high_threshold"
MAX_TARGETS = 2**25
"""Most targets of a call with several per token, where every token is padded to the largest number.
"""
MIN_EPS = 1e-30
"""Smallest eps: 0 makes 0 / 0 in float32 of a parameter without gradient, as LoRA's first factors
at first.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class WireLoss:
    """A loss of the wire: the inputs and settings that it takes, and how to build it."""

    name: str
    make: Callable[[Mapping[str, float]], Loss]
    defaults: Mapping[str, float] = field(default_factory=dict)
    """All settings, with their default values."""
    required: tuple[str, ...] = (TARGETS, LOGPROBS, ADVANTAGES)
    optional: tuple[str, ...] = ()
    many_targets: bool = False
    """True if a token may have several targets, [N, K]."""
    only_advantages: bool = True
    """True if a token with advantage 0 contributes exactly 0, to the gradient too."""

    def build(self, settings: Mapping[str, float]) -> Loss:
        """Build the loss, with default values for what the settings leave out.

        Example:
            `find_loss("dro").build({"beta": 0.1})` is `DROLoss(normalization="none", beta=0.1)`.
        """
        for name, value in settings.items():
            if name not in self.defaults:
                valid = (
                    f"its settings are {', '.join(self.defaults)}"
                    if self.defaults
                    else "it has none"
                )
                raise InvalidRequestError(
                    f"loss_fn_config: has {name!r:.100}, unknown to {self.name}: {valid}"
                )
            bounds = {LOW: (0.0, 1.0), HIGH: (1.0, MAX_FLOAT)}.get(name, (0.0, MAX_FLOAT))
            check_range(f"loss_fn_config: {name}", value, *bounds)
        return self.make({**self.defaults, **settings})


def _make_clipping(make: Callable[..., Loss]) -> Callable[[Mapping[str, float]], Loss]:
    """Translate thresholds of the ratio into relay's distances from 1."""
    return lambda settings: make(
        normalization="none", clip_low=1.0 - settings[LOW], clip_high=settings[HIGH] - 1.0
    )


_LOSSES = (
    WireLoss(
        name="cross_entropy",
        make=lambda settings: CrossEntropyLoss(normalization="none", weights="advantages"),
        required=(TARGETS,),
        optional=(WEIGHTS,),
        many_targets=True,
    ),
    WireLoss(
        name="importance_sampling",
        make=lambda settings: ImportanceSamplingLoss(normalization="none"),
    ),
    WireLoss(name="ppo", make=_make_clipping(PPOLoss), defaults={LOW: 0.8, HIGH: 1.2}),
    WireLoss(name="cispo", make=_make_clipping(CISPOLoss), defaults={LOW: 0.0, HIGH: 4.0}),
    WireLoss(
        name="dro",
        make=lambda settings: DROLoss(normalization="none", beta=settings["beta"]),
        defaults={"beta": 0.05},
        only_advantages=False,
    ),
    WireLoss(
        name="gspo",
        make=_make_clipping(partial(GSPOLoss, level="token")),
        defaults={LOW: 0.8, HIGH: 1.2},
        optional=(RATIO_MASK,),
    ),
)
STABLE_REINFORCE = "stable_reinforce"
NOT_PUBLIC = "its formula is not public, set loss_fn=importance_sampling or ppo"
"""Reason to refuse StableReinforce, the default of some recipes, and what to set instead."""
LOSSES: Mapping[str, WireLoss] = {loss.name: loss for loss in _LOSSES}


def find_loss(name: str) -> WireLoss:
    """Return a loss of the API; raise InvalidRequestError, which lists them, if there is none."""
    if name not in LOSSES:
        reason = f" {NOT_PUBLIC}:" if name == STABLE_REINFORCE else ""
        raise InvalidRequestError(
            f"loss_fn={name!r:.100}:{reason} must be one of {', '.join(LOSSES)}"
        )
    return LOSSES[name]


def collect_metrics(result: ForwardBackwardResult, loss: WireLoss) -> dict[str, float]:
    """Return sums and maxima only: the client adds up those of its chunks."""
    num_tokens = result.num_valid_tokens
    metrics = {
        "loss:sum": result.loss_sum,
        "num_tokens:sum": float(num_tokens),
        "entropy:sum": result.entropy_mean * num_tokens,
    }
    # Only of losses that clip, or that have logprobs to compare with.
    if HIGH in loss.defaults:
        metrics["num_clipped:sum"] = float(round(result.clipped_fraction * num_tokens))
    if LOGPROBS in loss.required:
        metrics["logprob_diff:sum"] = result.logprob_diff_mean * num_tokens
        metrics["logprob_diff:max"] = result.logprob_diff_max
    return metrics


def check_optim_params(params: object) -> OptimParams:
    """Translate a step's settings; raise InvalidRequestError unless they are valid ones of Adam."""
    if not isinstance(params, wire.AdamParams):
        raise InvalidRequestError("optimizer_params: this server has Adam only; give adam_params")
    for name, lowest, highest in (
        ("learning_rate", 0.0, MAX_FLOAT),
        ("beta1", 0.0, BELOW_1),
        ("beta2", 0.0, BELOW_1),
        ("eps", MIN_EPS, MAX_FLOAT),
        ("weight_decay", 0.0, MAX_FLOAT),
        ("grad_clip_norm", 0.0, MAX_FLOAT),
    ):
        check_range(f"adam_params.{name}", getattr(params, name), lowest, highest)
    return OptimParams(
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
        max_norm=params.grad_clip_norm if params.grad_clip_norm > 0.0 else math.inf,
    )


# Data


@dataclass(frozen=True, kw_only=True, slots=True)
class WireSamples:
    """Data of a call as relay's samples, with the shapes that their results have on the wire."""

    samples: tuple[TrainingSample, ...]
    widths: tuple[int | None, ...]
    """K of each datum; None where its targets are [N]."""

    @property
    def num_bytes(self) -> int:
        num_bytes = 0
        for sample in self.samples:
            for item in fields(sample):
                value = getattr(sample, item.name)
                if isinstance(value, np.ndarray):
                    num_bytes += value.nbytes
        return num_bytes

    def split_logprobs(self, of_samples: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """Return each datum's [N] or [N, K] logprobs, from the samples' [T] or [T, K]."""

        def of_datum(values: np.ndarray, width: int | None) -> np.ndarray:
            if values.ndim == 1:
                return values
            return values[:, 0] if width is None else values[:, :width]

        return tuple(
            of_datum(values[1:], width)
            for values, width in zip(of_samples, self.widths, strict=True)
        )


def make_samples(data: Sequence[Datum], loss: WireLoss, base: BaseModelInfo) -> WireSamples:
    """Check data and translate them; raise InvalidRequestError, which names datum and field.

    If all targets are the tokens that follow, the samples are plain ones, whose prompts can be
    shared. Targets of different K in one call are padded with ones that count for nothing.
    """
    if not data:
        raise InvalidRequestError("data: has no entries")
    for index, datum in enumerate(data):
        _check_datum(datum, loss, base, where=f"data[{index}]")
    targets = [datum.loss_inputs[TARGETS] for datum in data]
    widths = tuple(t.shape[1] if t.ndim == 2 else None for t in targets)
    most = max((width for width in widths if width is not None), default=None)
    num_tokens = sum(len(datum.tokens) for datum in data)
    if most is not None and num_tokens * most > MAX_TARGETS:
        raise InvalidRequestError(
            f"data: {num_tokens} tokens, of which data[{widths.index(most)}].{TARGETS} gives each "
            f"{most} targets: must be at most {MAX_TARGETS} targets together; send data of similar "
            "widths together"
        )
    # Plain samples need no targets of their own, and a prompt that several share is computed once.
    plain = most is None and all(
        np.array_equal(t[:-1], datum.tokens[1:]) for t, datum in zip(targets, data, strict=True)
    )
    samples = tuple(_sample(datum, loss, width=most, plain=plain) for datum in data)
    return WireSamples(samples=samples, widths=widths)


def _sample(datum: Datum, loss: WireLoss, *, width: int | None, plain: bool) -> TrainingSample:
    inputs = datum.loss_inputs
    targets = inputs[TARGETS]
    weights = inputs.get(WEIGHTS if LOGPROBS not in loss.required else ADVANTAGES)
    advantages = np.ones(targets.shape, np.float32) if weights is None else weights
    # A token that adds exactly 0 need not be trained; dro has a term without the advantage.
    mask = advantages != 0 if loss.only_advantages else np.ones(targets.shape, np.bool_)
    # The last token of a sample is a target only, and its id is never read where targets are given.
    last = targets[-1] if plain else 0

    def shifted(values: np.ndarray, dtype: type) -> np.ndarray:
        """Return [N] or [N, K] as [T] or [T, width], with False or 0 where nothing is predicted."""
        if width is not None and values.ndim == 1:
            values = values[:, None]
        missing = [(1, 0)] if width is None else [(1, 0), (0, width - values.shape[1])]
        return np.pad(values, missing).astype(dtype)

    # A prompt's tokens have advantages and logprobs of 0: in the mean they would drown those of the
    # completion.
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


def _check_datum(datum: Datum, loss: WireLoss, base: BaseModelInfo, *, where: str) -> None:
    tokens, inputs = datum.tokens, datum.loss_inputs
    longest = base.max_context_length - 1
    check_ids(tokens, base.vocab_size, where=f"{where}.model_input")
    if not 1 <= len(tokens) <= longest:
        raise InvalidRequestError(
            f"{where}.model_input: has {len(tokens)} tokens: must be 1 to {longest}, the model's "
            "context without the last target"
        )
    readable = (*loss.required, *loss.optional)
    for name in inputs:
        if name not in readable:
            raise InvalidRequestError(
                f"{where}.loss_fn_inputs: has {name!r:.100}, which {loss.name} does not read: it "
                f"reads {', '.join(readable)}"
            )
    for name in loss.required:
        if name not in inputs:
            raise InvalidRequestError(
                f"{where}.loss_fn_inputs: has no {name!r}, which {loss.name} needs"
            )
    targets = inputs[TARGETS]
    _check_targets(targets, len(tokens), loss, base, where=f"{where}.{TARGETS}")
    for name, values in inputs.items():
        if name != TARGETS:
            _check_values(values, targets.shape, where=f"{where}.{name}")


def _check_targets(
    targets: np.ndarray, num_tokens: int, loss: WireLoss, base: BaseModelInfo, *, where: str
) -> None:
    shape = list(targets.shape)
    is_many = targets.ndim == 2 and shape[0] == num_tokens and 1 <= shape[1] <= base.vocab_size
    if shape != [num_tokens] and not (is_many and loss.many_targets):
        many = f" or [{num_tokens}, K]" if loss.many_targets else ""
        raise InvalidRequestError(
            f"{where}: has shape {shape}: must be [{num_tokens}]{many} with {loss.name}, one for "
            "each token of model_input"
        )
    check_ids(targets, base.vocab_size, where=where)


def check_ids(ids: np.ndarray, vocab_size: int, *, where: str) -> None:
    """Raise InvalidRequestError unless all entries are token ids; Python's integers may be of any
    size.
    """
    if ids.dtype.kind not in "iuO":
        raise InvalidRequestError(f"{where}: has dtype {ids.dtype}: must be integers, token ids")
    if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
        outside = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise InvalidRequestError(
            f"{where}: has token id {outside!s:.100}: must be 0 to {vocab_size - 1}, the model's "
            "vocabulary"
        )


def _check_values(values: np.ndarray, shape: tuple[int, ...], *, where: str) -> None:
    if values.shape != shape:
        raise InvalidRequestError(
            f"{where}: has shape {list(values.shape)}: must be {list(shape)}, as target_tokens"
        )
    finite = np.isfinite(values)
    if not finite.all():
        raise InvalidRequestError(f"{where}: has {values[~finite][0]}: must be finite numbers")
