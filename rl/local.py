"""Learner, sampler and publisher in this process, on one device: no actors, no engine but PyTorch's.

For notebooks, examples and tests. It is the same training engine, and the same model definition sampled by
`rl.models.generate`; weights are published as a copy, so that what samples is a version and no half step.

    async with LocalBackend(config, spec=..., hf_assets_path=...) as local:
        await local.serve(await local.push())
        groups = await local.generate(prompts, sampling=...)
        await local.forward_backward(samples)
        await local.optim_step()

docs/local.md says what it is not.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from losses.types import Loss
from rl.distributed.process_group import World
from rl.distributed.shards import whole_tensor
from rl.models.batch_invariant.model import make_batch_invariant
from rl.models.buffers import persistent_buffers
from rl.models.generate import generate
from rl.models.qwen3.model import Qwen3
from rl.models.spec import ModelSpec
from rl.observability.activity import doing
from rl.protocols import Scorer
from rl.rollouts.rubric import Rubric
from rl.training.config import Dtype
from rl.training.engine import TrainingEngine
from rl.types import (
    Completion,
    ForwardBackwardResult,
    LoopPosition,
    OptimParams,
    OptimStepResult,
    Rollout,
    SamplingParams,
    Score,
    ServeResult,
    TrainingSample,
)

ResultT = TypeVar("ResultT")


class LocalBackend:
    """A `Learner`, a `Sampler` and a `WeightPublisher`.

    The learner's calls run one after another in a thread, the sampler's in another, so that a loop may let
    them overlap. A call that is cancelled (by `asyncio.timeout`, say) while it waits for its turn is never
    made. One that is cancelled later is over for who called: a `generate` ends at its next token, a call of
    the learner does what it was to do, and the next one waits for that.
    """

    def __init__(
        self,
        config: TrainingEngine.Config,
        *,
        spec: ModelSpec,
        hf_assets_path: str | None,
        device: torch.device | str | None = None,
        failure_folder: str | None = None,
    ) -> None:
        """Arguments are those of `TrainingEngine`: `hf_assets_path` None draws a random model.

        Raises:
            ValueError: as `TrainingEngine` does; or this process is one of several.
        """
        world = World.from_env()
        if world.size > 1:
            raise ValueError(
                f"WORLD_SIZE={world.size}: a local backend is one process alone; layouts of several are for "
                "the actors (python -m rl.train)"
            )
        self.engine: TrainingEngine = config.build(
            model_spec=spec,
            hf_assets_path=hf_assets_path,
            device=device,
            world=world,
            failure_folder=failure_folder,
        )
        self._learner, self._sampler = _Turns("learner"), _Turns("sampler")
        self._pushed: dict[int, dict[str, Tensor]] = {}
        """In the order in which they were pushed."""
        self._served_version: int | None = None
        try:
            self._model = self._make_model()
        except BaseException:
            self.close()
            raise

    def _make_model(self) -> Qwen3:
        """What is sampled from, without weights yet, computing as the learner's forward does."""
        spec, device = self.engine.policy.spec, self.engine.device
        model = spec.model.build()
        assert isinstance(model, Qwen3)
        make_batch_invariant(model, spec=spec, device=device)
        model.to(device).requires_grad_(False)
        dtype = getattr(torch, self.engine.config.training.param_dtype)
        for parameter in model.parameters():  # not the buffers: tables keep their precision
            parameter.data = parameter.data.to(dtype)
        return model

    async def __aenter__(self) -> LocalBackend:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # In a thread, so that whoever waits for a call is told of its end meanwhile.
        await asyncio.shield(asyncio.to_thread(self.close))

    def close(self) -> None:
        """End both threads: after the learner's call that is under way, and the sampler's next token. Calls
        that wait, and later ones, raise RuntimeError. Idempotent."""
        self._sampler.close()
        self._learner.close()
        self.engine.close()

    # Sampler

    async def generate(
        self, prompts: Sequence[np.ndarray], *, sampling: SamplingParams, session: str | None = None
    ) -> list[list[Completion]]:
        """As `Sampler.generate`; calls take turns.

        Raises:
            ValueError: a prompt that is empty or fills the context, or settings out of range.
            RuntimeError: no weights were published yet, or the backend is closed.
        """
        cancelled = threading.Event()
        try:
            return await self._sampler.run(
                "generate", lambda: self._generate(list(prompts), sampling, cancelled)
            )
        finally:
            cancelled.set()

    def _generate(
        self, prompts: list[np.ndarray], sampling: SamplingParams, cancelled: threading.Event
    ) -> list[list[Completion]]:
        if self._served_version is None:
            raise RuntimeError("no weights to sample from: await serve(await push()) first")
        groups = generate(
            self._model,
            prompts,
            sampling=sampling,
            policy_version=self._served_version,
            is_cancelled=lambda: cancelled.is_set() or self._sampler.is_closed,
        )
        self._sampler.check_open()  # Else completions may have been ended by `close`.
        return groups

    # Learner

    async def forward_backward(
        self,
        samples: Sequence[TrainingSample],
        *,
        loss: Loss | None = None,
        return_logprobs: bool | Sequence[int] = False,
    ) -> ForwardBackwardResult:
        """As `TrainingEngine.forward_backward`."""
        return await self._learner.run(
            "forward_backward",
            lambda: self.engine.forward_backward(samples, loss=loss, return_logprobs=return_logprobs),
        )

    async def forward(
        self, samples: Sequence[TrainingSample], *, loss: Loss | None = None
    ) -> ForwardBackwardResult:
        """As `TrainingEngine.forward`."""
        return await self._learner.run("forward", lambda: self.engine.forward(samples, loss=loss))

    async def drop_gradient(self) -> None:
        """As `TrainingEngine.drop_gradient`."""
        await self._learner.run("drop_gradient", self.engine.drop_gradient)

    async def optim_step(
        self, params: OptimParams | None = None, *, allow_empty: bool = False
    ) -> OptimStepResult:
        """As `TrainingEngine.optim_step`."""
        return await self._learner.run(
            "optim_step", lambda: self.engine.optim_step(params, allow_empty=allow_empty)
        )

    async def compute_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        return await self._learner.run("compute_logprobs", lambda: self.engine.compute_logprobs(samples))

    async def compute_reference_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        return await self._learner.run(
            "compute_reference_logprobs", lambda: self.engine.compute_reference_logprobs(samples)
        )

    async def save_checkpoint(
        self,
        folder: str,
        *,
        position: LoopPosition | None = None,
        model_only: bool = False,
        wait: bool = True,
        attachments: Mapping[str, bytes] | None = None,
    ) -> None:
        await self._learner.run(
            "save",
            lambda: self.engine.save_checkpoint(
                folder, position=position, model_only=model_only, wait=wait, attachments=attachments
            ),
        )

    async def load_checkpoint(self, folder: str, *, model_only: bool = False) -> int:
        return await self._learner.run(
            "load", lambda: self.engine.load_checkpoint(folder, model_only=model_only)
        )

    async def export_hf(self, folder: str, *, dtype: Dtype | None = None) -> None:
        """As `TrainingEngine.export_hf`."""
        await self._learner.run("export", lambda: self.engine.export_hf(folder, dtype=dtype))

    async def save_adapter(self, folder: str) -> None:
        """As `TrainingEngine.save_adapter`."""
        await self._learner.run("export", lambda: self.engine.save_adapter(folder))

    # WeightPublisher

    async def push(self) -> int:
        """Keep a copy of the weights as they are now, adapters merged; returns their policy version."""
        return await self._learner.run("push", self._push)

    def _push(self) -> int:
        version = self.engine.policy_version
        with torch.no_grad():
            weights = self.engine.model_state_dict().items()
            copy = {name: whole_tensor(tensor).detach().clone() for name, tensor in weights}
        self._pushed.pop(version, None)  # Its place is at the end: it may have been loaded since.
        self._pushed[version] = copy
        return version

    async def serve(self, policy_version: int) -> ServeResult:
        """Let the next calls of `generate` sample from a pushed version, and forget it and those before it.

        Raises:
            ValueError: this version is not there.
        """
        await self._sampler.run("pull", lambda: self._serve(policy_version))
        return ServeResult()

    def _serve(self, policy_version: int) -> None:
        kept = list(self._pushed)
        if policy_version not in kept:
            if policy_version == self._served_version:
                return
            raise ValueError(
                f"policy_version={policy_version} was not pushed, or one that was pushed later is served: "
                f"served is {self._served_version}, pushed since {kept}"
            )
        tensors = dict(self._model.named_parameters()) | persistent_buffers(self._model)
        with torch.no_grad():
            for name, tensor in self._pushed[policy_version].items():
                tensors[name].copy_(tensor)
        self._served_version = policy_version
        for version in kept[: kept.index(policy_version) + 1]:
            del self._pushed[version]


class _Turns:
    """Calls that run one after another, in a thread of their own."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._closed = threading.Event()

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def check_open(self) -> None:
        if self.is_closed:
            raise RuntimeError("the local backend is closed")

    async def run(self, what: str, function: Callable[[], ResultT]) -> ResultT:
        """`what` it is, for whoever looks at what this process does."""
        self.check_open()
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._when_open, what, function)

    def _when_open(self, what: str, function: Callable[[], ResultT]) -> ResultT:
        self.check_open()
        with doing(what):
            return function()

    def close(self) -> None:
        self._closed.set()
        self._pool.shutdown()


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalScorer(Scorer):
    """Scores in this process: no time limit, so for reward functions that one trusts to end."""

    rubric: Rubric

    async def score(self, groups: Sequence[Sequence[Rollout]], *, alone: bool = False) -> list[list[Score]]:
        with doing("score"):
            return list(await asyncio.gather(*(self.rubric.score_group(g, alone=alone) for g in groups)))
