"""The roles that a loop drives, implemented by actors, in-process backends and fakes.

An algorithm is four calls: generate, forward_backward, optim_step, publish. Scoring is a fifth,
which any function could do in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from losses.types import Loss
from rl.trainer_types import ForwardBackwardResult, OptimParams, OptimStepResult
from rl.types import (
    Completion,
    LoopPosition,
    Message,
    Observation,
    PullResult,
    Reply,
    Rollout,
    SamplingParams,
    Score,
    TrainingSample,
)


class TokenGenerator(Protocol):
    """Source of completions, sampled from the weights that were served last."""

    # Token ids in and out, not text: the trainer gets the very tokens that were sampled.
    async def generate(
        self, prompts: Sequence[np.ndarray], *, sampling: SamplingParams, session: str | None = None
    ) -> list[list[Completion]]:
        """Return `sampling.num_samples` completions for each prompt, in order.

        Prompts are [T] int32 token ids. Calls may overlap. Cancelling a call ends its requests.
        Calls of one `session` may be routed to the generator whose cache has their keys and values.
        """
        ...


class ResumableGenerator(TokenGenerator, Protocol):
    """A generator whose completions can be interrupted, and continued with newer weights."""

    async def generate(
        self,
        prompts: Sequence[np.ndarray],
        *,
        sampling: SamplingParams,
        session: str | None = None,
        begun: Sequence[Sequence[Completion]] | None = None,
    ) -> list[list[Completion]]:
        """Generate completions, or continue those of an interrupted call.

        Args:
            begun: the result of an earlier call with the same prompts and `sampling`. Completions
                with finish reason "abort" are continued, others are returned unchanged.
        """
        ...

    async def abort(self) -> int:
        """Interrupt all running calls of `generate`; return the number of completions.

        The calls return what they have. Incomplete completions have finish reason "abort".
        """
        ...


class LogprobSource(Protocol):
    """The calls of a trainer that samples need before they are trained on."""

    async def compute_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]: ...

    async def compute_reference_logprobs(
        self, samples: Sequence[TrainingSample]
    ) -> list[np.ndarray]: ...


class Trainer(Protocol):
    """One policy in training; `rl.engine_client.EngineClient` has further calls.

    Example:
        >>> result = await trainer.forward_backward(samples)
        >>> step = await trainer.optim_step()
        >>> (step.policy_version, step.grad_norm)
        (1, 0.42)
    """

    # Sums, not means: the gradient of a step does not depend on how it is cut into calls.
    async def forward_backward(
        self,
        samples: Sequence[TrainingSample],
        *,
        loss: Loss | None = None,
        return_logprobs: bool | Sequence[int] = False,
        return_trained: bool | Sequence[int] = False,
    ) -> ForwardBackwardResult:
        """Add the gradient of the summed loss; k calls on parts equal one call.

        Args:
            loss: None takes the configured loss.
            return_logprobs: True to return the logprobs of all samples; or the indices of some, in
                this order.
            return_trained: the same for what the loss has read of the samples' tokens.
        """
        ...

    async def optim_step(
        self, params: OptimParams | None = None, *, allow_empty: bool = False
    ) -> OptimStepResult:
        """Divide by the accumulated denominator, clip, step, clear the gradient.

        Where no token was trained on, that is an error, or with `allow_empty` a step with a
        gradient of zero.
        """
        ...

    async def drop_gradient(self) -> None:
        """Clear the gradient accumulated since the last step."""
        ...

    async def compute_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """Return the logprobs of each sample, [T] float32 nats.

        Entry t belongs to token t; entry 0 is 0.
        """
        ...

    async def compute_reference_logprobs(
        self, samples: Sequence[TrainingSample]
    ) -> list[np.ndarray]:
        """Return logprobs under the frozen reference policy; raise if reference.enable is False."""
        ...

    async def save_checkpoint(
        self,
        folder: str,
        *,
        position: LoopPosition | None = None,
        model_only: bool = False,
        wait: bool = True,
    ) -> None:
        """Save a checkpoint folder atomically, with the loop's `position`.

        With `wait` False the call may return before the folder exists; the next call raises a later
        error.
        """
        ...

    async def load_checkpoint(self, folder: str, *, model_only: bool = False) -> int:
        """Load a checkpoint or a Hugging Face folder; return the policy version."""
        ...


class Publisher(Protocol):
    """Weights on their way to the generators, in two parts: push and pull.

    The trainer may compute meanwhile, and step after the push.
    """

    # Two calls, so that a loop can begin its next step while the generators pull.
    async def push(self) -> int:
        """Copy the trainer's weights to the weight store and return their policy version.

        The request to the trainer is sent before the call first waits, and so before any later
        request.
        """
        ...

    async def pull(self, policy_version: int) -> PullResult:
        """Let all generators pull this version; return when all of them serve it."""
        ...


class Rewarder(Protocol):
    """Judge of rollouts."""

    async def score(
        self, groups: Sequence[Sequence[Rollout]], *, alone: bool = False
    ) -> list[list[Score]]:
        """Return a score for each rollout, in order; that of a failed rollout has its failure.

        Args:
            groups: rollouts by problem; reward functions of a whole group receive them together.
            alone: score every rollout by itself, like the greedy reply of an evaluation; reward
                functions that compare rollouts are left out.
        """
        ...


class Environment(Protocol):
    """One episode of a problem, used once.

    An environment works with messages and never with tokens. `step` and `close` of all environments
    of a run are called in one event loop, in a thread beside the controller's, from the checks
    before the start to the last evaluation. So a `step` may create what belongs to an event loop (a
    session, a semaphore) and share it with other environments of the task. `opening` may be called
    in any event loop.

    Two optional attributes: `runs_inline = True` promises that the environment never blocks and
    shares nothing that belongs to an event loop; it is then called in the controller's loop,
    without a change of threads. `single_turn = True` promises that it never answers a reply with
    messages; otherwise the run's renderer must be able to continue after a reply.
    """

    def opening(self) -> Sequence[Message]:
        """Return the first messages, the same in every episode of a problem; must be fast."""
        ...

    async def step(self, reply: Reply) -> Observation:
        """Answer a reply; slow code has to await, or run in a thread or process.

        Called until an observation has no messages, or a limit of the run is reached. An error
        makes the rollout a failed one: it is logged, counted and not trained on.
        """
        ...

    async def close(self) -> None:
        """Release the episode's resources; called exactly once."""
        ...
