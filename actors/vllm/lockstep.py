"""Keeps the tensor-parallel ranks of a generator in step: rank 0 decides, the others follow.

Before each engine step rank 0 sends a `Turn`. Every rank then does exactly what it says, in
order, so schedulers, caches and samplers stay the same without talking to each other. Each
turn also carries a digest of what rank 0 drew in the one before; a rank that drew anything
else stops there and then, instead of producing logprobs of somebody else's tokens.

While nothing runs, rank 0 sends an empty turn from time to time. A rank that hears nothing for
longer than the deadline gives up; one whose peer has died sees its connection close at once.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from rl.types import FinishReason

IDLE_TURNS_PER_TIMEOUT = 4


class SilentRankError(ConnectionError, TimeoutError):
    """A rank that is connected did not take part within the deadline."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Request:
    """One completion to be made, or one sequence to be scored."""

    id: int
    prompt: np.ndarray
    """[T] int32; of a completion that is continued, with the tokens that it has."""
    max_tokens: int
    """Most tokens after `prompt`."""
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: tuple[int, ...]
    seed: int
    num_begun: int = 0
    """How many of `prompt`'s last tokens are the completion's."""
    scored: int | None = None
    """Of a sequence to be scored, its last token: taken instead of a drawn one, and the logprobs of
    `prompt` are wanted too."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Drawn:
    """The tokens of one step, in three lists of equal length."""

    request_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    """Nats."""
    finished: dict[int, FinishReason]
    """Requests for which this was the last token."""
    prompt_logprobs: dict[int, np.ndarray] = field(default_factory=dict)
    """Of scored requests that end here: [T - 1] float32, nats, of their prompts' tokens but the first."""
    diverged: set[int] = field(default_factory=set)
    """Requests with a logprob that is not a number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What every rank does next, in the order of the fields."""

    admit: tuple[Request, ...] = ()
    abort: tuple[int, ...] = ()
    """Ids of requests that end as they are."""
    step: bool = False
    """Whether the engine makes a step."""
    update: int | None = None
    """Policy version whose weights every rank takes now."""
    asleep: bool | None = None
    """Whether memory is given back or taken again; neither when None. Only when no request is running."""
    stop: bool = False
    """The last turn."""


class Lockstep:
    """One rank's end. Alone (`size` 1) it does nothing, and costs nothing."""

    def __init__(self, *, rank: int, size: int, timeout_s: float) -> None:
        """Collective: all ranks make theirs at the same point."""
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self._digest = 0
        self._group = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if size > 1 else None
        )

    @property
    def idle_turn_s(self) -> float | None:
        """How often rank 0 sends a turn when there is nothing to do; None when nobody listens."""
        return self.timeout_s / IDLE_TURNS_PER_TIMEOUT if self.size > 1 else None

    def send(self, turn: Turn) -> None:
        """On rank 0.

        Raises:
            ConnectionError: a rank is gone.
        """
        if self._group is None:
            return
        # Most turns are plain steps: those take one small message and no pickling.
        payload = b"" if turn == Turn(step=True) else pickle.dumps(turn)
        with self._awaiting("the others to take a turn"):
            self._broadcast(torch.tensor([len(payload), self._digest]))
            if payload:
                self._broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8))

    def receive(self) -> Turn:
        """On every other rank; blocks until rank 0 has decided.

        Raises:
            ConnectionError: rank 0 is gone, or was silent for `timeout_s`.
            RuntimeError: this rank drew other tokens than rank 0.
        """
        header = torch.empty(2, dtype=torch.int64)
        with self._awaiting("rank 0's next turn"):
            self._broadcast(header)
            size, digest = header.tolist()
            payload = torch.empty(size, dtype=torch.uint8)
            if size:
                self._broadcast(payload)
        if digest != self._digest:
            raise RuntimeError(
                f"generator rank {self.rank} drew other tokens than rank 0 "
                f"(digest {self._digest:#x}, rank 0 has {digest:#x})"
            )
        return pickle.loads(payload.numpy().tobytes()) if size else Turn(step=True)

    def record(self, drawn: Drawn) -> None:
        """Of the step just made, for the comparison at the next turn."""
        if self._group is not None:
            columns = np.array([drawn.request_ids, drawn.token_ids], dtype=np.int64)
            self._digest = zlib.crc32(columns.tobytes(), self._digest)

    def all_agree(self, ok: bool) -> bool:
        """Whether all ranks say yes; collective.

        Raises:
            ConnectionError: a rank is gone, or did not answer within `timeout_s`.
        """
        if self._group is None:
            return ok
        answer = torch.tensor(int(ok))
        with self._awaiting("the other ranks' word on a weight update"):
            dist.all_reduce(answer, op=dist.ReduceOp.MIN, group=self._group)
        return bool(answer.item())

    def _broadcast(self, message: torch.Tensor) -> None:
        dist.broadcast(message, src=0, group=self._group)

    @contextmanager
    def _awaiting(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            kind = SilentRankError if "timed out" in str(error).lower() else ConnectionError
            raise kind(
                f"generator rank {self.rank} awaited {what}, at most {self.timeout_s:g} s: {error}"
            ) from error
