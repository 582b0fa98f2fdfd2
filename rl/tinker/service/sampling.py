"""Sampling sessions: what clients sample from."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from rl.tinker.backend import Backend
from rl.tinker.errors import GoneError, InvalidRequestError, LimitReachedError, NotFoundError
from rl.tinker.messages import SampleOutput, SampleRequest
from rl.tinker.service.background import Background
from rl.tinker.service.checks import check_sample, check_seq_id, find_base
from rl.tinker.service.futures import Futures, Request
from rl.tinker.service.limits import Limits
from rl.tinker.service.names import parse_path
from rl.tinker.service.responses import SamplerInfo, SubmittedSample
from rl.tinker.service.samplers import Sampler, Samplers
from rl.tinker.service.sessions import Session, Sessions
from rl.tinker.service.storage import Storage, Stored


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """Weights of a model as they were once, in memory."""

    model_id: str
    sampler: Sampler


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplingSession:
    sampling_session_id: str
    session: Session
    base_model: str
    source: Snapshot | Stored | None
    """None: the base model itself."""


class SamplingSessions:
    def __init__(
        self,
        *,
        backend: Backend,
        storage: Storage,
        samplers: Samplers,
        sessions: Sessions,
        futures: Futures,
        background: Background,
        limits: Limits,
    ) -> None:
        self._backend = backend
        self._storage = storage
        self._samplers = samplers
        self._sessions = sessions
        self._futures = futures
        self._background = background
        self._limits = limits
        self._sampling: dict[str, SamplingSession] = {}
        self._num_open: Counter[str] = Counter()
        """By owner."""
        sessions.on_end.append(self._end_session)

    def create(
        self,
        session_id: str,
        sampling_session_seq_id: int,
        *,
        model_path: str | None = None,
        base_model: str | None = None,
        owner: str,
    ) -> str:
        """Its id, `<session_id>:sample:<sampling_session_seq_id>`, the same for the same call.

        Of saved sampler weights (`tinker://.../sampler_weights/<name>`), or of a base model. Weights are
        loaded with the first sample; those that are then replaced or deleted are gone for it.

        Raises:
            InvalidRequestError: neither or an unknown base model, a path of weights for training, or a base
                model other than the path's.
            NotFoundError, GoneError: session or path.
            LimitReachedError: `limits.sampling_sessions`.
        """
        session = self._sessions.live(session_id, owner)
        sampling_session_id = self.id_of(session, sampling_session_seq_id)
        if sampling_session_id in self._sampling:
            return sampling_session_id
        if model_path is None:
            if base_model is None:
                raise InvalidRequestError(
                    "one of model_path and base_model says what is sampled from; both are missing"
                )
            if not find_base(self._backend, base_model).sampleable:
                raise InvalidRequestError(f"base_model is {base_model!r}, which cannot be sampled from")
            self.add(session, sampling_session_id, base_model, None)
        else:
            stored = self._find_weights(model_path, base_model, owner)
            self.add(session, sampling_session_id, stored.record.settings.base_model, stored)
        return sampling_session_id

    def _find_weights(self, model_path: str, base_model: str | None, owner: str) -> Stored:
        path = parse_path(model_path)
        if path.kind != "sampler":
            raise InvalidRequestError(
                f"model_path is {model_path}, weights for training; save_weights_for_sampler saves "
                "those to sample from"
            )
        stored = self._storage.find(path, owner)
        own = stored.record.settings.base_model
        if base_model not in (None, own):
            raise InvalidRequestError(f"base_model is {base_model!r}, but {model_path} is of {own!r}")
        find_base(self._backend, own)
        return stored

    def id_of(self, session: Session, sampling_session_seq_id: int) -> str:
        check_seq_id("sampling_session_seq_id", sampling_session_seq_id, first=0)
        return f"{session.session_id}:sample:{sampling_session_seq_id}"

    def check_new(self, sampling_session_id: str, owner: str) -> None:
        """Raise for one that could not be added."""
        if sampling_session_id in self._sampling:
            raise InvalidRequestError(
                f"sampling_session_seq_id: there is a sampling session {sampling_session_id}"
            )
        if self._num_open[owner] >= self._limits.sampling_sessions:
            raise LimitReachedError(
                f"limit sampling_sessions: {self._limits.sampling_sessions} are open; finish a session"
            )

    def add(
        self, session: Session, sampling_session_id: str, base_model: str, source: Snapshot | Stored | None
    ) -> None:
        self.check_new(sampling_session_id, session.owner)
        self._sampling[sampling_session_id] = SamplingSession(
            sampling_session_id=sampling_session_id, session=session, base_model=base_model, source=source
        )
        session.sampling_session_ids.append(sampling_session_id)
        self._num_open[session.owner] += 1

    def sample(
        self, sampling_session_id: str, seq_id: int, request: SampleRequest, *, owner: str
    ) -> SubmittedSample:
        """-> SampleOutput. The same (sampling_session_id, seq_id) is the same request, as long as its result
        is kept. Seq ids from 0, in any order.

        Raises:
            InvalidRequestError, NotFoundError, BusyError
            GoneError: the session has ended, or the weights were closed for newer ones.
        """
        one = self._live(sampling_session_id, owner)
        check_seq_id("seq_id", seq_id, first=0)
        check_sample(request, self._limits)  # of a repetition too, whose ids are many at once
        request_id = f"{sampling_session_id}:{seq_id}"
        if request_id not in self._futures:
            self._backend.check_request(one.base_model, request)
            sampler = self._sampler(one)
            future = self._futures.begin(request_id, owner=owner, num_bytes=request.prompt.nbytes)
            self._start(future, sampler, request)
        return SubmittedSample(
            request_id=request_id,
            sample_sequence_ids=tuple(f"{request_id}:{i}" for i in range(request.num_samples)),
        )

    def _start(self, future: Request, sampler: Sampler, request: SampleRequest) -> None:
        async def sampled() -> SampleOutput:
            if sampler.opening is not None:
                await asyncio.shield(sampler.opening)
            return await self._backend.sample(sampler.sampler_id, request)

        async def work() -> None:
            await self._futures.run(future, sampled)

        self._samplers.acquire(sampler)
        future.task = self._background.start(work(), f"sample {future.request_id}")
        future.task.add_done_callback(lambda _: self._samplers.release(sampler))

    def info(self, sampling_session_id: str, *, owner: str) -> SamplerInfo:
        one = self._live(sampling_session_id, owner)
        return SamplerInfo(
            sampling_session_id=sampling_session_id,
            base_model=one.base_model,
            model_path=str(one.source.path) if isinstance(one.source, Stored) else None,
        )

    def _live(self, sampling_session_id: str, owner: str) -> SamplingSession:
        self._sessions.live(sampling_session_id, owner)
        if (one := self._sampling.get(sampling_session_id)) is None:
            raise NotFoundError(f"there is no sampling session {sampling_session_id}")
        return one

    def _sampler(self, one: SamplingSession) -> Sampler:
        if one.source is None:
            return self._samplers.of_base(one.base_model)
        if isinstance(one.source, Stored):
            return self._samplers.of_saved(one.source, one.session.owner)
        if (why := one.source.sampler.closed) is not None:
            raise GoneError(f"the weights of {one.sampling_session_id} are no longer in memory: {why}")
        return one.source.sampler

    def _end_session(self, session: Session, why: str) -> None:
        self._futures.end_samples(session.session_id, session.owner, why)
        ended = [self._sampling.pop(one_id) for one_id in session.sampling_session_ids]
        self._num_open[session.owner] -= len(ended)
        if not self._num_open[session.owner]:
            del self._num_open[session.owner]
        still_used = {
            one.source.folder
            for one in self._sampling.values()
            if one.session.owner == session.owner and isinstance(one.source, Stored)
        }
        for one in ended:
            if isinstance(one.source, Snapshot):
                self._samplers.close_snapshot(one.source.model_id, one.source.sampler, why)
            elif isinstance(one.source, Stored) and one.source.folder not in still_used:
                self._samplers.close_saved(one.source, session.owner, why)
