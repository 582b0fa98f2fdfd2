"""The latest sampled sequences, by which the server knows its own tokens in the data of a client.

A datum has the whole conversation as tokens, and says nothing of the requests that have sampled
them. So each sequence is kept under a hash of everything up to its end, and a datum is looked up at
each of its positions. A hash only proposes: the digest of the receipt (`rl.receipts`) decides.

Shape legend: T tokens of a datum, its last target included.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from rl.ledger.sealing import seal
from rl.receipts import Receipt, finish_digest, start_digest
from rl.tinker.types import LedgerMark
from rl.types import Completion

MAX_SEQUENCES = 100_000
"""Most sequences of all owners."""
MAX_BYTES = 2**27
"""Most bytes of their tokens: 11 million tokens."""
MAX_EQUAL = 1024
"""Most sequences of the same tokens among which one with the same logprobs is looked for."""


@dataclass(kw_only=True, slots=True, eq=False)
class SampledSequence:
    """A sampled completion of a prompt."""

    completion: Completion
    """With its receipt."""
    num_prompt: int
    """Tokens of the prompt."""
    context: int
    """Hash of the prompt."""
    end: int
    """Hash of prompt and completion."""
    mark: LedgerMark | None
    """Step after which a model had the weights; None for weights of no ledger."""
    num_uses: int = 0
    """Spans of data that it was found for."""

    @property
    def receipt(self) -> Receipt:
        receipt = self.completion.receipt
        assert receipt is not None, "sealed when it was remembered"
        return receipt

    @property
    def num_bytes(self) -> int:
        c = self.completion
        return c.token_ids.nbytes + c.logprobs.nbytes + c.policy_versions.nbytes


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledSpan:
    """Part of a datum that this server has sampled as it is: its tokens `start` to `end`."""

    start: int
    end: int
    sequence: SampledSequence


@dataclass(kw_only=True, slots=True)
class _OwnSequences:
    """Sequences of one owner."""

    by_end: dict[int, deque[SampledSequence]] = field(default_factory=dict)
    contexts: Counter[int] = field(default_factory=Counter)
    order: deque[SampledSequence] = field(default_factory=deque)
    """The oldest first."""
    num_bytes: int = 0

    def add(self, one: SampledSequence) -> None:
        self.by_end.setdefault(one.end, deque()).append(one)
        self.contexts[one.context] += 1
        self.order.append(one)
        self.num_bytes += one.num_bytes

    def remove_oldest(self) -> SampledSequence:
        one = self.order.popleft()
        equal = self.by_end[one.end]
        # The oldest of all is the oldest of those that are equal.
        equal.popleft()
        if not equal:
            del self.by_end[one.end]
        self.contexts[one.context] -= 1
        if not self.contexts[one.context]:
            del self.contexts[one.context]
        self.num_bytes -= one.num_bytes
        return one


class SampledSequences:
    """The latest sequences of all owners. An owner's data are compared with the owner's alone.

    Methods may be called from any thread.
    """

    def __init__(self, *, max_sequences: int = MAX_SEQUENCES, max_bytes: int = MAX_BYTES) -> None:
        self._max_sequences = max_sequences
        self._max_bytes = max_bytes
        self._owners: dict[str, _OwnSequences] = {}
        self._num_sequences = 0
        self._num_bytes = 0
        self._lock = threading.Lock()

    def remember(
        self,
        prompt: np.ndarray,
        completions: Sequence[Completion],
        *,
        owner: str,
        request: str,
        generator: str,
        mark: LedgerMark | None,
    ) -> None:
        """Seal the completions of a request, and keep them.

        Args:
            request: name of the request, which no other one has.
            generator: weights in words.
        """
        drawn = [c for c in completions if len(c.token_ids)]
        (sealed,) = seal([drawn], [prompt], generator=generator, call=request)
        context = int(hash_prefixes(prompt)[-1])
        for completion in sealed:
            tokens = completion.token_ids
            rest = int(hash_tokens(tokens, first=len(prompt)).sum(dtype=np.uint64))
            one = SampledSequence(
                completion=completion,
                num_prompt=len(prompt),
                context=context,
                end=(context + rest) % 2**64,
                mark=mark,
            )
            with self._lock:
                self._add(one, owner)

    def _add(self, one: SampledSequence, owner: str) -> None:
        self._owners.setdefault(owner, _OwnSequences()).add(one)
        self._num_sequences += 1
        self._num_bytes += one.num_bytes
        while self._num_sequences > self._max_sequences or self._num_bytes > self._max_bytes:
            # Of the owner who has most, so that nobody pushes out what is another's.
            most = max(self._owners, key=lambda name: self._owners[name].num_bytes)
            oldest = self._owners[most].remove_oldest()
            self._num_sequences -= 1
            self._num_bytes -= oldest.num_bytes
            if not self._owners[most].order:
                del self._owners[most]

    def find_spans(
        self, whole_T: np.ndarray, logprobs_T: np.ndarray, *, owner: str
    ) -> tuple[list[SampledSpan], np.ndarray]:
        """Return the sampled spans of a datum in their order, and [T] bool, True for tokens before
        which everything is the prompt of a request.

        Args:
            logprobs_T: as the client gives them; of equal sequences those with these are taken.
        """
        with self._lock:
            own = self._owners.get(owner)
            if own is None:
                return [], np.zeros(len(whole_T), dtype=bool)
            hashes = hash_prefixes(whole_T).tolist()
            spans: list[SampledSpan] = []
            end = len(whole_T)
            # From the end: of a sequence that goes on with a part of another one, it is the longer.
            while end > 0:
                equal = own.by_end.get(hashes[end])
                one = None if equal is None else _choose(equal, whole_T, logprobs_T, end=end)
                if one is None:
                    end -= 1
                    continue
                one.num_uses += 1
                spans.append(SampledSpan(start=one.num_prompt, end=end, sequence=one))
                end = one.num_prompt
            is_context_T = np.array([h in own.contexts for h in hashes[:-1]], dtype=bool)
        return spans[::-1], is_context_T


def _choose(
    equal: deque[SampledSequence], whole_T: np.ndarray, logprobs_T: np.ndarray, *, end: int
) -> SampledSequence | None:
    """Return the sequence that ends at `end`: the least used of those with the given logprobs."""
    best: tuple[bool, int] | None = None
    chosen = None
    for one in islice(reversed(equal), MAX_EQUAL):
        c, start = one.completion, one.num_prompt
        if start + len(c.token_ids) != end or not np.array_equal(whole_T[start:end], c.token_ids):
            continue
        # Other weights may have sampled the same tokens.
        rank = (not np.array_equal(logprobs_T[start:end], c.logprobs), one.num_uses)
        if best is None or rank < best:
            best, chosen = rank, one
    if chosen is None:
        return None
    c = chosen.completion
    started = start_digest(whole_T[: chosen.num_prompt])
    digest = finish_digest(started, c.token_ids, c.logprobs, c.policy_versions)
    return chosen if digest == chosen.receipt.digest else None


def hash_prefixes(tokens_T: np.ndarray) -> np.ndarray:
    """Return [T + 1] uint64 hashes of the first 0 to T tokens."""
    hashes = np.zeros(len(tokens_T) + 1, dtype=np.uint64)
    # A sum, so that all prefixes are hashed at once; it overflows, which is meant.
    np.cumsum(hash_tokens(tokens_T), out=hashes[1:])
    return hashes


def hash_tokens(tokens_T: np.ndarray, *, first: int = 0) -> np.ndarray:
    """Return a hash of each token with its position, from `first` (SplitMix64)."""
    positions = np.arange(first, first + len(tokens_T), dtype=np.uint64)
    mixed = (positions << np.uint64(32)) + tokens_T.astype(np.uint64)
    mixed += np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashed: np.ndarray = mixed ^ (mixed >> np.uint64(31))
    return hashed
