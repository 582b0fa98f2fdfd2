"""The losses of the wire, by name: what each reads of a datum, its settings, and the loss of ours it is.

All are plain sums over the tokens of a call, without any division. With p the logprob of a target, q the one
that came with it, A its advantage, w its weight and r = exp(p - q):

    cross_entropy          - sum w p
    importance_sampling    - sum r A
    ppo                    - sum min(r A, clamp(r, lo, hi) A)
    cispo                  - sum sg(clamp(r, lo, hi)) p A                          sg: without gradient
    dro                    - sum [p A - beta / 2 (p - q)^2]
    gspo                   - sum min(s A, clamp(s, lo, hi) A), s = exp(mean of p - q) exp(p - sg(p)), where
                           the mean is over the tokens of sequence_ratio_mask, where a datum brings none over
                           those with an advantage, and without gradient

In all of them p - q is clamped to +-20 nats before it becomes a ratio (`losses.ops`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from losses.cispo import CISPOLoss
from losses.cross_entropy import CrossEntropyLoss
from losses.dro import DROLoss
from losses.gspo import GSPOLoss
from losses.importance_sampling import ImportanceSamplingLoss
from losses.ppo import PPOLoss
from losses.types import Loss
from rl.tinker.errors import InvalidRequestError
from rl.tinker.messages import LossCall

TARGETS, WEIGHTS, LOGPROBS, ADVANTAGES = "target_tokens", "weights", "logprobs", "advantages"
RATIO_MASK = "sequence_ratio_mask"
LOW, HIGH = "clip_low_threshold", "clip_high_threshold"


@dataclass(frozen=True, kw_only=True, slots=True)
class WireLoss:
    """What a caller may send with a loss, and what is made of it."""

    required: tuple[str, ...]
    """Inputs that every datum brings."""
    optional: tuple[str, ...] = ()
    defaults: Mapping[str, float] = field(default_factory=dict)
    """Settings, all of them, as they are where the caller gives none."""
    make: Callable[[Mapping[str, float]], Loss]
    many_targets: bool = False
    """Whether a token may have several targets: [N, K]."""
    only_advantages: bool = False
    """Whether a token without an advantage gives exactly 0, to the gradient too."""

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*self.required, *self.optional)


def _clipping(make: Callable[..., Loss]) -> Callable[[Mapping[str, float]], Loss]:
    """The bounds of a ratio are distances from 1 in our losses."""
    return lambda settings: make(
        normalization="none", clip_low=1.0 - settings[LOW], clip_high=settings[HIGH] - 1.0
    )


_POLICY = (TARGETS, LOGPROBS, ADVANTAGES)

LOSSES: Mapping[str, WireLoss] = {
    "cross_entropy": WireLoss(
        required=(TARGETS,),
        optional=(WEIGHTS,),
        make=lambda settings: CrossEntropyLoss(normalization="none", weights="advantages"),
        many_targets=True,
        only_advantages=True,
    ),
    "importance_sampling": WireLoss(
        required=_POLICY,
        make=lambda settings: ImportanceSamplingLoss(normalization="none"),
        only_advantages=True,
    ),
    "ppo": WireLoss(
        required=_POLICY,
        defaults={LOW: 0.8, HIGH: 1.2},
        make=_clipping(PPOLoss),
        only_advantages=True,
    ),
    "cispo": WireLoss(
        required=_POLICY,
        defaults={LOW: 0.0, HIGH: 4.0},
        make=_clipping(CISPOLoss),
        only_advantages=True,
    ),
    "dro": WireLoss(
        required=_POLICY,
        defaults={"beta": 0.05},
        make=lambda settings: DROLoss(normalization="none", beta=settings["beta"]),
    ),
    "gspo": WireLoss(
        required=_POLICY,
        optional=(RATIO_MASK,),
        defaults={LOW: 0.8, HIGH: 1.2},
        make=_clipping(partial(GSPOLoss, level="token")),
        only_advantages=True,
    ),
}


def wire_loss(call: LossCall) -> WireLoss:
    """Raises InvalidRequestError for a name that is none."""
    found = LOSSES.get(call.name)
    if found is None:
        raise InvalidRequestError(f"loss_fn={call.name!r}: must be one of {', '.join(LOSSES)}")
    return found


def make_loss(call: LossCall) -> Loss:
    """The loss with the call's settings.

    Raises:
        InvalidRequestError: a name that is none, or a setting that is unknown or out of range.
    """
    found = wire_loss(call)
    for name, value in call.settings.items():
        if name not in found.defaults:
            valid = f"its settings are {', '.join(found.defaults)}" if found.defaults else "it has none"
            raise InvalidRequestError(
                f"loss_fn_config has {name!r}, which {call.name} does not know: {valid}"
            )
        _check_setting(name, value)
    return found.make({**found.defaults, **call.settings})


def _check_setting(name: str, value: float) -> None:
    lowest, highest = {LOW: (0.0, 1.0), HIGH: (1.0, math.inf)}.get(name, (0.0, math.inf))
    if not (lowest <= value <= highest and math.isfinite(value)):
        rule = f"from {lowest:g} to {highest:g}" if math.isfinite(highest) else f"of at least {lowest:g}"
        raise InvalidRequestError(f"loss_fn_config: {name}={value}: must be a finite number {rule}")
