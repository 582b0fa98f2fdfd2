"""Model-free fakes of the protocols that record their calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np

from losses.types import Loss
from rl.observability.metrics import Record, reduce_metric
from rl.protocols import TokenGenerator
from rl.rollouts.environment import Environments, SingleTurn
from rl.rollouts.episode import Episodes
from rl.rollouts.renderer import Renderer, RendererConfig, make_renderer, render_prompt
from rl.rollouts.rubric import Rubric
from rl.trainer_types import (
    ForwardBackwardResult,
    OptimParams,
    OptimStepResult,
    TrainedTokens,
)
from rl.types import (
    Completion,
    FinishReason,
    LoopPosition,
    Message,
    Problem,
    Prompt,
    PullResult,
    Rollout,
    SamplingParams,
    Score,
    TrainingSample,
    Turn,
)
from tests.support.virtual_time import now_s


class ByteTokenizer:
    """Byte tokenizer for renderers; token 0 ends a turn."""

    eos_token_id = 0
    eos_token = "\0"
    name_or_path = "the test"
    chat_template = "in Python"

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        """Return messages to the model in angle brackets, and replies of the model unchanged."""
        return "".join(
            f"{m['content']}\0" if m["role"] == "assistant" else f"<{m['content']}>"
            for m in messages
        )

    def get_added_vocab(self) -> dict[str, int]:
        return {self.eos_token: self.eos_token_id}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [chr(token_id) for token_id in ids]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int], **options: bool) -> str:
        return bytes(t for t in token_ids if t != 0).decode()


RENDERER = make_renderer(
    RendererConfig(), tokenizer=ByteTokenizer(), stop_token_ids=(ByteTokenizer.eos_token_id,)
)


def prompt_of(problem: Problem, *, renderer: Renderer = RENDERER, max_tokens: int = 64) -> Prompt:
    """Return the prompt of a problem's question."""
    messages = [Message(role="user", content=problem.question)]
    return render_prompt(problem, messages, renderer=renderer, max_tokens=max_tokens)


