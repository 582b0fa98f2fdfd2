"""Every message between the controller and the actors.

Frozen, keyword-only, slotted dataclasses; arrays are numpy so that messages pickle
small and never carry a device. Nothing here is filled in later: a rollout, its score
and its advantage are values added one after another.

Shapes: T tokens of one sequence, C tokens of one completion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort"]
Role = Literal["system", "user", "assistant", "tool"]
EndReason = Literal["done", "turns", "tokens", "time", "failed"]
"""done: the environment had no more to say; turns, tokens, time: a limit was met; failed: it broke."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How completions are drawn. Returned logprobs are those of the distribution sampled from."""

    max_tokens: int
    """Most new tokens of one completion."""
    num_samples: int = 1
    """Completions per prompt."""
    temperature: float = 1.0
    """0 is greedy: for evaluation only, its logprobs carry no policy gradient."""
    top_p: float = 1.0
    """1 is off."""
    top_k: int = 0
    """0 is off."""
    stop_token_ids: tuple[int, ...] = ()
    """A completion ends after one of these; the stop token is part of the completion."""
    stop_texts: tuple[str, ...] = ()
    """A completion ends after the token with which it spells one of these, which is part of it. For engines
    with a tokenizer: `rl.models.generate` has none."""
    seed: int | None = None
    """Of the whole call; each request derives its own. None draws from the engine's state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """What one side says in a conversation, before any chat template."""

    role: Role
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One task instance: what the model is asked and what its answer is graded against."""

    id: str
    """Unique within the task, stable between runs."""
    question: str
    """The user's first message, before any chat template."""
    answer: str
    """The reference answer; empty where the grader needs none."""
    demonstration: str | tuple[str, ...] = ""
    """A full reply that solves it, in several turns one each; empty where the task has none."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """What else environment and reward functions want to know; plain values, which pickle."""

    @property
    def demonstrations(self) -> tuple[str, ...]:
        """The reply of each turn; empty where the task has none."""
        told = self.demonstration
        return told if isinstance(told, tuple) else (told,) if told else ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prompt:
    """A problem rendered to the tokens that the generator receives."""

    problem: Problem
    token_ids: np.ndarray
    """[T] int32."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Completion:
    """What the generator produced for one prompt, token for token; never re-tokenized."""

    token_ids: np.ndarray
    """[C] int32, the stop token included."""
    logprobs: np.ndarray
    """[C] float32, nats, of the distribution that was sampled from."""
    policy_versions: np.ndarray
    """[C] int32, version of the weights that produced each token."""
    finish_reason: FinishReason


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Reply:
    """What an environment is told of a turn."""

    text: str
    """The completion decoded, special tokens removed."""
    completion: Completion


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What an environment answers to a reply."""

    messages: tuple[Message, ...] = ()
    """What the model is told next; without any, the episode is over."""
    reward: float = 0.0
    """Of this reply alone; the rubric's comes on top."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers to report, such as calls of a tool; summed over the turns of a rollout."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Turn:
    """What the model was told and what it replied, token for token."""

    messages: tuple[Message, ...]
    """What it was told since its last reply."""
    prompt_ids: np.ndarray
    """[N] int32: those messages as tokens, with all that a template puts between the last reply and this
    one. Of the first turn, the whole prompt."""
    completion: Completion
    text: str
    """The completion decoded, special tokens removed."""
    observation: Observation = field(default_factory=Observation)
    """What the environment answered."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rollout:
    """One finished attempt at a problem: an episode of at least one turn.

    Its tokens are those of its turns, prompt and completion of each in order: what the generator read and
    what it produced. Nothing was tokenized twice.
    """

    prompt: Prompt
    sample: int
    """Which of its prompt's rollouts it is: 0 to G - 1."""
    turns: tuple[Turn, ...]
    end: EndReason = "done"
    """Why there are no more turns."""
    failure: str | None = None
    """Why the environment could not go on (it raised, took too long); then the rollout is not trained on."""

    @property
    def completion(self) -> Completion:
        """Of the last turn."""
        return self.turns[-1].completion

    @property
    def text(self) -> str:
        """The last reply."""
        return self.turns[-1].text

    @property
    def num_tokens(self) -> int:
        """Of all turns, prompts included."""
        return sum(len(t.prompt_ids) + len(t.completion.token_ids) for t in self.turns)

    @property
    def num_completion_tokens(self) -> int:
        """Those that the model produced."""
        return sum(len(t.completion.token_ids) for t in self.turns)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The whole conversation, and what the environment said to the last reply."""
        said = [m for t in self.turns for m in (*t.messages, Message(role="assistant", content=t.text))]
        return (*said, *self.turns[-1].observation.messages)


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """What a rubric says of one rollout."""

    reward: float
    """What the rubric gives, always finite; what is optimised is this and `overlong`."""
    correct: bool
    """Whether the answer is right, whatever the reward's shaping."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Unweighted value of each reward function, by name."""
    failure: str | None = None
    """Why scoring failed (raised, timed out, not finite); then the rollout is not trained on."""
    unparsed: tuple[str, ...] = ()
    """Reward functions that found no answer in the reply, and gave what such a reply gets."""
    overlong: float = 0.0
    """What the length of a training rollout takes off (loop.overlong), at most 0. It is apart from `reward`,
    by which groups are compared: replies that are all right stay so, however long they are."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingSample:
    """One sequence with what the loss needs of each of its tokens.

    Entry t of every array is about token t as a *target*; entry 0 is never a target, so
    `mask[0]` is False. With `targets` of K columns it is about K targets at that place: mask,
    advantages and all logprobs are [T, K] then.
    """

    token_ids: np.ndarray
    """[T] int32, prompt and completion."""
    mask: np.ndarray
    """[T] bool, True where the token is trained on."""
    generator_logprobs: np.ndarray
    """[T] float32, nats, as recorded by the generator; NaN where the generator drew nothing."""
    advantages: np.ndarray
    """[T] float32."""
    policy_versions: np.ndarray
    """[T] int32; -1 where the generator drew nothing."""
    temperature: float = 1.0
    """Of the distribution that was sampled from; the trainer divides its logits by it."""
    reference_logprobs: np.ndarray | None = None
    """[T] float32, nats, of a reference policy. None: of the trainer's own where that is switched on."""
    proximal_logprobs: np.ndarray | None = None
    """[T] float32, nats, of the trainer's policy before its first optimizer step on this data, as
    `compute_logprobs` gives them; for a loss with an importance correction. None: its own at the time."""
    targets: np.ndarray | None = None
    """[T] or [T, K] int64, what is predicted in place of token t itself; entry 0 is never predicted."""
    ratio_mask: np.ndarray | None = None
    """[T] bool, tokens that a sequence's ratio is the mean over, in a loss that has such a ratio (GSPO).
    None: those trained on. Not with K targets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimParams:
    """Settings for one optimizer step, owned by the caller; None keeps what is configured."""

    lr: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    momentum: float | None = None
    """Of Muon alone."""
    max_norm: float | None = None
    """Gradient clip norm; `inf` measures and does not clip."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLoad:
    """How evenly a mixture's experts share the tokens: 1 is even, the number of experts the worst."""

    busiest_mean: float
    """Tokens of the busiest expert over the mean of all experts, averaged over the layers."""
    busiest_max: float
    """The same, in the layer where it is largest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """How full the micro-batches of one call were, over all data-parallel ranks."""

    num_micro_batches: int
    """Of each rank; all have equally many."""
    num_packed: int
    """Tokens that went through the model: a shared prompt's once, padding not."""
    num_padding: int
    """Tokens of padding that went through it too."""
    num_room: int
    """Tokens that the micro-batches could have held, by max_tokens_per_microbatch."""
    num_attended: int = 0
    """Tokens that the packed tokens attended to, all together, each to itself too; 0: nobody counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBackwardResult:
    """Of one `forward_backward` call, or one `forward`, over all ranks."""

    loss_sum: float
    """Sum of token losses, not yet divided."""
    denominator: float
    """What this call adds to the step's denominator; 0 when the loss asks for none."""
    num_samples: int
    num_tokens: int
    """Inputs of all samples, prompts included, padding not; a shared prompt counts for each."""
    num_valid_tokens: int
    """Tokens the loss was taken over; with K targets, targets."""
    advantage_mean: float
    advantage_std: float
    ratio_mean: float
    clipped_fraction: float
    entropy_mean: float
    """Nats a token."""
    logprob_diff_mean: float
    """Mean over valid tokens of |trainer logprob - generator logprob|, nats."""
    logprob_diff_max: float
    logprobs_identical: bool
    """Whether every valid token's two logprobs are the same bits."""
    loss_metrics: Mapping[str, float] = field(default_factory=dict)
    """What the loss itself reports, averaged over valid tokens."""
    expert_load: ExpertLoad | None = None
    """None for a model without experts, and of `forward`."""
    packing: Packing | None = None
    """None of a learner that does not pack."""
    logprobs: tuple[np.ndarray, ...] | None = field(default=None, compare=False)
    """[T] float32 nats for each sample that was asked for, entry t of token t, entry 0 is 0; [T, K] with K
    targets. Before the next optimizer step. None where nobody asked."""
    time_s: float

    @property
    def loss_mean(self) -> float:
        """The loss as optimised: the sum divided by the denominator it asked for."""
        return self.loss_sum / self.denominator if self.denominator else self.loss_sum


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimStepResult:
    grad_norm: float
    """Before clipping, after the division by the global denominator."""
    lr: float
    policy_version: int
    """Version of the weights after this step; each step adds 1."""
    time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxSum:
    """Checksum of the box of one tensor that a rank sent or received.

    Those of disjoint boxes add up, modulo 2**64, to that of the whole tensor (`rl/weights/sums.py`).
    """

    name: str
    dtype: str
    """As sent or held, such as "bfloat16"."""
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    value: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PushResult:
    policy_version: int
    num_bytes: int
    time_s: float
    sums: tuple[BoxSum, ...] = ()
    """Of what this rank sent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PullResult:
    policy_version: int
    time_s: float
    sums: tuple[BoxSum, ...] = ()
    """Of what this rank holds after the pull, in its own dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeResult:
    """Every generator has pulled a version, and was checked."""

    canary_diff: float | None = None
    """Mean difference between a generator's logprobs of a fixed text and the trainer's, in nats a token, of
    the generator where it is largest; None where nobody looked."""
    canary_s: float = 0.0
    """Seconds of it after the pulls, in which those logprobs were computed and compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishResult:
    """A push and all its pulls: every generator now serves this version."""

    policy_version: int
    push_s: float
    pull_s: float
    canary_diff: float | None = None
    canary_s: float = 0.0
    """Both as in `ServeResult`; `pull_s` is without."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopPosition:
    """Where a loop stands between two steps: what a checkpoint keeps of it."""

    step: int
    """Steps done."""
    num_problems: int
    """Training problems drawn until then, in the task's order."""
    outstanding: tuple[int, ...] = ()
    """Numbers of those whose rollouts were neither trained on nor dropped: they are drawn again, but for
    those that `rl.loop_state.LoopState` holds."""
    evaluated: bool = False
    """Whether no evaluation is due before the next step: it is written, or there was none to do."""
    num_records: int = 0
    """Lines of the run's metrics.jsonl until then."""
