"""Parts of samples that a micro-batch stores once, because causal attention gives them the same
hidden states in each sample.

Samples of one prompt share it. Rows of one episode also share leading turns: a later row reads
tokens that an earlier row trains, and its prefix is then the earlier row's, which may have a prefix
of its own. A sample shares only tokens that it is not trained on itself, and not the last of them,
because a different token follows it in each sample.

Example (an episode of three rows; letters are turns, capitals are trained in that row):
    row 0   A B         stored whole
    row 1   a C         C, after the A of row 0
    row 2   a c D       D, after the A of row 0 and the C of row 1
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rl.types import TrainingSample

SMALLEST_SAVING = 0.05
"""Smallest share of a micro-batch's tokens for which sharing is worth moving keys away from their
queries.
"""
Path = tuple[slice, ...]
"""Rows of a micro-batch that hold consecutive inputs of a sample, in order."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Inputs `begin` to `end` of a sample."""

    sample: int
    """Number among the samples of the micro-batch."""
    begin: int
    end: int
    rows: slice
    """Rows of the micro-batch at which these inputs stand."""
    prefix: Path = ()
    """Rows of the inputs before `begin`."""


def list_lengths(samples: Sequence[TrainingSample]) -> list[int]:
    """Return the number of inputs of each sample, one fewer than its tokens."""
    return [len(sample.token_ids) - 1 for sample in samples]


def count_rows(pieces: Sequence[Piece]) -> int:
    return pieces[-1].rows.stop if pieces else 0


def count_shareable(sample: TrainingSample) -> int:
    """Return the number of first inputs whose targets are not trained on.

    0 for a sample with targets of its own.
    """
    if sample.targets is not None:
        return 0
    counts = sample.mask if sample.ratio_mask is None else sample.mask | sample.ratio_mask
    # argmax of booleans is the first True.
    return int(np.argmax(counts[1:])) if counts[1:].any() else 0


def group_families(samples: Sequence[TrainingSample]) -> list[list[int]]:
    """Group samples that begin with the same prompt; most families are groups of rollouts."""
    members: dict[tuple[bytes, float], list[int]] = defaultdict(list)
    alone: list[list[int]] = []
    for index, sample in enumerate(samples):
        shareable = count_shareable(sample)
        if shareable:
            # The target after the last shared input is part of the prompt too.
            prompt = np.asarray(sample.token_ids[: shareable + 1], dtype=np.int64)
            # A temperature is of whole sequences, so samples of different ones share nothing.
            members[prompt.tobytes(), sample.temperature].append(index)
        else:
            alone.append([index])
    return [*members.values(), *alone]


def make_pieces(samples: Sequence[TrainingSample], *, share: bool) -> list[Piece]:
    """Return the pieces of a micro-batch in order: each shared prefix before what follows it."""
    lengths = list_lengths(samples)
    if share:
        layout = _SharedLayout(samples, lengths)
        layout.place_all()
        num_tokens = sum(lengths)
        if 1.0 - count_rows(layout.pieces) / max(1, num_tokens) >= SMALLEST_SAVING:
            return layout.pieces

    pieces: list[Piece] = []
    begin = 0
    for sample, length in enumerate(lengths):
        pieces.append(Piece(sample, 0, length, slice(begin, begin + length)))
        begin += length
    return pieces


@dataclass(slots=True)
class _SharedLayout:
    """Pieces of samples that are placed family by family, each after the sample that hosts it."""

    samples: Sequence[TrainingSample]
    lengths: Sequence[int]
    pieces: list[Piece] = field(default_factory=list)
    paths: dict[int, Path] = field(default_factory=dict)
    """Rows of all inputs of each placed sample."""

    def place_all(self) -> None:
        roots: list[list[int]] = []
        guests: list[tuple[int, list[int], int, int]] = []
        rows_of_episode = self._list_rows_of_episodes()
        for family in group_families(self.samples):
            first = family[0]
            candidates = rows_of_episode.get(self.samples[first].episode, ())
            host, num_shared = self._find_host(first, candidates)
            if num_shared:
                shareable = count_shareable(self.samples[first])
                guests.append((shareable, family, host, num_shared))
            else:
                roots.append(family)

        for family in roots:
            self._place(family, ())
        # A host shares fewer inputs than its guests, so it is placed before them.
        for _, family, host, num_shared in sorted(guests):
            self._place(family, _take(self.paths[host], num_shared))

    def _list_rows_of_episodes(self) -> dict[int | None, list[int]]:
        """Return the rows in this micro-batch of each episode that has several here."""
        rows: dict[int | None, list[int]] = defaultdict(list)
        for index, sample in enumerate(self.samples):
            if sample.episode is not None:
                rows[sample.episode].append(index)
        return {episode: members for episode, members in rows.items() if len(members) > 1}

    def _find_host(self, guest: int, candidates: Sequence[int]) -> tuple[int, int]:
        """Return the row with most inputs that the guest can share, and their number, perhaps 0."""
        sample = self.samples[guest]
        shareable = count_shareable(sample)
        best, most = guest, 0
        for candidate in candidates:
            other = self.samples[candidate]
            if other.temperature != sample.temperature or count_shareable(other) >= shareable:
                continue
            # The target after the last shared input is the same too.
            num = min(shareable, _count_equal(sample.token_ids, other.token_ids) - 1)
            if num > most:
                best, most = candidate, num
        return best, most

    def _place(self, family: Sequence[int], path: Path) -> None:
        """Append the pieces of a family whose first inputs stand in the rows of `path`."""
        begin = sum(rows.stop - rows.start for rows in path)
        if len(family) > 1:
            shared = count_shareable(self.samples[family[0]])
            if shared > begin:
                path = self._add(family[0], begin, shared, path)
                begin = shared
        for sample in family:
            self.paths[sample] = self._add(sample, begin, self.lengths[sample], path)

    def _add(self, sample: int, begin: int, end: int, prefix: Path) -> Path:
        """Append a piece and return the rows of the sample up to its end."""
        first = count_rows(self.pieces)
        rows = slice(first, first + end - begin)
        self.pieces.append(Piece(sample, begin, end, rows, prefix))
        return (*prefix, rows)


def _take(path: Path, num: int) -> Path:
    """Return the first `num` rows of a path."""
    taken: list[slice] = []
    for rows in path:
        if num <= 0:
            break
        taken.append(slice(rows.start, min(rows.stop, rows.start + num)))
        num -= rows.stop - rows.start
    return tuple(taken)


def _count_equal(ids_T: np.ndarray, other_T: np.ndarray) -> int:
    """Return the number of first tokens that are the same."""
    num = min(len(ids_T), len(other_T))
    differs = ids_T[:num] != other_T[:num]
    # argmax of booleans is the first True.
    return int(np.argmax(differs)) if differs.any() else num