@dataclass(kw_only=True)
class FakePolicy:
    """Generator, trainer and publisher of one scripted policy, with a list of all calls.

    Step n has a gradient norm of n. A completion's first token has the version served when it
    starts, other tokens the version served when it ends.
    """

    reply: Callable[[str, int], str]
    """Function from a prompt's text and the sample number to the reply."""
    finish_reason: FinishReason = "stop"
    logprob_diff: float = 0.0
    version: int = 0
    served_version: int = 0
    calls: list[str] = field(default_factory=list)
    trained: list[list[TrainingSample]] = field(default_factory=list)
    stepped: list[OptimParams | None] = field(default_factory=list)
    num_empty_updates: int = 0
    """Calls of `optim_step` that allow a step without trained tokens."""
    asked: list[bool | Sequence[int]] = field(default_factory=list)
    """`return_logprobs` of each call of `forward_backward`."""
    sampled: list[SamplingParams] = field(default_factory=list)
    sessions: list[str | None] = field(default_factory=list)
    """Session of each call of `generate`."""
    saved: list[tuple[LoopPosition | None, bool, bool]] = field(default_factory=list)
    """Position, `model_only` and `wait` of each save."""
    generate_s: Callable[[str], float] = lambda prompt: 0.0
    """Seconds of a prompt's completions."""
    train_s: float = 0.0
    push_s: float = 0.0
    serve_s: float = 0.0
    events: list[tuple[float, str]] = field(default_factory=list)
    """Time and name of each event."""
    staleness_of_tokens: list[int] = field(default_factory=list)
    """Staleness of every trained token in versions, measured independently of the loop."""
    num_running: int = 0
    failing: tuple[str, int, Exception] | None = None
    """Call, the version at which it fails, and the error that it raises."""
    num_pushing: int = 0

    async def generate(
        self,
        prompts: Sequence[np.ndarray],
        *,
        sampling: SamplingParams,
        session: str | None = None,
        begun: Sequence[Sequence[Completion]] | None = None,
    ) -> list[list[Completion]]:
        started_at = self.served_version
        texts = [bytes(p.tolist()).decode() for p in prompts]
        self.num_running += 1
        try:
            await asyncio.sleep(max(map(self.generate_s, texts)))
        finally:
            self.num_running -= 1
        self.calls.append("generate")
        self.sampled.append(sampling)
        self.sessions.append(session)
        made = [
            [
                completion(
                    self.reply(text, i), self.served_version, finish_reason=self.finish_reason
                )
                for i in range(sampling.num_samples)
            ]
            for text in texts
        ]
        if begun is None:
            for c in chain(*made):
                c.policy_versions[0] = started_at
            return made
        return [
            [continued(*pair) for pair in zip(*groups, strict=True)]
            for groups in zip(begun, made, strict=True)
        ]

    async def abort(self) -> int:
        return 0  # completions never wait

    async def forward_backward(
        self,
        samples: Sequence[TrainingSample],
        *,
        loss: Loss | None = None,
        return_logprobs: bool | Sequence[int] = False,
        return_trained: bool | Sequence[int] = False,
    ) -> ForwardBackwardResult:
        """Return a result whose logprobs are -1 - `logprob_diff`."""
        self.events.append((now_s(), "forward_backward"))
        for sample in samples:
            self.staleness_of_tokens += (
                self.version - sample.policy_versions[sample.mask]
            ).tolist()
        self._fail("forward_backward", self.version)
        await asyncio.sleep(self.train_s)
        self.calls.append("forward_backward")
        self.trained.append(list(samples))
        self.asked.append(return_trained)
        places = range(len(samples)) if return_trained is True else return_trained or ()
        num_valid = int(sum(s.mask.sum() for s in samples))
        return ForwardBackwardResult(
            loss_sum=-1.0 * num_valid,
            denominator=num_valid,
            num_samples=len(samples),
            num_tokens=sum(len(s.token_ids) for s in samples),
            num_valid_tokens=num_valid,
            ratio_mean=1.0,
            clipped_fraction=0.0,
            entropy_mean=0.5,
            logprob_diff_mean=self.logprob_diff,
            logprob_diff_max=self.logprob_diff,
            logprobs_identical=True,
            num_trained_tokens=num_valid,
            advantage_sum=float(sum(s.advantages[s.mask].sum() for s in samples)),
            trained=tuple(self.read_tokens(samples[place]) for place in places) or None,
        )

    def read_tokens(self, sample: TrainingSample) -> TrainedTokens:
        """Return what the loss has read of a sample."""
        return TrainedTokens(
            logprobs=np.where(sample.mask, self.logprobs_of(sample), np.nan).astype(np.float32),
            advantages=np.where(sample.mask, sample.advantages, np.nan).astype(np.float32),
        )

    def logprobs_of(self, sample: TrainingSample) -> np.ndarray:
        """Return the trainer's logprobs of a sample, [T] float32."""
        return np.full(len(sample.token_ids), -1.0 - self.logprob_diff, dtype=np.float32)

    def _fail(self, call: str, version: int) -> None:
        if self.failing is not None and self.failing[:2] == (call, version):
            raise self.failing[2]

    async def optim_step(
        self, params: OptimParams | None = None, *, allow_empty: bool = False
    ) -> OptimStepResult:
        self._fail("optim_step", self.version)
        assert self.num_pushing == 0, "the weights change while they are pushed"
        self.calls.append("optim_step")
        self.num_empty_updates += allow_empty
        self.stepped.append(params)
        self.events.append((now_s(), "optim_step"))
        self.version += 1
        return OptimStepResult(grad_norm=self.version, lr=1e-3, policy_version=self.version)

    async def drop_gradient(self) -> None:
        self.calls.append("drop_gradient")

    async def compute_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        self.calls.append("compute_logprobs")
        return [s.token_ids.astype(np.float32) + 1 for s in samples]

    async def compute_reference_logprobs(
        self, samples: Sequence[TrainingSample]
    ) -> list[np.ndarray]:
        self.calls.append("compute_reference_logprobs")
        return [np.full(len(s.token_ids), -2.0, dtype=np.float32) for s in samples]

    async def save_checkpoint(
        self,
        folder: str,
        *,
        position: LoopPosition | None = None,
        model_only: bool = False,
        wait: bool = True,
    ) -> None:
        self.calls.append(f"save {folder}")
        self.saved.append((position, model_only, wait))

    async def load_checkpoint(self, folder: str, *, model_only: bool = False) -> int:
        return self.version

    async def push(self) -> int:
        self._fail("push", self.version)
        self.calls.append("push")
        self.events.append((now_s(), "push"))
        self.num_pushing += 1
        version = self.version
        await asyncio.sleep(self.push_s)
        self.num_pushing -= 1
        return version

    async def pull(self, policy_version: int) -> PullResult:
        self._fail("pull", policy_version)
        await asyncio.sleep(self.serve_s)
        self.calls.append("pull")
        self.served_version = policy_version
        return PullResult()


