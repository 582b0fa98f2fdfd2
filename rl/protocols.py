"""The seams: what the loops drive. Actors implement these, and so do in-process fakes.

The whole of an algorithm is four calls: sample, forward_backward, optim_step, publish
weights. Scoring is a fifth that any function could do in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from losses.types import Loss
from rl.types import (
    Completion,
    ForwardBackwardResult,
    LoopPosition,
    Message,
    Observation,
    OptimParams,
    OptimStepResult,
    Reply,
    Rollout,
    SamplingParams,
    Score,
    ServeResult,
    TrainingSample,
)


class Sampler(Protocol):
    async def generate(
        self, prompts: Sequence[np.ndarray], *, sampling: SamplingParams, session: str | None = None
    ) -> list[list[Completion]]:
        """Completions of each prompt ([T] int32 token ids), `sampling.num_samples` each, in order.

        Calls overlap; one that is cancelled ends its requests. Calls of one `session` may be kept
        together, on the sampler that has their keys and values.
        """
        ...


class ResumableSampler(Sampler, Protocol):
    """For loops of one's own that end long completions at an update and go on with newer weights."""

    async def generate(
        self,
        prompts: Sequence[np.ndarray],
        *,
        sampling: SamplingParams,
        session: str | None = None,
        begun: Sequence[Sequence[Completion]] | None = None,
    ) -> list[list[Completion]]:
        """As `Sampler.generate`; with `begun`, an earlier answer to the same prompts and `sampling`, its
        completions with finish reason "abort" go on where they were ended, and others are passed through.
        """
        ...

    async def abort(self) -> int:
        """End what is under way: the calls of `generate` that wait return what they have, with finish reason
        "abort" where that is not all. Returns how many completions it ended.
        """
        ...


class Learner(Protocol):
    async def forward_backward(
        self,
        samples: Sequence[TrainingSample],
        *,
        loss: Loss | None = None,
        return_logprobs: bool | Sequence[int] = False,
    ) -> ForwardBackwardResult:
        """Add the gradient of the summed loss over `samples`; k calls on parts equal one call.

        Args:
            loss: None takes the configured one.
            return_logprobs: with the logprobs of all samples, or of those at these places, in this order.
        """
        ...

    async def optim_step(self, params: OptimParams | None = None) -> OptimStepResult:
        """Divide by the accumulated denominator, clip, step, clear the gradient."""
        ...

    async def drop_gradient(self) -> None:
        """Forget what was accumulated since the last step."""
        ...

    async def compute_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """[T] float32 nats for each sample, entry t of token t; entry 0 is 0."""
        ...

    async def compute_reference_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """As `compute_logprobs`, of the frozen reference policy; an error where reference.enable is False."""
        ...

    async def save_checkpoint(
        self,
        folder: str,
        *,
        position: LoopPosition | None = None,
        model_only: bool = False,
        wait: bool = True,
        attachments: Mapping[str, bytes] | None = None,
    ) -> None:
        """Let a folder appear, whole, with the loop's `position` and further files by name in it.

        `wait` False allows it to appear later; what goes wrong then is raised by the next call.
        """
        ...

    async def load_checkpoint(self, folder: str, *, model_only: bool = False) -> int:
        """Load a folder of `save_checkpoint`, or a Hugging Face one; returns the policy version."""
        ...


class WeightPublisher(Protocol):
    """Publishing is a push and a serve; the learner may compute during both, and step after the push."""

    async def push(self) -> int:
        """Copy the learner's weights to where samplers find them; returns their policy version.

        All that this asks of the learner has been sent before it waits for anything.
        """
        ...

    async def serve(self, policy_version: int) -> ServeResult:
        """Let every sampler draw from this version; returns when all do."""
        ...


class Scorer(Protocol):
    async def score(self, groups: Sequence[Sequence[Rollout]], *, alone: bool = False) -> list[list[Score]]:
        """A score for each rollout, in order. The rollouts of a group are of one problem: functions of a
        whole group are given them together.

        `alone`: each stands for itself, as the greedy reply to a problem of an evaluation; functions that
        compare rollouts are left out of the scores.
        """
        ...


class Environment(Protocol):
    """One episode of a problem, used once.

    It says what the model is told; it never sees nor makes tokens. `step` and `close` are called in an event
    loop that all environments of a run share, in a thread beside the controller's: from the checks before the
    start, over the warm-up, to the last evaluation. So a `step` may make what belongs to an event loop (a
    session, a semaphore), and leave it to the task for all other environments. Only where code of one blocks
    that loop, later environments get another. In which loop an environment is made and opens is not said.

    Two attributes may say more. `runs_inline = True`: it never blocks, keeps nothing that belongs to an event
    loop beyond its own episode, and is called in whatever loop runs, which is the controller's in a run,
    without the way between the threads. `single_turn = True`: it never answers a reply with messages; of any
    other, several turns are expected, and the run's renderer must be able to go on after a reply.
    """

    def opening(self) -> Sequence[Message]:
        """What the model is told first: the same for every episode of a problem, and quickly known."""
        ...

    async def step(self, reply: Reply) -> Observation:
        """Answer a reply. Whatever takes long must await, or run in a thread or process of its own.

        Called until an observation has no messages, or a limit of the run is met. What it raises is a failed
        rollout: logged, counted, not trained on.
        """
        ...

    async def close(self) -> None:
        """Give back what the episode holds; called once, however it ended."""
        ...
