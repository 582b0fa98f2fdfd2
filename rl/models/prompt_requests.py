"""What is asked of each prompt of one `generate` call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rl.models.sampling import request_seeds
from rl.types import SamplingParams

End = Callable[[Sequence[int]], bool]
"""Whether a completion of these tokens is to end."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PromptRequest:
    """What is asked of one prompt."""

    prompt: np.ndarray
    limit: int
    seeds: list[int]
    """Of each of its completions."""
    end: End | None


def prompt_requests(
    prompts: Sequence[np.ndarray],
    sampling: SamplingParams,
    *,
    limits: Sequence[int] | None,
    seeds: Sequence[int | None] | None,
    ends: Sequence[End | None] | None,
) -> list[PromptRequest]:
    """One a prompt; the arguments are those of `generate`.

    Raises:
        ValueError: not as many of something as prompts, or a limit out of range.
    """
    given: tuple[tuple[str, Sequence[object] | None], ...] = (
        ("limits", limits),
        ("seeds", seeds),
        ("ends", ends),
    )
    for name, values in given:
        if values is not None and len(values) != len(prompts):
            raise ValueError(f"{name} has {len(values)} entries for {len(prompts)} prompts")
    nothing = [None] * len(prompts)
    limits = [sampling.max_tokens] * len(prompts) if limits is None else limits
    for i, limit in enumerate(limits):
        if not 1 <= limit <= sampling.max_tokens:
            raise ValueError(
                f"limits[{i}]={limit}: must be 1 to {sampling.max_tokens}, which is sampling.max_tokens"
            )
    drawn = _seeds(prompts, sampling, nothing if seeds is None else seeds)
    ends = nothing if ends is None else ends
    return [
        PromptRequest(prompt=prompt, limit=limit, seeds=of_prompt, end=end)
        for prompt, limit, of_prompt, end in zip(prompts, limits, drawn, ends, strict=True)
    ]


def _seeds(
    prompts: Sequence[np.ndarray], sampling: SamplingParams, own: Sequence[int | None]
) -> list[list[int]]:
    """[prompt][sample]"""
    seeds: list[list[int]] = [[] for _ in prompts]
    for i, seed in enumerate(own):
        if seed is not None:
            (seeds[i],) = request_seeds([prompts[i]], seed=seed, num_samples=sampling.num_samples)
    others = [i for i, seed in enumerate(own) if seed is None]
    if others:
        seed = sampling.seed
        if seed is None:
            seed = int(torch.randint(2**62, ()).item())
        shared = request_seeds([prompts[i] for i in others], seed=seed, num_samples=sampling.num_samples)
        for i, of_prompt in zip(others, shared, strict=True):
            seeds[i] = of_prompt
    return seeds
