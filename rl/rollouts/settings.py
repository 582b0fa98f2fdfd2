"""How training completions are drawn."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class Sampling:
    """How training completions are drawn."""

    max_tokens: int = 32
    """Most new tokens of one completion."""
    temperature: float = 1.0
    """The trainer divides its logits by it, so that its logprobs are of the same distribution."""
    top_p: float = 1.0
    """Only 1 (off) can be trained on: the trainer cannot undo a truncated distribution."""
    top_k: int = 0
    """Only 0 (off) can be trained on."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} is less than 1")
        if not 0.01 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature={self.temperature} cannot be trained on: greedy tokens carry no "
                "policy gradient; use a finite value of at least 0.01 (evaluation is greedy anyway)"
            )
        if self.top_p != 1.0 or self.top_k != 0:
            raise ValueError(
                f"top_p={self.top_p}, top_k={self.top_k}: training needs 1.0 and 0 (off), or the recorded "
                " logprobs are not those of the distribution that the trainer computes"
            )
