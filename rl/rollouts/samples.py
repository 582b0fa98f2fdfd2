"""From graded rollouts and demonstrations to what the trainer takes.

Shape legend: T tokens of a sequence, C tokens of its completion.
"""

from __future__ import annotations

import numpy as np

from rl.types import Rollout, TrainingSample


def policy_sample(rollout: Rollout, *, advantage: float, temperature: float) -> TrainingSample:
    """The rollout's tokens; the completion's are trained on, with one advantage for all."""
    completion = rollout.completion
    num_prompt = len(rollout.prompt.token_ids)
    num_completion = len(completion.token_ids)
    return TrainingSample(
        token_ids=np.concatenate([rollout.prompt.token_ids, completion.token_ids]).astype(np.int32),
        mask=_after(num_prompt, np.ones(num_completion, dtype=bool), before=False),
        generator_logprobs=_after(num_prompt, completion.logprobs.astype(np.float32), before=np.nan),
        advantages=_after(num_prompt, np.full(num_completion, advantage, dtype=np.float32), before=0.0),
        policy_versions=_after(num_prompt, completion.policy_versions.astype(np.int32), before=-1),
        temperature=temperature,
    )


def demonstration_sample(prompt_T: np.ndarray, completion_C: np.ndarray) -> TrainingSample:
    """A demonstration for a supervised loss: no generator, advantage one."""
    num_prompt, num_completion = len(prompt_T), len(completion_C)
    num_tokens = num_prompt + num_completion
    return TrainingSample(
        token_ids=np.concatenate([prompt_T, completion_C]).astype(np.int32),
        mask=_after(num_prompt, np.ones(num_completion, dtype=bool), before=False),
        generator_logprobs=np.full(num_tokens, np.nan, dtype=np.float32),
        advantages=np.ones(num_tokens, dtype=np.float32),
        policy_versions=np.full(num_tokens, -1, dtype=np.int32),
    )


def _after(num_prompt: int, values_C: np.ndarray, *, before: float) -> np.ndarray:
    """[T]: `before` at the prompt's tokens, then the completion's values."""
    return np.concatenate([np.full(num_prompt, before, dtype=values_C.dtype), values_C])
