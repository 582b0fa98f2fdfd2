"""A backend of the Tinker service that computes in numpy: the next token depends on the last one alone.

The logits of the token that follows t are row t of one [V, V] table, which is all that is trained. So every
loss, gradient, step and sample is what an actual backend's is, and can be computed by hand.
"""

from __future__ import annotations

import asyncio
import threading
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
    TopLogprobs,
)

VOCABULARY = 8
NAME = "bigram"
LOSSES = ("cross_entropy", "importance_sampling")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


class Model:
    def __init__(self) -> None:
        self.table = np.zeros((VOCABULARY, VOCABULARY))
        self.gradient = np.zeros_like(self.table)
        self.moments = np.zeros((2, VOCABULARY, VOCABULARY))
        self.num_steps = 0


class BigramBackend:
    """Events tell tests in other threads what has happened."""

    def __init__(self, tokenizer_folder: str = "") -> None:
        self.base_models = (
            BaseModel(
                name=NAME, architecture="bigram", max_context_length=64, tokenizer_folder=tokenizer_folder
            ),
        )
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, np.ndarray] = {}
        self.calls: list[str] = []
        self.num_started = self.num_closed = 0
        self.go_on: asyncio.Event | None = None
        """What computes waits for it."""
        self.computing, self.sampling, self.cancelled, self.deleted, self.closed = (
            threading.Event() for _ in range(5)
        )

    async def start(self) -> None:
        self.num_started += 1
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def close(self) -> None:
        self.num_closed += 1
        self.closed.set()

    def check_settings(self, settings: ModelSettings) -> None:
        if settings.lora is not None and settings.lora.rank > 64:
            raise InvalidRequestError(f"rank={settings.lora.rank}: must be 1 to 64")

    def check_data(self, settings: ModelSettings, data: Sequence[Datum], loss: LossCall) -> None:
        if loss.name not in LOSSES:
            raise InvalidRequestError(f"loss_fn={loss.name!r}: must be one of {LOSSES}")
        for i, datum in enumerate(data):
            if max(datum.tokens) >= VOCABULARY:
                raise InvalidRequestError(f"data[{i}]: token {max(datum.tokens)} is above {VOCABULARY - 1}")

    def check_request(self, base_model: str, request: SampleRequest) -> None:
        if not len(request.prompt):
            raise InvalidRequestError("prompt is empty")

    async def create_model(self, model_id: str, settings: ModelSettings) -> None:
        self.models[model_id] = Model()

    async def forward_backward(
        self, model_id: str, data: Sequence[Datum], loss: LossCall, *, backward: bool
    ) -> ForwardBackwardOutput:
        self.calls.append("forward_backward" if backward else "forward")
        self.computing.set()
        assert self.go_on is not None
        await self.go_on.wait()
        model, total, all_logprobs = self.models[model_id], 0.0, []
        for datum in data:
            targets = datum.loss_inputs["target_tokens"]
            targets_NK = targets.reshape(len(targets), -1)
            logprobs_NV = log_softmax(model.table[datum.tokens])
            logprobs_NK = np.take_along_axis(logprobs_NV, targets_NK, -1)
            if loss.name == "cross_entropy":
                weights_NK = datum.loss_inputs["weights"].reshape(targets_NK.shape)
                total -= float((weights_NK * logprobs_NK).sum())
            else:
                ratio_NK = np.exp(logprobs_NK - datum.loss_inputs["logprobs"].reshape(targets_NK.shape))
                weights_NK = ratio_NK * datum.loss_inputs["advantages"].reshape(targets_NK.shape)
                total -= float(weights_NK.sum())
            all_logprobs.append(logprobs_NK.reshape(targets.shape).astype(np.float32))
            if backward:
                for token, logprobs_V, targets_K, weights_K in zip(
                    datum.tokens, logprobs_NV, targets_NK, weights_NK, strict=True
                ):
                    np.subtract.at(model.gradient[token], targets_K, weights_K)
                    model.gradient[token] += weights_K.sum() * np.exp(logprobs_V)
        return ForwardBackwardOutput(logprobs=tuple(all_logprobs), metrics={"loss:sum": total})

    async def optim_step(self, model_id: str, params: AdamParams) -> OptimStepOutput:
        self.calls.append("optim_step")
        model = self.models[model_id]
        model.num_steps += 1
        betas = np.array([params.beta1, params.beta2])[:, None, None]
        model.moments = betas * model.moments + (1 - betas) * np.stack([model.gradient, model.gradient**2])
        first, second = model.moments / (1 - betas**model.num_steps)
        model.table -= params.learning_rate * first / (np.sqrt(second) + params.eps)
        norm = float(np.linalg.norm(model.gradient))
        model.gradient = np.zeros_like(model.table)
        return OptimStepOutput(metrics={"grad_norm:mean": norm})

    async def save_state(self, model_id: str, folder: Path) -> None:
        model = self.models[model_id]
        np.savez(folder / "state.npz", table=model.table, moments=model.moments, steps=model.num_steps)

    async def load_state(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        state, model = np.load(folder / "state.npz"), Model()
        model.table = state["table"]
        if optimizer:
            model.moments, model.num_steps = state["moments"], int(state["steps"])
        self.models[model_id] = model

    async def delete_model(self, model_id: str) -> None:
        del self.models[model_id]
        self.deleted.set()

    async def drop_gradient(self, model_id: str) -> None:
        self.models[model_id].gradient[:] = 0

    async def save_sampler(self, model_id: str, folder: Path) -> None:
        np.save(folder / "table.npy", self.models[model_id].table)

    async def take_snapshot(self, model_id: str, sampler_id: str) -> None:
        self.samplers[sampler_id] = self.models[model_id].table.copy()

    async def open_sampler(self, sampler_id: str, settings: ModelSettings, folder: Path | None) -> None:
        self.samplers[sampler_id] = np.load(folder / "table.npy") if folder else Model().table

    async def close_sampler(self, sampler_id: str) -> None:
        del self.samplers[sampler_id]

    async def sample(self, sampler_id: str, request: SampleRequest) -> SampleOutput:
        assert self.go_on is not None
        self.sampling.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        table, sampling = self.samplers[sampler_id], request.sampling
        random = np.random.default_rng(sampling.seed)
        sequences = []
        for _ in range(request.num_samples):
            tokens: list[int] = [int(request.prompt[-1])]
            logprobs: list[float] = []
            while len(logprobs) < (sampling.max_tokens or 16) and (
                not logprobs or tokens[-1] not in (sampling.stop or ())
            ):
                logprobs_V = log_softmax(table[tokens[-1]] / max(sampling.temperature, 1e-6))
                tokens.append(int(random.choice(VOCABULARY, p=np.exp(logprobs_V))))
                logprobs.append(logprobs_V[tokens[-1]])
            stopped = tokens[-1] in (sampling.stop or ())
            sequences.append(
                SampledSequence(
                    tokens=np.array(tokens[1:], dtype=np.int32),
                    logprobs=np.array(logprobs, dtype=np.float32),
                    stop_reason="stop" if stopped else "length",
                )
            )
        return SampleOutput(
            sequences=tuple(sequences),
            prompt_logprobs=_prompt_logprobs(table, request.prompt) if request.prompt_logprobs else None,
            topk_prompt_logprobs=_top(table, request) if request.topk_prompt_logprobs else None,
        )


def _prompt_logprobs(table: np.ndarray, prompt_N: np.ndarray) -> np.ndarray:
    logprobs = log_softmax(table)[prompt_N[:-1], prompt_N[1:]]
    return np.concatenate([[np.nan], logprobs]).astype(np.float32)


def _top(table: np.ndarray, request: SampleRequest) -> TopLogprobs:
    k = request.topk_prompt_logprobs
    logprobs_NV = log_softmax(table)[request.prompt[:-1]]
    ids_NK = np.argsort(-logprobs_NV, -1, kind="stable")[:, :k]
    return TopLogprobs(
        token_ids=np.concatenate([np.full((1, k), -1), ids_NK]).astype(np.int32),
        logprobs=np.concatenate(
            [np.full((1, k), np.nan), np.take_along_axis(logprobs_NV, ids_NK, -1)]
        ).astype(np.float32),
    )
