"""Sampling sessions, the weights behind them, and requests to sample.

Saved weights open with the first sample, and all sampling sessions of the same version share them. At most
`limits.samplers` snapshots and saved weights of one owner are open: the next one closes the least recently used
one. A snapshot is then gone; saved weights open again with their next sample. Base models stay open. Nothing
closes before its samples have ended.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tinker import types as wire

from rl.tinker.codec import encode_sample
from rl.tinker.datums import check_ids
from rl.tinker.futures import Parts, Result
from rl.tinker.models import find_base
from rl.tinker.sessions import Session
from rl.tinker.storage import Stored
from rl.tinker.types import (
    MAX_SEQ_ID,
    BaseModel,
    GoneError,
    InvalidRequestError,
    LimitReachedError,
    Limits,
    ModelSettings,
    NotFoundError,
    SampleRequest,
    TinkerError,
    check_seq_id,
)
from rl.types import SamplingParams

MAX_TOP_VALUES = 8_000_000
"""Most values of a prompt's top-k table."""
UNSUPPORTED = (
    "base_model",
    "model_path",
    "topk_sample_logprobs",
    "target_prompt_logprobs",
    "prompt_alt_tokens_k",
    "prompt_logprobs_last_n",
    "record_stability_info",
)
"""Fields of a sample that must be off."""


@dataclass(slots=True, eq=False)
class Sampler:
    """Weights that the backend holds to sample from."""

    key: str
    """Base model, folder or snapshot id."""
    sampler_id: str
    owner: str | None
    """Owner, or None for base models, which all owners share."""
    num_samples: int = 0
    """Samples that are not finished."""
    opening: asyncio.Task[None] | None = None
    """Task that opens the weights; None for snapshots, which exist from the start."""
    closed: str | None = None
    """Reason why no more samples are accepted."""

    @property
    def could_not_open(self) -> bool:
        task = self.opening
        return task is not None and task.done() and (task.cancelled() or task.exception() is not None)


class Samplers:
    """The backend's samplers, and when to close them."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._open: dict[str, Sampler] = {}
        """Samplers by key, least recently used first."""
        self._numbers = itertools.count(1)

    async def publish(self, model_id: str, owner: str) -> Sampler:
        """Snapshot a model's weights.

        Raises:
            LimitReachedError: the backend has no room, and all of the owner's samplers are in use.
        """
        sampler_id = f"sampler-{next(self._numbers)}"
        while True:
            try:
                await self._parts.backend.publish(model_id, sampler_id)
                break
            except LimitReachedError as error:
                closing = self._close_oldest(owner, str(error))
                if closing is None:
                    raise
                await asyncio.wait([closing])
        sampler = self._open[sampler_id] = Sampler(key=sampler_id, sampler_id=sampler_id, owner=owner)
        self._make_room(owner)
        return sampler

    def opened(self, base_model: str, stored: Stored | None, owner: str) -> Sampler:
        """Return the sampler of saved weights, or with None of a base model; it may still be opening."""
        key = f"base {base_model}" if stored is None else str(stored.folder)
        found = self._open.get(key)
        if found is None or found.could_not_open:
            settings, folder = ModelSettings(base_model=base_model, lora=None), None
            if stored is not None:
                settings, folder = stored.record.settings, stored.data
            sampler_id = f"sampler-{next(self._numbers)}"
            found = Sampler(key=key, sampler_id=sampler_id, owner=None if stored is None else owner)
            opening = self._parts.backend.open_sampler(sampler_id, settings, folder)
            found.opening = self._parts.background.start(opening, f"opening of {key}")
            self._open[key] = found
        return found

    def acquire(self, sampler: Sampler) -> None:
        """Keep the weights until `release`, and note that they are the most recently used."""
        sampler.num_samples += 1
        self._open[sampler.key] = self._open.pop(sampler.key)
        self._make_room(sampler.owner)

    def release(self, sampler: Sampler) -> None:
        sampler.num_samples -= 1
        if not sampler.num_samples and sampler.closed is not None:
            self._forget(sampler)
        else:
            self._make_room(sampler.owner)

    def close(self, key: str, why: str) -> asyncio.Task[None] | None:
        """Close a sampler if it is open; return the task that closes it now, or None while it has samples."""
        if (sampler := self._open.pop(key, None)) is not None:
            sampler.closed = why
            if not sampler.num_samples:
                return self._forget(sampler)
        return None

    def _make_room(self, owner: str | None) -> None:
        most = self._parts.limits.samplers
        why = (
            f"only the {most} most recently used weights stay open (limit samplers); save the weights under a "
            "name to keep them"
        )
        while owner is not None and sum(one.owner == owner for one in self._open.values()) > most:
            if self._close_oldest(owner, why) is None:
                break

    def _close_oldest(self, owner: str, why: str) -> asyncio.Task[None] | None:
        """Close the owner's least recently used sampler without samples, if there is one."""
        for key, sampler in self._open.items():
            if sampler.owner == owner and not sampler.num_samples:
                return self.close(key, why)
        return None

    def _forget(self, sampler: Sampler) -> asyncio.Task[None]:
        async def forget() -> None:
            if sampler.opening is not None:
                await asyncio.wait([sampler.opening])
            if not sampler.could_not_open:
                await self._parts.backend.close_sampler(sampler.sampler_id)

        return self._parts.background.start(forget(), f"closing of {sampler.sampler_id}")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplingSession:
    sampling_session_id: str
    session: Session
    base: BaseModel
    source: Sampler | Stored | None
    """Snapshot in memory, saved weights, or None for the base model itself."""

    @property
    def model_path(self) -> str | None:
        return str(self.source.path) if isinstance(self.source, Stored) else None


