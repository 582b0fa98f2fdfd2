"""Tinker service around a fake backend in which each model is a single number, so that numbers show
which requests ran.

The gradient of data is the sum of their tokens, and a step subtracts learning rate times gradient.
A sample is the rounded weight.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import httpx
import numpy as np
from fastapi import FastAPI
from tinker import types as wire
from tinker.proto import tinker_public_pb2 as pb

from rl.http.keys import Keys
from rl.models.lora import LoRA
from rl.tinker.app import make_app
from rl.tinker.service.futures import Result
from rl.tinker.service.service import Service
from rl.tinker.types import (
    BaseModelInfo,
    LimitReachedError,
    Limits,
    ModelSettings,
    SampleOutput,
    SampleRequest,
)
from rl.tinker.wire.codec import PROTOBUF
from rl.trainer_types import OptimParams
from rl.types import Completion, TrainingSample
from tests.support.virtual_time import run_in_virtual_time

T = TypeVar("T")

KEYS = {Keys().find_owner(key.encode()) or "": key for key in ("tml-me", "tml-you")}
"""API key of each owner."""
ME, YOU = KEYS
DEADLINE_S = 30
BASE = BaseModelInfo(
    name="tiny",
    architecture="number",
    max_context_length=100,
    vocab_size=1000,
    tokenizer_folder="/tokenizer",
)
LORA = ModelSettings(base_model="tiny", lora=wire.LoraConfig(rank=4, seed=1))


class FakeBackend:
    """Deterministic backend: `hold` blocks calls of a method, `fail` makes the next call fail."""

    def __init__(self) -> None:
        self.base_model = BASE
        self.calls: list[str] = []
        self.weights: dict[str, float] = {}
        self.gradients: dict[str, float] = {}
        self.published: dict[int, float] = {}
        self.max_published = 1000
        self.num_sampling: Counter[int] = Counter()
        self._versions = itertools.count(1)
        self.is_open = False
        self.violations: list[str] = []
        """Violations of the protocol, kept because errors in the background are only logged."""
        self._at_once: Counter[str] = Counter()
        self._gates: dict[str, asyncio.Event] = {}
        self._failures: defaultdict[str, list[Exception]] = defaultdict(list)

    def hold(self, method: str) -> asyncio.Event:
        return self._gates.setdefault(method, asyncio.Event())

    def fail(self, method: str, error: Exception) -> None:
        self._failures[method].append(error)

    def release(self) -> None:
        for gate in self._gates.values():
            gate.set()

    async def start(self) -> None:
        self.is_open = True

    async def close(self) -> None:
        self.is_open = False

    @asynccontextmanager
    async def lock_trainer(self, owner: str = "") -> AsyncIterator[FakeBackend]:
        yield self

    async def create_model(self, model_id: str, lora: LoRA.Config | None) -> None:
        async with self._call("create_model", model_id):
            assert model_id not in self.weights
            self.weights[model_id], self.gradients[model_id] = 0.0, 0.0

    async def forward_backward(
        self, samples: Sequence[TrainingSample], *, model_id: str, **_: Any
    ) -> Any:
        tokens = [int(token) for sample in samples for token in sample.token_ids[:-1]]
        async with self._call("forward_backward", model_id, str(tokens)):
            self.gradients[model_id] += sum(tokens)
            weight = self.weights[model_id]
            logprobs = tuple(
                np.full(len(one.token_ids), weight, dtype=np.float32) for one in samples
            )
            return SimpleNamespace(
                loss_sum=sum(tokens), num_valid_tokens=0, entropy_mean=0.0, logprobs=logprobs
            )

    async def drop_gradient(self, *, model_id: str) -> None:
        async with self._call("drop_gradient", model_id):
            self.gradients[model_id] = 0.0

    async def optim_step(self, params: OptimParams, *, model_id: str, **_: Any) -> Any:
        """Take a step and report the new weight as the gradient norm."""
        async with self._call("optim_step", model_id):
            assert params.lr is not None
            self.weights[model_id] -= params.lr * self.gradients[model_id]
            self.gradients[model_id] = 0.0
            return SimpleNamespace(grad_norm=self.weights[model_id])

    async def save_model(self, model_id: str, folder: str, *, optimizer: bool) -> None:
        async with self._call("save_model", model_id):
            assert not any(Path(folder).iterdir())
            (Path(folder) / "weight.json").write_text(json.dumps(self.weights[model_id]))

    async def load_model(self, model_id: str, folder: str, *, optimizer: bool) -> None:
        async with self._call("load_model", model_id, f"optimizer={optimizer}"):
            self.weights[model_id] = _read(Path(folder))
            self.gradients[model_id] = 0.0

    async def delete_model(self, model_id: str) -> None:
        async with self._call("delete_model", model_id):
            del self.weights[model_id], self.gradients[model_id]

    async def publish(self, model_id: str, owner: str) -> int:
        async with self._call("publish", model_id):
            if len(self.published) >= self.max_published:
                raise LimitReachedError(f"there are {len(self.published)} snapshots")
            return self._add(self.weights[model_id])

    async def open(self, lora: LoRA.Config | None, folder: Path | None, owner: str) -> int:
        async with self._call("open", f"weights {len(self.calls)}"):
            return self._add(0.0 if folder is None else _read(folder))

    def _add(self, weight: float) -> int:
        version = next(self._versions)
        self.published[version] = weight
        return version

    async def forget(self, version: int) -> None:
        async with self._call("forget", str(version)):
            if self.num_sampling[version]:
                self.violations.append(f"{version} forgotten under its samples")
            del self.published[version]

    async def sample(self, version: int, request: SampleRequest, owner: str) -> SampleOutput:
        self.num_sampling[version] += 1
        try:
            self.calls.append(f"sample {version}")
            await self._wait_or_fail("sample")
            one = Completion(
                token_ids=np.array([round(self.published[version])], np.int32),
                logprobs=np.zeros(1, np.float32),
                policy_versions=np.array([version], np.int32),
                finish_reason="stop",
            )
            return SampleOutput(completions=(one,) * request.sampling.num_samples, of_prompt=None)
        finally:
            self.num_sampling[version] -= 1

    def names(self, *left_out: str) -> list[str]:
        return [name for call in self.calls if (name := call.partition(" ")[0]) not in left_out]

    @asynccontextmanager
    async def _call(self, method: str, about: str, what: str = "") -> AsyncIterator[None]:
        assert self.is_open
        self.calls.append(f"{method} {about.rpartition(':')[2]} {what}".rstrip())
        self._at_once[about] += 1
        if self._at_once[about] > 1:
            self.violations.append(f"{method} overlaps another call about {about}")
        try:
            await self._wait_or_fail(method)
            yield
        finally:
            self._at_once[about] -= 1

    async def _wait_or_fail(self, method: str) -> None:
        await asyncio.sleep(0)
        if method in self._gates:
            await self._gates[method].wait()
        if self._failures[method]:
            raise self._failures[method].pop(0)


def _read(folder: Path) -> float:
    return json.loads((folder / "weight.json").read_text())


BODIES: dict[str, Any] = {
    "create_model": wire.CreateModelRequest,
    "load_weights": wire.LoadWeightsRequest,
    "optim_step": wire.OptimStepRequest,
    "save_weights": wire.SaveWeightsRequest,
    "save_weights_for_sampler": wire.SaveWeightsForSamplerRequest,
}


class Client:
    """A service and its backend, with shorthand calls for one owner."""

    def __init__(
        self, service: Service, backend: FakeBackend, folder: Path, *, owner: str = ME
    ) -> None:
        self.service, self.backend, self.folder, self.owner = service, backend, folder, owner

    def of(self, owner: str) -> Client:
        return Client(self.service, self.backend, self.folder, owner=owner)

    @functools.cached_property
    def app(self) -> FastAPI:
        return make_app(self.service, keys=Keys(), hosts=None)

    async def post(
        self, path: str, body: Any, media_type: str = "application/json"
    ) -> httpx.Response:
        """Send bytes, or another value as JSON, to the HTTP application."""
        content = body if isinstance(body, bytes) else json.dumps(body)
        headers = {"x-api-key": KEYS[self.owner], "content-type": media_type}
        # Errors that the application raises after its answer do not reach the client, as with a
        # real server.
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1/api/v1/"
        ) as http:
            return await http.post(path, content=content, headers=headers)

    async def get(self, path: str) -> httpx.Response:
        """Call the HTTP application without a body."""
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1/api/v1/"
        ) as http:
            return await http.get(path, headers={"x-api-key": KEYS[self.owner]})

    async def retrieved(self, request_id: str) -> httpx.Response:
        return await self.post("retrieve_future", {"request_id": request_id})

    def now(self, call: Callable[..., Coroutine[Any, Any, T]], *args: Any, **kwargs: Any) -> T:
        """Return the answer of a call that does not wait."""
        try:
            call(*args, owner=self.owner, **kwargs).send(None)
        except StopIteration as done:
            return done.value
        raise AssertionError(f"{call} waits")

    def session(self) -> str:
        body = wire.CreateSessionRequest.model_construct()
        return self.now(self.service.sessions.create_session, body).session_id

    def finish(self, session: str) -> None:
        self.now(self.service.sessions.finish, session, reason=None)

    def submit(self, call: str, **fields: Any) -> str:
        """Make a call about models in training, and return the id of the request."""
        return self.now(getattr(self.service.training, call), BODIES[call](**fields)).request_id

    def model(
        self,
        *,
        session: str | None = None,
        number: int = 0,
        rank: int = 4,
        seed: int = 1,
        **fields: Any,
    ) -> str:
        """Submit the creation of a model, in a new session unless one is given."""
        lora = wire.LoraConfig(rank=rank, seed=seed)
        how = {"session_id": session or self.session(), "model_seq_id": number, "lora_config": lora}
        return self.submit("create_model", **how, **{"base_model": "tiny"} | fields).rpartition(
            ":"
        )[0]

    def add(self, model: str, seq_id: int, *tokens: int) -> str:
        """Submit a forward_backward of one datum."""
        training = self.service.training
        body = training.decode(message(model, seq_id, *tokens).SerializeToString())
        return self.now(training.forward_backward, body).request_id

    def step(self, model: str, seq_id: int | None) -> str:
        adam = wire.AdamParams(learning_rate=1.0)
        return self.submit("optim_step", model_id=model, seq_id=seq_id, adam_params=adam)

    def save(self, model: str, seq_id: int, name: str | None, **options: Any) -> str:
        return self.submit("save_weights", model_id=model, seq_id=seq_id, path=name, **options)

    def save_sampler(self, model: str, seq_id: int, name: str | None = None, **options: Any) -> str:
        return self.submit(
            "save_weights_for_sampler", model_id=model, seq_id=seq_id, path=name, **options
        )

    def snapshot(self, model: str, seq_id: int, number: int) -> str:
        return self.save_sampler(model, seq_id, sampling_session_seq_id=number)

    async def opened(self, model: str, seq_id: int, number: int) -> str:
        """Return the id of a sampling session of a snapshot."""
        return (await self.result(self.snapshot(model, seq_id, number))).sampling_session_id

    def load(self, path: str, *, optimizer: bool = True, **where: Any) -> str:
        return self.submit("load_weights", path=path, optimizer=optimizer, **where)

    def create_sampler(self, session: str, number: int, **source: Any) -> str:
        body = wire.CreateSamplingSessionRequest(
            session_id=session, sampling_session_seq_id=number, **source
        )
        return self.now(self.service.sampling.create_sampling_session, body).sampling_session_id

    def base_sampler(self, number: int = 0, session: str | None = None) -> str:
        return self.create_sampler(session or self.session(), number, base_model="tiny")

    def sample(self, sampler: str, seq_id: int = 0, body: wire.SampleRequest | None = None) -> str:
        body = (body or prompt(1)).model_copy(
            update={"sampling_session_id": sampler, "seq_id": seq_id}
        )
        return self.now(self.service.sampling.asample, body).request_id

    async def runs(self, call: str, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self.service.runs, call)(*args, owner=self.owner, **kwargs)

    async def result(self, request_id: str, *, wait_s: float = 10) -> Any:
        result = await self.service.retrieve(request_id, owner=self.owner, wait_s=wait_s)
        assert result is not None, f"{request_id} has no result after {wait_s:g} s"
        return decoded(result, request_id)

    async def failure(self, request_id: str) -> wire.RequestFailedResponse:
        result = await self.result(request_id)
        assert isinstance(result, wire.RequestFailedResponse), result
        return result

    async def loss(self, request_id: str) -> float:
        return (await self.result(request_id)).metrics["loss:sum"]

    async def weight(self, request_id: str) -> float:
        """Return the weight reported by a step."""
        return (await self.result(request_id)).metrics["grad_norm:mean"]

    async def token(self, sampler: str, seq_id: int = 0) -> int:
        output = await self.result(self.sample(sampler, seq_id))
        return int(np.frombuffer(output.sequences[0].tokens, "<i4")[0])

    async def trained(self) -> str:
        """Return a new model trained to weight -5; the last seq id is 2."""
        model = self.model()
        self.add(model, 1, 5)
        assert await self.weight(self.step(model, 2)) == -5
        return model

    async def saved(self, model: str, seq_id: int, name: str | None, **options: Any) -> str:
        return (await self.result(self.save(model, seq_id, name, **options))).path

    async def saved_sampler(self, model: str, seq_id: int, name: str) -> str:
        return (await self.result(self.save_sampler(model, seq_id, name))).path

    async def loaded_weight(self, path: str, *, number: int = 0) -> float:
        """Return the weight of a new model loaded from a checkpoint."""
        request = self.load(path, session_id=self.session(), model_seq_id=number)
        return await self.weight(self.step((await self.result(request)).model_id, 1))


def decoded(result: Result, request_id: str) -> Any:
    """Return an answer in the official client's types, or one that is none of tensors as a
    namespace.
    """
    if result.media_type == PROTOBUF:
        kind = pb.SampleResponse if ":sample:" in request_id else pb.ForwardBackwardOutput
        return kind.FromString(result.body)
    fields = json.loads(result.body)
    return (
        SimpleNamespace(**fields) if result.error is None else wire.RequestFailedResponse(**fields)
    )


def message(model: str, seq_id: int, *tokens: int) -> pb.ForwardBackwardRequest:
    """Return a forward_backward of one datum with these tokens as targets too."""
    made = pb.ForwardBackwardRequest(model_id=model, seq_id=seq_id, loss_fn="cross_entropy")
    datum = made.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(tokens, "<i4").tobytes()
    targets = pb.Tensor(
        dense=np.array(tokens, "<i8").tobytes(), dtype=pb.DTYPE_INT64, shape=[len(tokens)]
    )
    datum.loss_fn_inputs["target_tokens"].CopyFrom(targets)
    return made


def prompt(*tokens: int, **how: Any) -> wire.SampleRequest:
    """Return a request to sample; keywords are its fields or those of its sampling parameters."""
    own = {name: how.pop(name) for name in list(how) if name in wire.SampleRequest.model_fields}
    return wire.SampleRequest(
        prompt=wire.ModelInput.from_ints(list(tokens)),
        sampling_params=wire.SamplingParams.model_construct(**how),
        **own,
    )


async def settled() -> None:
    """Let all tasks run until each of them waits."""
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def running_service(folder: Path, **options: Any) -> AsyncIterator[Client]:
    backend = FakeBackend()
    service = Service(backend=cast(Any, backend), storage_folder=folder, **options)
    await service.start()
    try:
        yield Client(service, backend, folder)
    finally:
        backend.release()
        await service.close()
    assert backend.violations == []


Test = Callable[..., Awaitable[None]]


def service_test(*, virtual: bool = True, **limits: Any) -> Callable[[Test], Callable[..., None]]:
    """Run a test with a `Client`, in virtual time unless the test uses threads, and check that no
    task is left.

    Keywords are fields of `Limits`.
    """

    def decorate(test: Test) -> Callable[..., None]:
        async def run() -> None:
            async with asyncio.timeout(None if virtual else DEADLINE_S):
                with tempfile.TemporaryDirectory() as name:
                    folder = Path(name) / "storage"
                    async with running_service(folder, limits=Limits(**limits)) as client:
                        await test(client)
            assert asyncio.all_tasks() == {asyncio.current_task()}

        def sync() -> None:
            (run_in_virtual_time if virtual else asyncio.run)(run())

        # The name of the test, but not its parameter, which pytest would look for as a fixture.
        functools.update_wrapper(sync, test)
        del sync.__wrapped__  # type: ignore[attr-defined]
        return sync

    return decorate
