"""Completions and logprobs of a base model, a snapshot or saved weights."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any, NoReturn

from tinker import types
from tinker.lib.public_interfaces import APIFuture

from rl.tinker.client.client_futures import FutureOfClient
from rl.tinker.client.convert import sample_request, sample_response
from rl.tinker.client.deprecated import awaited_variant, warn_of
from rl.tinker.client.session import Session
from rl.tinker.client.tokenizers import tokenizer_of
from rl.tinker.client.unsupported import refuse
from rl.tinker.messages import BaseModel, SampleRequest
from rl.tinker.service.service import LOCAL_OWNER

if TYPE_CHECKING:
    from tinker.lib.telemetry import Telemetry
    from transformers import PreTrainedTokenizer


class SamplingClient:
    """Weights that never change. Made by `ServiceClient.create_sampling_client` or by
    `TrainingClient.save_weights_and_get_sampling_client`."""

    def __init__(self, session: Session, *, sampling_session_id: str, base: BaseModel) -> None:
        self._session = session
        self._sampling_session_id = sampling_session_id
        self._base = base
        self._seq_ids = itertools.count()

    def sample(
        self,
        prompt: types.ModelInput,
        num_samples: int,
        sampling_params: types.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: types.TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> APIFuture[types.SampleResponse]:
        """Completions of a prompt. Calls overlap; to cancel the future's `future()` ends the work.

        Raises:
            ValueError: something that is not supported, or no number of tokens of the prompt; at once.
            tinker.BadRequestError, tinker.RequestFailedError: from the future.
        """
        why = "docs/tinker.md lists what is"
        refuse("topk_sample_logprobs", topk_sample_logprobs, only=0, why=why)
        refuse("target_prompt_logprobs", target_prompt_logprobs, only=None, why=why)
        refuse("prompt_alt_tokens_k", prompt_alt_tokens_k, only=0, why=why)
        request = sample_request(
            prompt,
            num_samples,
            sampling_params,
            prompt_logprobs=include_prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
        )
        last_n = prompt_logprobs_last_n
        _check_last_n(last_n, num_tokens=len(request.prompt), asked_for=include_prompt_logprobs)
        return self._session.host.submit(self._sample(request, last_n=last_n), title="sample")

    sample_async = awaited_variant(sample)

    def compute_logprobs(
        self, prompt: types.ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> APIFuture[list[float | None]]:
        """The logprob of each token of a prompt given those before it, nats; None for the first, and for
        those before the last `prompt_logprobs_last_n`."""
        request = sample_request(
            prompt, 1, types.SamplingParams(max_tokens=1), prompt_logprobs=True, topk_prompt_logprobs=0
        )
        _check_last_n(prompt_logprobs_last_n, num_tokens=len(request.prompt), asked_for=True)

        async def compute() -> list[float | None]:
            response = await self._sample(request, last_n=prompt_logprobs_last_n)
            return response.prompt_logprobs

        return self._session.host.submit(compute(), title="compute_logprobs")

    compute_logprobs_async = awaited_variant(compute_logprobs)

    async def _sample(self, request: SampleRequest, *, last_n: int | None) -> types.SampleResponse:
        host, seq_id = self._session.host, next(self._seq_ids)
        service = host.service
        submitted = service.sampling.sample(self._sampling_session_id, seq_id, request, owner=LOCAL_OWNER)
        try:
            output = await host.retrieve(submitted.request_id)
        except asyncio.CancelledError:
            service.cancel(submitted.request_id, owner=LOCAL_OWNER)
            raise
        return sample_response(output, sequence_ids=submitted.sample_sequence_ids, last_n=last_n)

    def get_tokenizer(self) -> PreTrainedTokenizer:
        """That of the base model."""
        return tokenizer_of(self._base.tokenizer_folder)

    def get_base_model(self) -> str:
        """Its name."""
        return self._base.name

    async def get_base_model_async(self) -> str:
        """Deprecated: as `get_base_model`."""
        warn_of("SamplingClient.get_base_model_async()", instead="call get_base_model()")
        return self.get_base_model()

    def get_telemetry(self) -> Telemetry | None:
        """None: nothing is reported to anybody."""
        return None

    def get_sampler_handle(self) -> str:
        """Raises RuntimeError: only this process has the weights."""
        self.__reduce__()

    def __reduce__(self) -> NoReturn:
        raise RuntimeError(
            "a SamplingClient of this process cannot be used in another: start a server "
            "(python -m rl.tinker.server) and use the official client there"
        )

    @staticmethod
    def from_sampler_handle(handle: str, *, api_key: str | None = None) -> SamplingClient:
        """Raises RuntimeError: handles are of the hosted service."""
        raise RuntimeError(f"handle={handle!r} cannot be opened in process: handles are another service's")

    def __repr__(self) -> str:
        return f"<SamplingClient {self._sampling_session_id} of {self._base.name}>"


class BackcompatSamplingClientFuture(FutureOfClient[SamplingClient]):
    """A future of a `SamplingClient`."""


def _check_last_n(last_n: int | None, *, num_tokens: int, asked_for: bool) -> None:
    if last_n is None:
        return
    if not asked_for:
        raise ValueError(f"prompt_logprobs_last_n={last_n} needs include_prompt_logprobs=True")
    if not 1 <= last_n < num_tokens:
        raise ValueError(
            f"prompt_logprobs_last_n={last_n}: must be 1 to {num_tokens - 1}; of {num_tokens} tokens the "
            "first has no logprob"
        )


def base_named(bases: Any, name: str) -> BaseModel:
    """Of the base models that a service has."""
    return next(base for base in bases if base.name == name)


async def create_sampling_client(
    session: Session, *, model_path: str | None = None, base_model: str | None = None
) -> SamplingClient:
    """In the host's loop."""
    service, seq_id = session.host.service, next(session.sampler_seq_ids)
    sampling_session_id = service.sampling.create(
        session.session_id, seq_id, model_path=model_path, base_model=base_model, owner=LOCAL_OWNER
    )
    name = service.sampling.info(sampling_session_id, owner=LOCAL_OWNER).base_model
    return SamplingClient(
        session,
        sampling_session_id=sampling_session_id,
        base=base_named(service.catalogue.base_models(), name),
    )