@dataclass(kw_only=True)
class SimulatedPolicy(FakePolicy):
    """A `FakePolicy` whose calls take virtual time."""

    generate_s: Callable[[str], float] = lambda prompt: 1.0
    train_s: float = 1.0
    push_s: float = 0.1
    serve_s: float = 0.1


@dataclass(kw_only=True)
class RubricRewarder:
    """Rewarder that scores in this process."""

    rubric: Rubric

    async def score(
        self, groups: Sequence[Sequence[Rollout]], *, alone: bool = False
    ) -> list[list[Score]]:
        return [await self.rubric.score_group(group, alone=alone) for group in groups]


def rollout_of(
    prompt: Prompt, made: Completion, *, sample: int = 0, text: str | None = None
) -> Rollout:
    """Return a rollout of one turn; the text defaults to the completion's bytes."""
    if text is None:
        text = bytes(t for t in made.token_ids.tolist() if t).decode()
    turn = Turn(messages=(), prompt_ids=prompt.token_ids, completion=made, text=text)
    return Rollout(prompt=prompt, sample=sample, turns=(turn,))


def episodes_of(generator: TokenGenerator, *, renderer: Renderer, **settings: Any) -> Episodes:
    """Return episodes of a single turn and at most 96 tokens, unless `settings` differ."""
    given: dict[str, Any] = {"environments": Environments(make=SingleTurn.of), "max_tokens": 96}
    return Episodes(generator=generator, renderer=renderer, **given | settings)


class ListSink:
    """Sink that keeps the numbers of each record."""

    def __init__(self) -> None:
        self.records: list[dict[str, float | None]] = []

    @property
    def num_records(self) -> int:
        return len(self.records)

    async def flush_to_disk(self) -> None:
        """Do nothing: records are kept in memory."""

    def write(self, record: Record) -> None:
        self.records.append({name: reduce_metric(metric) for name, metric in record.items()})


def completion_of(
    token_ids: Sequence[int] | np.ndarray,
    finish_reason: str = "stop",
    *,
    version: int = 0,
    logprob: float = -1.0,
) -> Completion:
    """Return a completion whose tokens all have the same version and logprob."""
    ids = np.asarray(token_ids, dtype=np.int32)
    return Completion(
        token_ids=ids,
        logprobs=np.full(len(ids), logprob, dtype=np.float32),
        policy_versions=np.full(len(ids), version, dtype=np.int32),
        finish_reason=finish_reason,  # type: ignore[arg-type]
    )


def completion(text: str, version: int = 0, *, finish_reason: str = "stop") -> Completion:
    """Return a completion of the text's bytes and the end token."""
    return completion_of([*text.encode(), 0], finish_reason, version=version)


def continued(old: Completion, new: Completion) -> Completion:
    """Return `old`, extended by the tokens of `new` if `old` was aborted."""
    if old.finish_reason != "abort":
        return old
    num_old = len(old.token_ids)
    return replace(
        new,
        token_ids=np.concatenate([old.token_ids, new.token_ids[num_old:]]),
        logprobs=np.concatenate([old.logprobs, new.logprobs[num_old:]]),
        policy_versions=np.concatenate([old.policy_versions, new.policy_versions[num_old:]]),
    )