class SamplingSessions:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._samplers = Samplers(parts)
        self._sampling: dict[str, SamplingSession] = {}
        parts.sessions.on_end.append(self._end_session)

    def create(self, body: wire.CreateSamplingSessionRequest, *, owner: str) -> str:
        """Open a sampling session of saved sampler weights or of a base model, and return its id.

        The same call returns the same id. Weights load with the first sample; if they are replaced or deleted
        before, that sample fails.

        Raises:
            InvalidRequestError: the base model is missing, unknown or not the path's, or the path has weights for
                training.
            NotFoundError, GoneError: there is no such session or path.
        """
        session = self._parts.sessions.live(body.session_id, owner)
        sampling_session_id = self.id_of(session, body.sampling_session_seq_id)
        if sampling_session_id in self._sampling:
            return sampling_session_id
        stored, name = None, body.base_model
        if body.model_path is not None:
            stored = self._parts.storage.find_weights(
                body.model_path, "sampler", owner, base_model=body.base_model
            )
            name = stored.record.settings.base_model
        self._add(session, sampling_session_id, find_base(self._parts.backend, name), stored)
        return sampling_session_id

    def id_of(self, session: Session, sampling_session_seq_id: int | None) -> str:
        number = check_seq_id("sampling_session_seq_id", sampling_session_seq_id, first=0)
        return f"{session.session_id}:sample:{number}"

    async def publish(
        self, model_id: str, sampling_session_id: str, session: Session, base: BaseModel
    ) -> None:
        """Open a sampling session of a model's weights as they are now."""
        sampler = await self._samplers.publish(model_id, session.owner)
        try:
            if not self._parts.sessions.is_live(session):
                raise GoneError(f"session {session.session_id} has ended")
            self._add(session, sampling_session_id, base, sampler)
        except TinkerError as error:
            self._samplers.close(sampler.key, str(error))
            raise

    def _add(
        self, session: Session, sampling_session_id: str, base: BaseModel, source: Sampler | Stored | None
    ) -> None:
        if sampling_session_id in self._sampling:
            raise InvalidRequestError(
                f"sampling_session_seq_id: there is a sampling session {sampling_session_id} already"
            )
        self._sampling[sampling_session_id] = SamplingSession(
            sampling_session_id=sampling_session_id, session=session, base=base, source=source
        )
        session.sampling_session_ids.append(sampling_session_id)

    def sample(self, body: wire.SampleRequest, *, owner: str) -> str:
        """Start a sample and return its request id; its result is a `SampleResponse`.

        The same (sampling_session_id, seq_id) is the same request as long as its result is kept. Seq ids count
        from 0, in any order.

        Raises:
            InvalidRequestError, NotFoundError, BusyError
            GoneError: the session has ended, or its weights were closed for newer ones.
        """
        if body.sampling_session_id is None:
            raise InvalidRequestError("sampling_session_id: is missing; create_sampling_session returns it")
        one = self.live(body.sampling_session_id, owner)
        seq_id = check_seq_id("seq_id", body.seq_id, first=0)
        request = checked_request(body, one.base, self._parts.limits)
        request_id = f"{one.sampling_session_id}:{seq_id}"
        futures = self._parts.futures
        if request_id not in futures:
            sampler = self._sampler(one)
            future = futures.begin(request_id, owner=owner, num_bytes=request.prompt.nbytes)

            async def sampled() -> Result:
                if sampler.opening is not None:
                    await asyncio.shield(sampler.opening)
                output = await self._parts.backend.sample(sampler.sampler_id, request)
                return encode_sample(output, request)

            self._samplers.acquire(sampler)
            future.task = self._parts.background.start(futures.run(future, sampled), f"sample {request_id}")
            future.task.add_done_callback(lambda _: self._samplers.release(sampler))
        return request_id

    def live(self, sampling_session_id: str, owner: str) -> SamplingSession:
        """Return a sampling session and keep its session alive."""
        self._parts.sessions.live(sampling_session_id, owner)
        if (one := self._sampling.get(sampling_session_id)) is None:
            raise NotFoundError(f"there is no sampling session {sampling_session_id!r:.100}")
        return one

    def _sampler(self, one: SamplingSession) -> Sampler:
        if not isinstance(one.source, Sampler):
            return self._samplers.opened(one.base.name, one.source, one.session.owner)
        if (why := one.source.closed) is not None:
            raise GoneError(f"the weights of {one.sampling_session_id} are no longer in memory: {why}")
        return one.source

    def _end_session(self, session: Session, why: str) -> None:
        self._parts.futures.end_samples(session.session_id, why)
        ended = [self._sampling.pop(one_id) for one_id in session.sampling_session_ids]
        still_used = {one.source.folder for one in self._sampling.values() if isinstance(one.source, Stored)}
        for one in ended:
            if isinstance(one.source, Sampler):
                self._samplers.close(one.source.key, why)
            elif isinstance(one.source, Stored) and one.source.folder not in still_used:
                self._samplers.close(str(one.source.folder), why)


