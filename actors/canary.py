"""A fixed text whose logprobs every generator must give as the trainer does, after every sync.

Checksums (`rl.weights.canary`) say that the bits arrived. This says that they are used: that the generator
computes with them, in the layout and the dtype that it should, and with no cached key of older ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rl.config.effect import only_if
from rl.rollouts.renderer import Renderer
from rl.rollouts.samples import demonstration_sample
from rl.types import Prompt, TrainingSample
from rl.weights.errors import WeightStoreError

BOUNDS = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.1}
"""Nats a token, of the mean difference, by the coarser of the two dtypes computed in: a few times
what rounding gives."""


class CanaryError(WeightStoreError):
    """A generator does not compute what the trainer does with the weights of a version."""


@dataclass(kw_only=True, slots=True)
class CanaryConfig:
    """Of the check after every sync of the weights."""

    enable: bool = True
    """Compare logprobs of a fixed text; checksums are compared in any case."""
    num_tokens: int = field(default=32, metadata=only_if("enable", True))
    """Most tokens of the text, an evaluation problem's prompt with its answer."""
    max_logprob_diff: float | None = field(default=None, metadata=only_if("enable", True))
    """Largest mean difference, in nats a token; None: by the coarser dtype of trainer and generator 0.001
    (float32), 0.05 (float16), 0.1 (bfloat16), and 0 where both are batch-invariant."""

    def __post_init__(self) -> None:
        if self.num_tokens < 2:
            raise ValueError(f"num_tokens={self.num_tokens}: must be at least 2, one that follows another")
        if self.max_logprob_diff is not None and not self.max_logprob_diff >= 0:
            raise ValueError(f"max_logprob_diff={self.max_logprob_diff}: must be at least 0, or None")


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobCanary:
    """The text, and how far its logprobs may be apart."""

    token_ids: np.ndarray
    """[T] int32."""
    max_diff: float
    """Nats a token."""

    @property
    def sample(self) -> TrainingSample:
        """For the trainer."""
        return demonstration_sample(self.token_ids[:1], self.token_ids[1:])

    def check(self, *, policy_version: int, expected_T: np.ndarray, found: Mapping[str, np.ndarray]) -> float:
        """The largest mean difference, in nats a token.

        Args:
            expected_T: the trainer's logprobs, [T] float32, entry 0 is of no token.
            found: each generator's, by name.

        Raises:
            CanaryError: names generator, version, the difference and the bound.
        """
        diffs = {name: np.abs(logprobs_T - expected_T)[1:] for name, logprobs_T in found.items()}
        for name, diff in diffs.items():
            if not float(diff.mean()) <= self.max_diff:
                worst = int(diff.argmax()) + 1
                raise CanaryError(
                    f"weight canary: with policy version {policy_version} {name} differs from the trainer by "
                    f"{float(diff.mean()):.3g} nats a token on a fixed text of {len(self.token_ids)} tokens, "
                    f"more than {self.max_diff:g} (canary.max_logprob_diff); most at token {worst}: "
                    f"{found[name][worst]:.4f}, the trainer says {expected_T[worst]:.4f}"
                )
        return max(float(diff.mean()) for diff in diffs.values())


def make_canary(
    config: CanaryConfig,
    *,
    prompt: Prompt,
    renderer: Renderer,
    dtypes: tuple[str, ...],
    max_tokens: int,
    batch_invariant: bool = False,
) -> LogprobCanary | None:
    """None where it is off.

    Args:
        prompt: with its problem's answer it is the text.
        dtypes: that trainer and generator compute in.
        max_tokens: that both can take.
    """
    if not config.enable:
        return None
    problem = prompt.problem
    answer = renderer.reply((problem.demonstrations or (problem.answer,))[0])[:-1]
    token_ids = np.concatenate([prompt.token_ids, answer])
    # The end of the text: it is the answer that a policy says something about.
    kept = token_ids[-min(config.num_tokens, max_tokens) :]
    bound = config.max_logprob_diff
    if bound is None:
        bound = 0.0 if batch_invariant else max(BOUNDS[dtype] for dtype in dtypes)
    return LogprobCanary(token_ids=kept, max_diff=bound)
