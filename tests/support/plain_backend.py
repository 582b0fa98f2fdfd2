"""A backend whose results can be worked out in the head: what a transport does with them is tested."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rl.tinker.errors import InvalidRequestError
from rl.tinker.messages import (
    AdamParams,
    BaseModel,
    Datum,
    ForwardBackwardOutput,
    LossCall,
    ModelSettings,
    OptimStepOutput,
    SampledSequence,
    SampleOutput,
    SampleRequest,
)

BASE = BaseModel(name="plain", architecture="none", max_context_length=64, tokenizer_folder="/plain")
BUG_RANK = 666
SECRET = "a password in a traceback"


class PlainBackend:
    """Logprobs are minus the token, samples repeat the prompt's last token. `go_on` holds all training work.

    What sets off failures: a loss called "crash" or "refuse"; `BUG_RANK` one in a check.
    """

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.calls: list[str] = []

    @property
    def base_models(self) -> Sequence[BaseModel]:
        return (BASE,)

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def check_settings(self, settings: ModelSettings) -> None:
        if settings.lora is not None and settings.lora.rank == BUG_RANK:
            raise RuntimeError(SECRET)
        if settings.base_model != BASE.name:
            raise InvalidRequestError(f"base_model={settings.base_model!r}: must be {BASE.name!r}")

    def check_data(self, settings: ModelSettings, data: Sequence[Datum], loss: LossCall) -> None:
        if any("target_tokens" not in datum.loss_inputs for datum in data):
            raise InvalidRequestError("data[0].loss_fn_inputs: has no target_tokens")

    def check_request(self, base_model: str, request: SampleRequest) -> None:
        if not request.prompt.size:
            raise InvalidRequestError("prompt: must have at least one token")

    async def create_model(self, model_id: str, settings: ModelSettings) -> None:
        self.calls.append("create_model")

    async def forward_backward(
        self, model_id: str, data: Sequence[Datum], loss: LossCall, *, backward: bool
    ) -> ForwardBackwardOutput:
        await self.go_on.wait()
        self.calls.append("forward_backward" if backward else "forward")
        if loss.name == "crash":
            raise RuntimeError(SECRET)
        if loss.name == "refuse":
            raise InvalidRequestError("loss_fn: refused while at work")
        logprobs = tuple(-datum.tokens.astype(np.float32) for datum in data)
        total = float(sum(array.sum() for array in logprobs))
        return ForwardBackwardOutput(logprobs=logprobs, metrics={"loss:sum": -total})

    async def drop_gradient(self, model_id: str) -> None:
        self.calls.append("drop_gradient")

    async def optim_step(self, model_id: str, params: AdamParams) -> OptimStepOutput:
        self.calls.append(f"optim_step {params.learning_rate:g}")
        return OptimStepOutput(metrics={"grad_norm": float("nan")})

    async def save_state(self, model_id: str, folder: Path) -> None:
        (folder / "weights").write_bytes(b"12345")

    async def load_state(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        self.calls.append(f"load_state {(folder / 'weights').read_bytes().decode()} {optimizer}")

    async def delete_model(self, model_id: str) -> None:
        self.calls.append("delete_model")

    async def save_sampler(self, model_id: str, folder: Path) -> None:
        (folder / "weights").write_bytes(b"123")

    async def take_snapshot(self, model_id: str, sampler_id: str) -> None:
        self.calls.append("take_snapshot")

    async def open_sampler(self, sampler_id: str, settings: ModelSettings, folder: Path | None) -> None:
        self.calls.append("open_sampler")

    async def close_sampler(self, sampler_id: str) -> None:
        self.calls.append("close_sampler")

    async def sample(self, sampler_id: str, request: SampleRequest) -> SampleOutput:
        await self.go_on.wait()
        num_tokens = request.sampling.max_tokens or 1
        sequence = SampledSequence(
            tokens=np.full(num_tokens, request.prompt[-1], np.int32),
            logprobs=np.zeros(num_tokens, np.float32),
            stop_reason="length",
        )
        prompt_logprobs = -request.prompt.astype(np.float32) if request.prompt_logprobs else None
        if prompt_logprobs is not None:
            prompt_logprobs[0] = np.nan
        return SampleOutput(sequences=(sequence,) * request.num_samples, prompt_logprobs=prompt_logprobs)
