"""Sampling sessions, the weights behind them, and requests to sample.

Saved weights open with the first sample, and all sampling sessions of a checkpoint share them. An
owner has at most `limits.samplers` open: the least recently used close first, as do weights that no
session uses, once their samples have ended. Closed checkpoints open again with the next sample,
closed snapshots are gone. The base model stays open.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from tinker import types as wire

from rl.tinker.backend import TinkerBackend
from rl.tinker.base_model import make_lora_config
from rl.tinker.service.futures import (
    SMALL_BYTES,
    Background,
    Futures,
    Result,
    encode_message,
)
from rl.tinker.service.sequences import SampledSequences
from rl.tinker.service.sessions import KEPT, Session, Sessions
from rl.tinker.service.storage import Storage, Stored
from rl.tinker.service.streams import ModelStream
from rl.tinker.types import (
    Future,
    GoneError,
    Id,
    InvalidRequestError,
    LedgerMark,
    LimitReachedError,
    Limits,
    ModelSettings,
    NotFoundError,
    Owner,
    SampleOutput,
    SampleRequest,
    check_base,
    check_seq_id,
)
from rl.tinker.wire.codec import SampleBody, check_sample, encode_sample


@dataclass(slots=True, eq=False)
class Weights:
    """Version of weights at the backend: a snapshot, saved weights, or the base model's."""

    key: str
    """Folder, version of a snapshot, or "base"."""
    owner: str | None
    """Owner; None for the base model."""
    version: asyncio.Future[int]
    """The backend's number for them; pending while they open."""
    num_bytes: int = 0
    name: str = "the base model"
    """The weights in the words of a ledger."""
    mark: LedgerMark | None = None
    """Step of the ledger after which a model had them; None: they are of no ledger."""
    num_samples: int = 0
    """Samples in progress."""
    closed: str | None = None
    """Reason why no more samples are accepted."""

    @property
    def could_not_open(self) -> bool:
        """True if the backend has failed to open them; the next sample tries again."""
        return self.version.done() and (
            self.version.cancelled() or self.version.exception() is not None
        )


Source: TypeAlias = Weights | Stored | None
"""What a sampling session samples from: a snapshot, saved weights, or None for the base model."""


