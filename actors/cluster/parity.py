"""Logprob parity: generators compute as the trainer does with the weights of one version.

Weight parity (`rl.weights.checksum`) compares checksums: the bits have arrived. Logprob parity
compares logprobs of a fixed text: the generator uses these bits, in the right layout and dtype, and
no cached key of older weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from actors.config import ParityConfig
from rl.rollouts.renderer import Renderer
from rl.rollouts.samples import make_demonstration_sample
from rl.types import Prompt, TrainingSample
from rl.weights.types import WeightStoreError

BOUNDS = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.1, "float8": 0.3}
"""Mean difference in nats a token, by the coarsest of the compute dtypes: a few times the rounding.
"""


class LogprobParityError(WeightStoreError):
    """A generator's logprobs differ from the trainer's with the weights of one version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityText:
    """Fixed text whose logprobs trainer and generators compute with the same weights."""

    token_ids: np.ndarray
    """[T] int32."""
    max_diff: float
    """Bound of the mean difference in nats a token."""

    @property
    def sample(self) -> TrainingSample:
        return make_demonstration_sample(self.token_ids[:1], self.token_ids[1:])

    def check(
        self,
        *,
        policy_version: int,
        expected_T: np.ndarray,
        of_generators: Mapping[str, np.ndarray],
    ) -> float:
        """Return the largest mean difference of a generator, in nats a token.

        The mean is over the absolute differences of the text's tokens after the first. Both sides
        compute with the weights of this version: the trainer when it has pushed them, the
        generators when they have pulled them.

        Args:
            expected_T: the trainer's logprobs, [T] float32; entry 0 belongs to no token.
            of_generators: each generator's logprobs, by name.

        Raises:
            LogprobParityError: names generator, version, the difference and the bound.
        """
        means = []
        for name, logprobs_T in of_generators.items():
            mean_diff = float(np.abs(logprobs_T - expected_T)[1:].mean())
            if not mean_diff <= self.max_diff:  # NaN is no parity either.
                raise LogprobParityError(
                    f"logprob parity: with policy version {policy_version} {name} differs from the "
                    f"trainer by {mean_diff:.3g} nats a token on a fixed text of "
                    f"{len(self.token_ids)} tokens, more than {self.max_diff:g} "
                    "(parity.max_logprob_diff)"
                )
            means.append(mean_diff)
        return max(means)


def make_parity_text(
    config: ParityConfig,
    *,
    prompt: Prompt,
    renderer: Renderer,
    dtypes: tuple[str, ...],
    max_tokens: int,
    same_kernels: bool = False,
) -> ParityText | None:
    """Return the text of a run, or None if `config` turns the comparison off.

    Args:
        prompt: the text is this prompt with its problem's answer.
        dtypes: compute dtypes of trainer and generator, and of converters that round further.
        max_tokens: longest text that both accept.
        same_kernels: trainer and generator compute the same bits.
    """
    if not config.enable:
        return None
    problem = prompt.problem
    shown = (problem.demonstrations or (problem.answer,))[0]
    answer = renderer.reply(shown, prompt_ids=prompt.token_ids)[:-1]
    token_ids = np.concatenate([prompt.token_ids, answer])
    # The end of the text: a policy has learnt most about the answer.
    text = token_ids[-min(config.num_tokens, max_tokens) :]
    bound = config.max_logprob_diff
    if bound is None:
        # The coarsest dtype decides: its rounding is most of the difference.
        bound = 0.0 if same_kernels else max(BOUNDS[dtype] for dtype in dtypes)
    return ParityText(token_ids=text, max_diff=bound)
