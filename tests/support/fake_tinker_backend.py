"""A backend whose models are one number each, and what tests of the service around it need.

The gradient of data is the sum of their tokens, a step subtracts learning rate times gradient. So numbers
show which requests ran, in which order, on which weights.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rl.tinker.errors import InvalidRequestError, LimitReachedError
from rl.tinker.messages import (
    AdamParams,
    BaseModel,
    Datum,
    ForwardBackwardOutput,
    LoRASettings,
    LossCall,
    ModelSettings,
    OptimStepOutput,
    SampledSequence,
    SampleOutput,
    SampleRequest,
    Sampling,
)
from rl.tinker.service.limits import Limits
from rl.tinker.service.responses import Failure
from rl.tinker.service.service import LOCAL_OWNER, Service

BASE = BaseModel(name="tiny", architecture="number", max_context_length=100, tokenizer_folder="none")
UNTRAINABLE = BaseModel(
    name="fixed", architecture="number", max_context_length=100, tokenizer_folder="none", trainable=False
)
LORA = ModelSettings(base_model="tiny", lora=LoRASettings(rank=4, seed=1))
LOSS = LossCall(name="cross_entropy")


class FakeTinkerBackend:
    """Deterministic. `calls` has each call when it begins; `hold` lets those of a method wait, `fail` lets
    the next one fail."""

    base_models = (BASE, UNTRAINABLE)

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.weights: dict[str, float] = {}
        self.gradients: dict[str, float] = {}
        self.samplers: dict[str, float] = {}
        self.most_samplers = 1000
        """One more snapshot is refused."""
        self.num_sampling: Counter[str] = Counter()
        self.most_at_once = 0
        """Calls of different models."""
        self.is_open = False
        self.violations: list[str] = []
        """Of the protocol, by the service; kept, since an error in its background would only be logged."""
        self._at_once: Counter[str] = Counter()
        self._gates: dict[str, asyncio.Event] = {}
        self._failures: defaultdict[str, list[Exception]] = defaultdict(list)

    def hold(self, method: str) -> asyncio.Event:
        """Calls of it go on when the event is set."""
        return self._gates.setdefault(method, asyncio.Event())

    def fail(self, method: str, error: Exception) -> None:
        self._failures[method].append(error)

    async def start(self) -> None:
        self.is_open = True

    async def close(self) -> None:
        self.is_open = False

    def check_settings(self, settings: ModelSettings) -> None:
        if settings.lora is not None and settings.lora.rank > 64:
            raise InvalidRequestError(f"lora.rank is {settings.lora.rank}; it is at most 64")

    def check_data(self, settings: ModelSettings, data: Sequence[Datum], loss: LossCall) -> None:
        for i, datum in enumerate(data):
            if datum.tokens.min() < 0:
                raise InvalidRequestError(f"data[{i}].tokens has {datum.tokens.min()}; ids are 0 or more")

    def check_request(self, base_model: str, request: SampleRequest) -> None:
        if request.sampling.temperature < 0:
            raise InvalidRequestError(f"temperature is {request.sampling.temperature}; it is 0 or more")

    async def create_model(self, model_id: str, settings: ModelSettings) -> None:
        async with self._call("create_model", model_id):
            assert model_id not in self.weights
            self.weights[model_id], self.gradients[model_id] = 0.0, 0.0

    async def forward_backward(
        self, model_id: str, data: Sequence[Datum], loss: LossCall, *, backward: bool
    ) -> ForwardBackwardOutput:
        tokens = [int(token) for datum in data for token in datum.tokens]
        async with self._call("forward_backward", model_id, str(tokens)):
            self.gradients[model_id] += sum(tokens) * backward
            logprobs = tuple(
                np.full(datum.tokens.size, self.weights[model_id], dtype=np.float32) for datum in data
            )
            return ForwardBackwardOutput(logprobs=logprobs, metrics={"loss:sum": float(sum(tokens))})

    async def drop_gradient(self, model_id: str) -> None:
        async with self._call("drop_gradient", model_id):
            self.gradients[model_id] = 0.0

    async def optim_step(self, model_id: str, params: AdamParams) -> OptimStepOutput:
        async with self._call("optim_step", model_id):
            self.weights[model_id] -= params.learning_rate * self.gradients[model_id]
            self.gradients[model_id] = 0.0
            return OptimStepOutput(metrics={"weight": self.weights[model_id]})

    async def save_state(self, model_id: str, folder: Path) -> None:
        async with self._call("save_state", model_id):
            self._write(model_id, folder)

    async def load_state(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        async with self._call("load_state", model_id, f"optimizer={optimizer}"):
            self.weights[model_id] = _read(folder)
            self.gradients[model_id] = 0.0

    async def delete_model(self, model_id: str) -> None:
        async with self._call("delete_model", model_id):
            del self.weights[model_id], self.gradients[model_id]

    async def save_sampler(self, model_id: str, folder: Path) -> None:
        async with self._call("save_sampler", model_id):
            self._write(model_id, folder)

    async def take_snapshot(self, model_id: str, sampler_id: str) -> None:
        async with self._call("take_snapshot", model_id):
            if len(self.samplers) >= self.most_samplers:
                raise LimitReachedError(f"there are {len(self.samplers)} snapshots")
            self.samplers[sampler_id] = self.weights[model_id]

    async def open_sampler(self, sampler_id: str, settings: ModelSettings, folder: Path | None) -> None:
        async with self._call("open_sampler", sampler_id):
            assert sampler_id not in self.samplers
            self.samplers[sampler_id] = 0.0 if folder is None else _read(folder)

    async def close_sampler(self, sampler_id: str) -> None:
        async with self._call("close_sampler", sampler_id):
            if self.num_sampling[sampler_id]:
                self.violations.append(f"{sampler_id} is closed under its samples")
            del self.samplers[sampler_id]

    async def sample(self, sampler_id: str, request: SampleRequest) -> SampleOutput:
        self.num_sampling[sampler_id] += 1
        try:
            self.calls.append(f"sample {sampler_id} {request.prompt.tolist()}")
            await self._held_or_failing("sample")
            tokens = np.asarray([round(self.samplers[sampler_id])], dtype=np.int32)
            sequence = SampledSequence(tokens=tokens, logprobs=np.zeros(1, np.float32), stop_reason="stop")
            return SampleOutput(sequences=(sequence,) * request.num_samples)
        finally:
            self.num_sampling[sampler_id] -= 1

    @property
    def is_idle(self) -> bool:
        return not +self._at_once and not +self.num_sampling

    def names(self, *left_out: str) -> list[str]:
        """Of the methods that were called."""
        return [name for call in self.calls if (name := call.partition(" ")[0]) not in left_out]

    @asynccontextmanager
    async def _call(self, method: str, about: str, what: str = "") -> AsyncIterator[None]:
        assert self.is_open
        self.calls.append(f"{method} {about.rpartition(':')[2]} {what}".rstrip())
        self._at_once[about] += 1
        if self._at_once[about] > 1:
            self.violations.append(f"{method} overlaps another call about {about}")
        self.most_at_once = max(self.most_at_once, len(+self._at_once))
        try:
            await self._held_or_failing(method)
            yield
        finally:
            self._at_once[about] -= 1

    async def _held_or_failing(self, method: str) -> None:
        await asyncio.sleep(0)
        if method in self._gates:
            await self._gates[method].wait()
        if self._failures[method]:
            raise self._failures[method].pop(0)

    def _write(self, model_id: str, folder: Path) -> None:
        assert not any(folder.iterdir())
        (folder / "weight.json").write_text(json.dumps(self.weights[model_id]))


def _read(folder: Path) -> float:
    return json.loads((folder / "weight.json").read_text())


@asynccontextmanager
async def running_service(
    folder: Path, *, limits: Limits | None = None, **options: Any
) -> AsyncIterator[tuple[Service, FakeTinkerBackend]]:
    backend = FakeTinkerBackend()
    service = Service(backend=backend, storage_folder=folder, limits=limits, **options)
    await service.start()
    try:
        yield service, backend
    finally:
        await service.close()
    assert backend.violations == []


def new_model(
    service: Service, *, session_id: str | None = None, number: int = 0, owner: str = LOCAL_OWNER
) -> str:
    """Of a session of its own, unless one is given; its creation is under way."""
    session_id = session_id or service.sessions.create(owner=owner)
    return service.training.create_model(session_id, number, LORA, owner=owner).model_id


def datum(*tokens: int) -> Datum:
    return Datum(tokens=np.asarray(tokens, dtype=np.int32), loss_inputs={})


def forward_backward(
    service: Service, model_id: str, seq_id: int, *tokens: int, owner: str = LOCAL_OWNER
) -> str:
    return service.training.forward_backward(model_id, seq_id, [datum(*tokens)], LOSS, owner=owner).request_id


def optim_step(
    service: Service, model_id: str, seq_id: int, learning_rate: float = 1.0, owner: str = LOCAL_OWNER
) -> str:
    return service.training.optim_step(
        model_id, seq_id, AdamParams(learning_rate=learning_rate), owner=owner
    ).request_id


def prompt(*tokens: int, num_samples: int = 1, temperature: float = 1.0) -> SampleRequest:
    return SampleRequest(
        prompt=np.asarray(tokens, dtype=np.int32),
        num_samples=num_samples,
        sampling=Sampling(temperature=temperature),
    )


async def settled() -> None:
    """What can go on without waiting for anything has done so."""
    for _ in range(20):
        await asyncio.sleep(0)


async def result_of(service: Service, request_id: str, owner: str = LOCAL_OWNER) -> Any:
    result = await service.retrieve(request_id, owner=owner, wait_s=10)
    assert result is not None, f"{request_id} has no result after 10 s"
    return result


async def failure_of(service: Service, request_id: str, owner: str = LOCAL_OWNER) -> Failure:
    result = await result_of(service, request_id, owner)
    assert isinstance(result, Failure), result
    return result
