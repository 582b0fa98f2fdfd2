"""What settings of an optimizer step may be."""

from __future__ import annotations

import math

from rl.tinker.errors import InvalidRequestError
from rl.tinker.messages import AdamParams

MIN_EPS = 1e-30
"""With 0, or what is that in float32, a parameter without gradient becomes 0 / 0: LoRA's first
factors have none in the first step."""


def check_adam(params: AdamParams) -> None:
    """Raise InvalidRequestError naming the field that is out of range."""
    for name, valid, rule in (
        ("learning_rate", 0.0 <= params.learning_rate < math.inf, "a finite number of at least 0"),
        ("beta1", 0.0 <= params.beta1 < 1.0, "at least 0 and below 1"),
        ("beta2", 0.0 <= params.beta2 < 1.0, "at least 0 and below 1"),
        ("eps", MIN_EPS <= params.eps < math.inf, f"a finite number of at least {MIN_EPS:g}"),
        ("weight_decay", 0.0 <= params.weight_decay < math.inf, "a finite number of at least 0"),
        ("grad_clip_norm", 0.0 <= params.grad_clip_norm < math.inf, "a finite number above 0, or 0 for none"),
    ):
        if not valid:
            raise InvalidRequestError(f"adam_params.{name}={getattr(params, name)}: must be {rule}")