# Requests


def checked_request(body: wire.SampleRequest, base: BaseModel, limits: Limits) -> SampleRequest:
    """Translate a request, with its defaults filled in.

    Raises:
        InvalidRequestError: a field is unsupported or out of range; the text names it.
    """
    for name in UNSUPPORTED:
        if value := getattr(body, name):
            raise InvalidRequestError(f"{name}: {value!a:.80} is not supported; leave it out")
    params = body.sampling_params
    prompt = _prompt(body, base)
    _check_ranges(body, prompt.size, base, limits)
    stop: Sequence[str | int] = base.stop_token_ids
    if params.stop is not None:
        stop = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop)
    if "" in stop:
        raise InvalidRequestError("sampling_params.stop: has an empty text, which would end every completion")
    stop_ids = [entry for entry in stop if isinstance(entry, int)]
    check_ids(np.array(stop_ids, object), base.vocab_size, where="sampling_params.stop")
    room = base.max_context_length - prompt.size
    return SampleRequest(
        prompt=prompt,
        sampling=SamplingParams(
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            num_samples=body.num_samples,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=min(max(0, params.top_k), base.vocab_size),
            stop_token_ids=tuple(stop_ids),
            stop_texts=tuple(entry for entry in stop if isinstance(entry, str)),
            seed=secrets.randbits(62) if params.seed is None else params.seed,
        ),
        prompt_logprobs=bool(body.prompt_logprobs),
        topk_prompt_logprobs=body.topk_prompt_logprobs,
    )


def _prompt(body: wire.SampleRequest, base: BaseModel) -> np.ndarray:
    tokens: list[int] = []
    for i, chunk in enumerate(body.prompt.chunks):
        if chunk.type != "encoded_text":
            raise InvalidRequestError(f"prompt.chunks[{i}].type: {chunk.type!a}, must be 'encoded_text'")
        tokens += chunk.tokens
    asks_prompt = body.prompt_logprobs or body.topk_prompt_logprobs > 0
    longest = base.max_context_length if asks_prompt else base.max_context_length - 1
    if not 1 <= len(tokens) <= longest:
        raise InvalidRequestError(
            f"prompt: has {len(tokens)} tokens: must be 1 to {longest}; the model's context has "
            f"{base.max_context_length}"
        )
    check_ids(np.array(tokens, object), base.vocab_size, where="prompt")
    return np.array(tokens, np.int32)


def _check_ranges(body: wire.SampleRequest, num_tokens: int, base: BaseModel, limits: Limits) -> None:
    params, lowest = body.sampling_params, base.min_temperature
    most_top = min(base.vocab_size, MAX_TOP_VALUES // num_tokens) if base.topk_prompt_logprobs else 0
    for name, value, lower, upper in (
        ("num_samples", body.num_samples, 1, limits.samples_per_request),
        ("topk_prompt_logprobs", body.topk_prompt_logprobs, 0, most_top),
        ("sampling_params.max_tokens", params.max_tokens, 1, math.inf),
        ("sampling_params.temperature, unless it is 0", params.temperature or lowest, lowest, 1e30),
        ("sampling_params.top_p", params.top_p, 1e-30, 1),
        ("sampling_params.top_k", params.top_k, -1, math.inf),
        ("sampling_params.seed", params.seed, 0, MAX_SEQ_ID),
    ):
        if value is not None and not lower <= value <= upper:
            raise InvalidRequestError(f"{name}={value!r:.100}: must be {lower} to {upper}")