class OpenWeights:
    """The weights that are open, and when to close them."""

    def __init__(
        self,
        *,
        backend: TinkerBackend,
        sessions: Sessions,
        background: Background,
        limits: Limits,
        sequences: SampledSequences | None = None,
    ) -> None:
        """`sequences` are told what is sampled, for the ledgers."""
        self._backend = backend
        self._sessions = sessions
        self._background = background
        self._limits = limits
        self._sequences = sequences
        self._open: dict[str, Weights] = {}
        """Weights by key, least recently used first."""

    async def publish(self, model: ModelStream) -> Weights:
        """Snapshot a model's weights.

        Raises:
            LimitReachedError: there is no room, and all weights that could make room are in use.
        """
        owner, num_bytes = model.owner, self._count_bytes(model.settings)
        version = asyncio.get_running_loop().create_future()
        # The backend may have less room than the limits say, above all for whole models.
        while not version.done():
            self.make_room(owner, num_bytes)
            try:
                version.set_result(await self._backend.publish(model.model_id, owner))
            except LimitReachedError as error:
                closing = self._close_oldest(owner, str(error))
                if closing is None:
                    raise
                await asyncio.wait([closing])
        weights = Weights(f"snapshot {version.result()}", owner, version, num_bytes)
        if model.ledger is not None:
            weights.mark = mark = model.ledger.mark
            weights.name = f"{mark.model_id} after step {mark.step}"
        self._open[weights.key] = weights
        self._close_surplus(owner)
        return weights

    def open(self, stored: Stored | None, owner: str) -> Weights:
        """Return saved weights, or the base model's (None); they may still be opening."""
        key = "base" if stored is None else str(stored.data)
        weights = self._open.get(key)
        if weights is None or weights.could_not_open:
            weights = self._open[key] = self._start_opening(key, stored, owner)
        return weights

    def _start_opening(self, key: str, stored: Stored | None, owner: str) -> Weights:
        if stored is None:
            # The base model belongs to nobody, so nobody's limit counts it.
            opening = self._backend.open(None, None, owner)
            version = self._background.start(opening, f"opening of {key}")
            return Weights(key, None, version)

        settings = stored.record.settings
        adapters = None
        if settings.lora is not None:
            adapters = make_lora_config(settings.lora, self._backend.base_model)
        num_bytes = self._count_bytes(settings)
        self.make_room(owner, num_bytes)
        opening = self._backend.open(adapters, stored.data, owner)
        version = self._background.start(opening, f"opening of {key}")
        name, mark = stored.path.tinker_path, stored.record.ledger
        return Weights(key, owner, version, num_bytes, name=name, mark=mark)

    async def sample(
        self, weights: Weights, request: SampleRequest, *, owner: str, name: str
    ) -> SampleOutput:
        """Return a sample of weights that are acquired; `name` is that of the request."""
        # Shared with other samples: one that is cancelled must not stop the opening.
        version = await asyncio.shield(weights.version)
        output = await self._backend.sample(version, request, owner)
        if self._sequences is not None:
            self._sequences.remember(
                request.prompt,
                output.completions,
                owner=owner,
                request=name,
                generator=weights.name,
                mark=weights.mark,
            )
        return output

    def make_room(self, owner: str, num_bytes: int) -> None:
        """Close weights until there is room for more state.

        Raises:
            LimitReachedError: there is none, and all weights that could make room are in use.
        """
        most = self._limits.most_state_bytes
        while num_bytes:
            bytes_by_owner = self._sum_state_bytes()
            if bytes_by_owner.total() + num_bytes <= most:
                return
            # With what it asks for, this owner may be the one who has most.
            bytes_by_owner[owner] += num_bytes
            why = (
                "limit all_state_bytes: the models and open weights of all keys have more than "
                f"{most} bytes"
            )
            if self._close_oldest(owner, why, bytes_by_owner) is None:
                raise LimitReachedError(f"{why}; finish a session")

    def _sum_state_bytes(self) -> Counter[str]:
        """Return the bytes of models and open weights by owner."""
        bytes_by_owner: Counter[str] = Counter()
        for model in self._sessions.list_all_streams():
            bytes_by_owner[model.owner] += model.num_bytes
        for one in self._open.values():
            bytes_by_owner[one.owner or ""] += one.num_bytes  # 0 of the base model's
        return bytes_by_owner

    def _count_bytes(self, settings: ModelSettings) -> int:
        """Return the bytes of a snapshot of a model's trained weights."""
        return 4 * self._backend.base_model.count_trained(settings.lora)

    def acquire(self, weights: Weights) -> None:
        """Keep weights open until `release`, and mark them as the most recently used."""
        weights.num_samples += 1
        # The end of the dict is the place of the most recently used.
        self._open[weights.key] = self._open.pop(weights.key)
        self._close_surplus(weights.owner)

    def release(self, weights: Weights) -> None:
        """End a use of `acquire`, and close weights that were only open for it."""
        weights.num_samples -= 1
        if not weights.num_samples and weights.closed is not None:
            self._forget(weights)
        else:
            self._close_surplus(weights.owner)

    def close(self, key: str, why: str) -> asyncio.Task[None] | None:
        """Close weights; return the task that does so, or None if it comes after their samples."""
        weights = self._open.pop(key, None)
        if weights is not None:
            weights.closed = why
            # Samples in progress keep the version at the backend; `release` forgets it.
            if not weights.num_samples:
                return self._forget(weights)
        return None

    def _close_surplus(self, owner: str | None) -> None:
        most = self._limits.samplers
        why = (
            f"only the {most} most recently used weights stay open (limit samplers); save the "
            "weights under a name to keep them"
        )
        while owner is not None and self._count_open()[owner] > most:
            if self._close_oldest_of(owner, why) is None:
                break

    def _count_open(self) -> Counter[str]:
        """Return the number of open weights by owner, without the base model's."""
        return Counter(one.owner for one in self._open.values() if one.owner is not None)

    def _close_oldest(
        self, owner: str, why: str, amounts: Counter[str] | None = None
    ) -> asyncio.Task[None] | None:
        """Close weights of the owner who has most, by number unless given, or else of this one."""
        amounts = self._count_open() if amounts is None else amounts
        most = max(amounts, key=lambda one: (amounts[one], one == owner), default=owner)
        return self._close_oldest_of(most, why) or self._close_oldest_of(owner, why)

    def _close_oldest_of(self, owner: str, why: str) -> asyncio.Task[None] | None:
        """Close the owner's least recently used weights without samples, if there are any."""
        for key, weights in self._open.items():
            if weights.owner == owner and not weights.num_samples:
                return self.close(key, why)
        return None

    def _forget(self, weights: Weights) -> asyncio.Task[None]:
        async def forget() -> None:
            # Weights may be closed while they open, and only an open version can be forgotten.
            await asyncio.wait([weights.version])
            if not weights.could_not_open:
                await self._backend.forget(weights.version.result())

        return self._background.start(forget(), f"closing of {weights.key}")


