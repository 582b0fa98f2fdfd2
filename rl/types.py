"""The values that controller and actors exchange.

Arrays are numpy arrays, which pickle small and carry no device. No field is filled in later.
Branches of a rollout (`rl.branches`) and results of a weight sync (`rl.weight_types`) have files of
their own and are imported from here.

Shape legend: T tokens of a sequence, C tokens of a completion, K targets of a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rl.branches import Branch as Branch
from rl.branches import BranchRole as BranchRole
from rl.branches import check_branches, find_main_branch, is_default, make_one_branch, split_rows
from rl.receipts import Receipt
from rl.utils.printing import describe_value
from rl.utils.sharing import ReadOnlyDict, Shareable, copy_data, freeze_arrays, restore_fields
from rl.weight_types import BoxSum as BoxSum
from rl.weight_types import PublishResult as PublishResult
from rl.weight_types import PullResult as PullResult

FinishReason = Literal["stop", "length", "abort"]
Role = Literal["system", "user", "assistant", "tool"]
EndReason = Literal["done", "turns", "tokens", "time", "failed"]
"""done: the environment ended the episode; turns, tokens, time: a limit was reached; failed: the
environment broke.
"""

RUN = ""
"""Model id of a run, which has one model."""
BASE = -1
"""Version of the weights that adapters stand beside. It is pushed when a generator lacks it, and
deleted when all have it."""
NO_METRICS: Mapping[str, float] = ReadOnlyDict()
NO_STATE: Mapping[str, Any] = ReadOnlyDict()
_ARRAYS = ("token_ids", "logprobs", "policy_versions")
"""Fields of a completion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Settings of sampling. Returned logprobs are those of the distribution sampled from.

    Example:
        SamplingParams(max_tokens=64, num_samples=8, temperature=1.0, stop_token_ids=(151645,))
    """

    max_tokens: int
    """Largest number of new tokens of a completion."""
    num_samples: int = 1
    """Completions per prompt."""
    temperature: float = 1.0
    """0 is greedy and for evaluation only, since its logprobs have no policy gradient."""
    top_p: float = 1.0
    """Nucleus sampling; 1 is off."""
    top_k: int = 0
    """Number of most likely tokens to sample from; 0 is off."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion; the stop token is part of the completion."""
    stop_texts: tuple[str, ...] = ()
    """Texts that end a completion, the text included. Needs an engine with a tokenizer;
    `rl.models.generate` has none."""
    seed: int | None = None
    """Seed of the whole call, from which each request derives its own. None: in a run one that no
    other call has, derived from the run's seed; else the engine's random state."""
    first_sample: int = 0
    """Number of each prompt's first completion, in a call that is a part of a larger one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A well-formed call of a tool."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """A message of a conversation, before any chat template."""

    role: Role
    content: str
    calls: tuple[ToolCall, ...] = ()
    """Tool calls of an assistant's message that a client sent as such, after its content. Replies
    of the policy keep their calls in the text, as the model wrote them."""


def read_messages(messages: Any, *, name: str = "messages") -> tuple[Message, ...]:
    """Return the messages of any iterable; raise ValueError if it is none."""
    if type(messages) is tuple:
        return messages

    # A string is iterable too, but its letters are no messages; a set has no order.
    hint = f"{name} must be a sequence of Message, such as [Message(role='user', content='...')]"
    if isinstance(messages, Message | str | bytes | Mapping | Set) or not isinstance(
        messages, Iterable
    ):
        raise ValueError(
            f"{name}={describe_value(messages)} is a {type(messages).__name__}: {hint}"
        )
    return tuple(messages)


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem(Shareable):
    """One instance of a task: a question, and what its answer is graded against.

    Each episode and each call of a reward function gets a private copy, so that changing `info`
    changes it for nobody else.
    """

    id: str
    """Identifier, unique within the task and the same in every run."""
    question: str
    """The user's first message, before any chat template."""
    answer: str
    """The reference answer; empty if the grader needs none."""
    demonstration: str | tuple[str, ...] = ""
    """A reply that solves the problem, or one reply for each turn; empty if the task has none."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """More data for environment and reward functions: plain values that pickle. Kept as a copy."""

    def __post_init__(self) -> None:
        if not isinstance(self.info, Mapping):
            raise ValueError(
                f"problem {self.id!r}: info={describe_value(self.info)} must be a mapping of names "
                "to values"
            )
        info = self.info if isinstance(self.info, dict) else dict(self.info)
        # A frozen class sets its fields as its own __init__ does.
        object.__setattr__(self, "info", copy_data(info))
        if isinstance(self.demonstration, list):
            object.__setattr__(self, "demonstration", tuple(self.demonstration))

    @property
    def demonstrations(self) -> tuple[str, ...]:
        replies = self.demonstration
        return replies if isinstance(replies, tuple) else (replies,) if replies else ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prompt:
    """A problem, rendered to tokens."""

    problem: Problem
    token_ids: np.ndarray
    """[T] int32."""

    def __post_init__(self) -> None:
        freeze_arrays(self, "token_ids")

    def __setstate__(self, state: list[Any]) -> None:
        restore_fields(self, state)
        self.__post_init__()  # Arrays of a pickle are writable.


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Completion:
    """The generator's reply to a prompt, token for token; never re-tokenized.

    Its arrays are read-only from the moment that it is part of a turn or of a reply.
    """

    token_ids: np.ndarray
    """[C] int32, the stop token included."""
    logprobs: np.ndarray
    """[C] float32, nats, of the distribution that was sampled from."""
    policy_versions: np.ndarray
    """[C] int32, version of the weights that generated each token."""
    finish_reason: FinishReason
    receipt: Receipt | None = field(default=None, compare=False)
    """Seal of the generator's client; None for a completion of another source."""

    @property
    def is_cut_off(self) -> bool:
        """True if the reply ended at the limit of tokens, so that its end is missing."""
        return self.finish_reason == "length"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Reply:
    """The model's reply of a turn, for the environment."""

    text: str
    """The completion decoded, as in `Turn`."""
    completion: Completion

    def __post_init__(self) -> None:
        # An environment may be anybody's code, and its reply shares the arrays with the rollout.
        freeze_arrays(self.completion, *_ARRAYS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """An environment's answer to a reply."""

    messages: tuple[Message, ...] = ()
    """The next messages to the model; none ends the episode. Any iterable of messages is kept as a
    tuple.
    """
    reward: float = 0.0
    """Reward of this reply alone, added to the rubric's."""
    metrics: Mapping[str, float] = field(default_factory=lambda: NO_METRICS)
    """Numbers to report, such as calls of a tool; they are summed over the turns of a rollout. Kept
    read-only.
    """

    def __post_init__(self) -> None:
        # Each rollout makes several of these objects: what is there already is not copied.
        if type(self.messages) is not tuple:
            object.__setattr__(self, "messages", read_messages(self.messages))
        if type(self.metrics) is not ReadOnlyDict:
            if not isinstance(self.metrics, Mapping):
                raise ValueError(
                    f"metrics={describe_value(self.metrics)} must be a mapping of names to numbers"
                )
            object.__setattr__(
                self, "metrics", ReadOnlyDict(self.metrics) if self.metrics else NO_METRICS
            )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Turn:
    """Messages to the model and its reply, token for token."""

    messages: tuple[Message, ...]
    """Messages since the last reply."""
    prompt_ids: np.ndarray
    """[T] int32, the messages as tokens, with everything that the chat template puts between the
    last reply and this reply; in the first turn of a conversation the whole prompt."""
    completion: Completion
    text: str
    """The completion decoded, without the tokens that end or begin a turn. If the prompt ended in
    an opened thought, the text begins with its mark."""
    observation: Observation = field(default_factory=Observation)
    """The environment's answer to the reply."""

    def __post_init__(self) -> None:
        if type(self.messages) is not tuple:
            object.__setattr__(self, "messages", read_messages(self.messages))
        freeze_arrays(self, "prompt_ids")
        freeze_arrays(self.completion, *_ARRAYS)

    def __setstate__(self, state: list[Any]) -> None:
        restore_fields(self, state)
        self.__post_init__()  # Arrays of a pickle are writable.


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rollout:
    """One finished attempt at a problem: an episode of at least one turn.

    Its tokens are those of its turns, exactly as the generator read and produced them. A linear
    episode, whose turns are one sequence, has one branch. Raises ValueError if branches are not
    paths of one forest that has every turn.
    """

    prompt: Prompt
    sample: int
    """Number of the rollout in its group, 0 to G - 1."""
    turns: tuple[Turn, ...]
    """All turns, each once, in the order in which they were asked."""
    end: EndReason = "done"
    """Reason why there are no more turns."""
    failure: str | None = None
    """Reason why the environment failed (an error, a timeout); a failed rollout is not trained on.
    """
    branches: tuple[Branch, ...] = ()
    """Conversations of the episode; given as () it becomes one branch of all turns."""
    state: Mapping[str, Any] = field(default_factory=lambda: NO_STATE)
    """Plain values that the episode left for reward functions, such as an agent's exit status,
    output and files. Kept as a read-only copy."""

    def __post_init__(self) -> None:
        if type(self.turns) is not tuple:
            object.__setattr__(self, "turns", tuple(self.turns))
        branches = self.branches
        # `replace` with other turns passes on the default of the turns before.
        if not branches or is_default(branches):
            object.__setattr__(self, "branches", make_one_branch(len(self.turns)))
        else:
            check_branches(branches, num_turns=len(self.turns))
            object.__setattr__(self, "branches", tuple(branches))
        if type(self.state) is not ReadOnlyDict:
            if not isinstance(self.state, Mapping):
                raise ValueError(
                    f"state={describe_value(self.state)} must be a mapping of names to values"
                )
            state = ReadOnlyDict(copy_data(dict(self.state))) if self.state else NO_STATE
            object.__setattr__(self, "state", state)

    def __setstate__(self, state: list[Any]) -> None:
        restore_fields(self, state)
        # A pickle has a copy of the default, which would no longer be told from given branches.
        if self.branches == make_one_branch(len(self.turns)):
            object.__setattr__(self, "branches", make_one_branch(len(self.turns)))

    @property
    def question(self) -> str:
        """The problem's question."""
        return self.prompt.problem.question

    @property
    def answer(self) -> str:
        """The problem's reference answer."""
        return self.prompt.problem.answer

    @property
    def info(self) -> Mapping[str, Any]:
        """The problem's further data, such as the columns of a file."""
        return self.prompt.problem.info

    @property
    def main_turns(self) -> tuple[Turn, ...]:
        """The conversation that ended last, of main branches if there are any."""
        if len(self.branches) == 1:
            return self.turns
        return tuple(self.turns[i] for i in find_main_branch(self.branches).turns)

    @property
    def trained_turns(self) -> tuple[Turn, ...]:
        """Turns of a trained branch, each once: the [C] tokens of advantages are theirs."""
        if is_default(self.branches):
            return self.turns
        return tuple(self.turns[i] for i in self.trained_indices)

    @property
    def trained_indices(self) -> list[int]:
        """Indices of `trained_turns`, in order."""
        trained = [branch.turns for branch in self.branches if branch.is_trained]
        return sorted(set[int]().union(*trained))

    @property
    def last_turn(self) -> Turn:
        """The last turn of `main_turns`."""
        return self.main_turns[-1]

    @property
    def completion(self) -> Completion:
        """The last turn's completion."""
        return self.last_turn.completion

    @property
    def text(self) -> str:
        """The last reply."""
        return self.last_turn.text

    @property
    def is_truncated(self) -> bool:
        """True if the last reply was cut off, or the episode ran out of tokens."""
        return self.end == "tokens" or self.completion.is_cut_off

    @property
    def num_tokens(self) -> int:
        """Tokens of `trained_turns`, prompts included, each counted once."""
        num = self.num_completion_tokens
        for turn in self.trained_turns:
            num += len(turn.prompt_ids)
        return num

    @property
    def num_completion_tokens(self) -> int:
        """Tokens that the model produced in `trained_turns`."""
        # Several times for each sample of a step: a loop is twice as fast as a sum.
        num = 0
        for turn in self.trained_turns:
            num += len(turn.completion.token_ids)
        return num

    @property
    def row_tokens(self) -> list[int]:
        """Tokens of each row, prompts included."""
        lengths = []
        for row in split_rows(self.branches):
            turns = [self.turns[i] for i in row.turns]
            lengths.append(sum(len(t.prompt_ids) + len(t.completion.token_ids) for t in turns))
        return lengths

    @property
    def messages(self) -> tuple[Message, ...]:
        """The whole conversation, with the environment's answer to the last reply."""
        messages: list[Message] = []
        for turn in self.main_turns:
            messages += turn.messages
            messages.append(Message(role="assistant", content=turn.text))
        # A turn's observation is the first of the next turn's messages; only the last has no turn.
        return (*messages, *self.last_turn.observation.messages)


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A rubric's result for a rollout."""

    reward: float
    """Reward of the rubric, always finite; training optimises the sum of `reward` and `overlong`.
    """
    correct: bool
    """True if the answer is right, regardless of reward shaping."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Unweighted value of each reward function, by name."""
    failure: str | None = None
    """Reason why scoring failed (an error, a timeout, not finite); a failed rollout is not trained
    on.
    """
    unparsed: tuple[str, ...] = ()
    """Names of the reward functions that found no answer in the reply."""
    overlong: float = 0.0
    """Penalty for the length of a training rollout (loop.overlong), at most 0. It is not part of
    `reward`, so a group of correct replies counts as one of equal rewards, however long the replies
    are."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingSample:
    """A sequence with the loss's inputs for each of its tokens.

    Entry t of every array belongs to token t as a *target*. Token 0 is never a target, so `mask[0]`
    is False. With `targets` of K columns, mask, advantages and all logprobs are [T, K].

    Example (a prompt of two tokens, a reply of three with an advantage of 0.5):
        token_ids           [12,  40,  7,    9,    2   ]
        mask                [0,   0,   1,    1,    1   ]
        generator_logprobs  [nan, nan, -0.1, -1.2, -0.3]
        advantages          [0,   0,   0.5,  0.5,  0.5 ]
        policy_versions     [-1,  -1,  3,    3,    3   ]
    """

    token_ids: np.ndarray
    """[T] int32, prompt and completion."""
    mask: np.ndarray
    """[T] bool, True where the token is trained on."""
    generator_logprobs: np.ndarray
    """[T] float32, nats, as recorded by the generator; NaN for tokens that the generator did not
    sample.
    """
    advantages: np.ndarray
    """[T] float32."""
    policy_versions: np.ndarray
    """[T] int32; -1 for tokens that the generator did not sample."""
    temperature: float = 1.0
    """Temperature of the distribution that was sampled from; the trainer divides its logits by it.
    """
    reference_logprobs: np.ndarray | None = None
    """[T] float32, nats, of a reference policy. None: the trainer computes them if its own is
    enabled.
    """
    proximal_logprobs: np.ndarray | None = None
    """[T] float32, nats, of the trainer's policy before its first optimizer step on this data, for
    a loss with an importance correction. None: the policy's logprobs in the forward pass."""
    targets: np.ndarray | None = None
    """[T] or [T, K] int64, targets that replace token t itself; entry 0 is ignored."""
    ratio_mask: np.ndarray | None = None
    """[T] bool, tokens over which a loss with sequence ratios (GSPO) takes the mean. None: the
    trained tokens. Not allowed with K targets."""
    episode: int | None = None
    """Number of the episode that the sample is a row of, unique within a call of the trainer. The
    rows of an episode are one sequence for the loss. None: an episode of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemsFingerprint:
    """Digests of a task's problems (`rl.tasks.fingerprint`)."""

    num: int | None
    """Number of training problems; None for an endless task."""
    order: str
    """Description of the order in which they are trained on."""
    block: int
    """Problems of one digest."""
    digests: tuple[str, ...]
    """Digests of the training problems, or of the first ones of an endless task."""
    eval_sets: Mapping[str, str] = field(default_factory=dict)
    """Size and digest of each evaluation set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopPosition:
    """Position of a loop between two steps, as a checkpoint stores it."""

    step: int
    """Number of completed steps."""
    num_problems: int
    """Number of training problems drawn so far, in the task's order."""
    outstanding: tuple[int, ...] = ()
    """Numbers of the drawn problems that no batch has taken, and that are generated again."""
    evaluated: bool = False
    """True if no evaluation is due before the next step."""
    num_records: int = 0
    """Number of lines of the run's metrics.jsonl."""
    num_empty_steps: int = 0
    """Consecutive steps without a policy gradient."""
    problems: ProblemsFingerprint | None = field(default=None, compare=False)
    """Fingerprint of the task's problems; None if unknown."""
