"""How training rollouts are drawn, and how long they may become."""

from __future__ import annotations

from dataclasses import dataclass, field

from rl.config.effect import unless


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
                "logprobs are not those of the distribution that the trainer computes"
            )


@dataclass(kw_only=True, slots=True)
class EpisodeLimits:
    """Where an episode of several turns ends, whatever its environment says."""

    max_turns: int = 16
    """Most replies of the model."""
    max_tokens: int | None = None
    """Most tokens of all turns, prompts included; None: as many as the generator can take."""
    step_timeout_s: float = 60.0
    """Longest time an environment may take to close, or to answer a reply: then the rollout has failed."""
    timeout_s: float = 600.0
    """After this, counted from the first reply, no further turn begins."""

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ValueError(f"max_turns={self.max_turns} is less than 1")
        if self.max_tokens is not None and self.max_tokens < 2:
            raise ValueError(f"max_tokens={self.max_tokens}: must be at least 2, or None")
        for name in ("step_timeout_s", "timeout_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)}: must be above 0 and finite")


@dataclass(kw_only=True, slots=True)
class Evaluation:
    """What an evaluation draws of each problem; always one greedy reply."""

    num_samples: int = 0
    """Further replies, drawn at `temperature`: `eval/pass@k` is the chance that one of k of them is right,
    for k = 1, 2, 4, ... up to this number. 0: none."""
    temperature: float = field(default=1.0, metadata=unless("num_samples", 0))
    """Of those."""

    def __post_init__(self) -> None:
        if self.num_samples < 0:
            raise ValueError(f"num_samples={self.num_samples} is less than 0")
        if not 0.01 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature={self.temperature}: must be at least 0.01 and finite (greedy is drawn anyway)"
            )