class SamplingSessions:
    """Calls about sampling sessions, each of which samples from one source."""

    def __init__(
        self,
        *,
        backend: TinkerBackend,
        storage: Storage,
        sessions: Sessions,
        futures: Futures,
        background: Background,
        weights: OpenWeights,
    ) -> None:
        self.weights = weights
        self._backend = backend
        self._storage = storage
        self._sessions = sessions
        self._futures = futures
        self._background = background
        self._sources: dict[str, dict[str, Source]] = {}
        """Sources by id of the session and of the sampling session. The least recently used one of
        a session comes first, and is forgotten beyond `KEPT`."""

    async def create_sampling_session(
        self, body: wire.CreateSamplingSessionRequest, *, owner: Owner
    ) -> wire.CreateSamplingSessionResponse:
        """Open a sampling session of saved sampler weights or of the base model; the same call
        returns the same id.

        Weights load with the first sample, which fails if they are replaced or deleted before.
        """
        session = self._sessions.find_live(body.session_id, owner)
        new_id = self.make_id(session, body.sampling_session_seq_id)
        if new_id not in self._get_sources(session):
            stored, name = None, self._backend.base_model.resolve_alias(body.base_model)
            if body.model_path is not None:
                stored = self._storage.find_weights(
                    body.model_path, "sampler", owner, base_model=name
                )
                name = stored.record.settings.base_model
                # A session keeps many, and would keep the metadata of each.
                stored = replace(
                    stored, record=stored.record.model_copy(update={"user_metadata": None})
                )
            check_base(self._backend.base_model, name)
            self._add(session, new_id, stored)
        return wire.CreateSamplingSessionResponse(sampling_session_id=new_id)

    async def asample(self, body: SampleBody, *, owner: Owner) -> Future:
        """Start a sample; raise GoneError when its weights were closed for newer ones.

        The same (sampling_session_id, seq_id) is the same request while its result is kept. Seq ids
        count from 0, in any order.
        """
        session_id = body.sampling_session_id
        if session_id is None:
            raise InvalidRequestError(
                "sampling_session_id: is missing; create_sampling_session returns it"
            )
        source = self.find_source(session_id, owner)
        request_id = f"{session_id}:{check_seq_id('seq_id', body.seq_id, first=0)}"
        sample = check_sample(body, self._backend.base_model)
        if request_id not in self._futures:
            # A session may be older than a deletion, so its weights are checked at each sample.
            weights = self._open_source(source, owner)
            stop = body.sampling_params.stop or ()
            # A character has at most 4 bytes in memory, and an integer about 32.
            stop_bytes = 0
            for one in stop:
                stop_bytes += 4 * len(one) if isinstance(one, str) else 32
            num_bytes = sample.prompt.nbytes + SMALL_BYTES * body.num_samples + stop_bytes
            request = self._futures.accept(request_id, owner=owner, num_bytes=num_bytes)

            async def draw() -> Result:
                output = await self.weights.sample(weights, sample, owner=owner, name=request_id)
                return await encode_message(
                    partial(encode_sample, output, sample), num_bytes=output.num_bytes
                )

            self.weights.acquire(weights)
            request.task = self._background.start(
                self._futures.complete(request, draw), f"sample {request_id}"
            )
            request.task.add_done_callback(lambda _: self.weights.release(weights))
        # The client names single samples of the request by these.
        ids = [f"{request_id}:{i}" for i in range(body.num_samples)]
        return Future(request_id=request_id, model_id=session_id, sample_sequence_ids=ids)

    async def get_sampler(self, sampler_id: Id, *, owner: Owner) -> wire.GetSamplerResponse:
        """Return the base model and the path that a sampling session samples from."""
        source = self.find_source(sampler_id, owner)
        path = source.path.tinker_path if isinstance(source, Stored) else None
        base_model = self._backend.base_model.name
        return wire.GetSamplerResponse(
            sampler_id=sampler_id, base_model=base_model, model_path=path
        )

    # For the other calls

    def find_source(self, sampling_session_id: str, owner: str) -> Source:
        """Return what a sampling session samples from, and keep the session alive."""
        session = self._sessions.find_live(sampling_session_id, owner)
        sources = self._get_sources(session)
        if sampling_session_id not in sources:
            raise NotFoundError(f"there is no sampling session {sampling_session_id!r:.100}")
        # The end of the dict is the place of the most recently used.
        source = sources[sampling_session_id] = sources.pop(sampling_session_id)
        return source

    def make_id(self, session: Session, sampling_session_seq_id: int | None) -> str:
        """Return the id of a sampling session, which clients derive too."""
        number = check_seq_id("sampling_session_seq_id", sampling_session_seq_id, first=0)
        return f"{session.session_id}:sample:{number}"

    async def publish(self, model: ModelStream, *, session: Session, new_id: str) -> None:
        """Open a sampling session of a model's weights as they are now, in the model's session."""
        taken = f"sampling_session_seq_id: there is a sampling session {new_id} already"
        if new_id in self._get_sources(session):
            raise InvalidRequestError(taken)
        weights = await self.weights.publish(model)
        if session.ended:
            self.weights.close(weights.key, "its session has ended")
            raise GoneError(f"session {session.session_id} has ended")
        if new_id in self._get_sources(session):  # another model of the session was faster
            self.weights.close(weights.key, taken)
            raise InvalidRequestError(taken)
        self._add(session, new_id, weights)

    def close_checkpoint(self, stored: Stored) -> None:
        """Accept no more samples of a checkpoint that was deleted."""
        self.weights.close(str(stored.data), f"{stored.path.tinker_path} was deleted")

    def end_session(self, session: Session, why: str) -> None:
        """Fail the samples of a session that has ended, and close weights that only it has open."""
        self._futures.end_samples(session.session_id, why)
        ended = self._sources.pop(session.session_id, {})
        # Sessions share saved weights, which stay open while any of them has a sampling session.
        still_used = set()
        for sources in self._sources.values():
            for source in sources.values():
                if isinstance(source, Stored):
                    still_used.add(source.data)
        for source in ended.values():
            if isinstance(source, Weights):
                self.weights.close(source.key, why)
            elif source is not None and source.data not in still_used:
                self.weights.close(str(source.data), why)

    def _get_sources(self, session: Session) -> dict[str, Source]:
        return self._sources.get(session.session_id, {})

    def _add(self, session: Session, new_id: str, source: Source) -> None:
        sources = self._sources.setdefault(session.session_id, {})
        sources[new_id] = source
        if len(sources) > KEPT:
            oldest = sources.pop(next(iter(sources)))
            if isinstance(oldest, Weights):
                self.weights.close(oldest.key, f"a session keeps its {KEPT} last sampling sessions")

    def _open_source(self, source: Source, owner: str) -> Weights:
        if not isinstance(source, Weights):
            if source is not None:
                # Deleted and expired checkpoints are not sampled from, even while they are open.
                self._storage.find(source.path, owner)
            return self.weights.open(source, owner)
        if source.closed is not None:
            raise GoneError(f"the weights are no longer in memory: {source.closed}")
        return source
