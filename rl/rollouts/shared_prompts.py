"""Which samples begin alike, so that a micro-batch holds their common beginning once.

All completions of a prompt have its tokens before them, and causal attention gives these the same
hidden states each time. Only tokens that no sample is trained on are shared, and not the last of
them: what follows it is another token in each sample.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl.types import TrainingSample

SMALLEST_SAVING = 0.05
"""Of a micro-batch's tokens; for less, keys are better left where they lie, beside their queries."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Inputs `begin` to `end` of a sample, which follow those of another piece or nothing."""

    sample: int
    begin: int
    end: int
    prefix: int | None = None
    """Number of the piece that has the inputs before `begin`."""

    def __len__(self) -> int:
        return self.end - self.begin


def num_shareable(sample: TrainingSample) -> int:
    """Inputs from the start whose targets are not trained on; 0 where none is, or where a sample says itself
    what its targets are."""
    if sample.targets is not None:
        return 0
    counts = sample.mask if sample.ratio_mask is None else sample.mask | sample.ratio_mask
    return int(np.argmax(counts[1:])) if counts[1:].any() else 0


def families(samples: Sequence[TrainingSample]) -> list[list[int]]:
    """Samples with the same beginning, which each family has in common; most are of one group."""
    members: dict[tuple[bytes, float], list[int]] = defaultdict(list)
    alone: list[list[int]] = []
    for index, sample in enumerate(samples):
        shareable = num_shareable(sample)
        if shareable:
            # The target after the last shared input is part of the prompt too.
            prompt = np.asarray(sample.token_ids[: shareable + 1], dtype=np.int64)
            members[prompt.tobytes(), sample.temperature].append(index)
        else:
            alone.append([index])
    return [*members.values(), *alone]


def pieces_of(samples: Sequence[TrainingSample], *, share: bool) -> list[Piece]:
    """What a micro-batch of these samples holds, in order: a shared beginning before what follows it."""
    apart = [Piece(i, 0, len(sample.token_ids) - 1) for i, sample in enumerate(samples)]
    if not share:
        return apart
    pieces: list[Piece] = []
    for family in families(samples):
        shared = num_shareable(samples[family[0]]) if len(family) > 1 else 0
        prefix = len(pieces) if shared else None
        if shared:
            pieces.append(Piece(family[0], 0, shared))
        pieces.extend(Piece(i, shared, apart[i].end, prefix) for i in family)
    saving = 1.0 - sum(map(len, pieces)) / max(1, sum(map(len, apart)))
    return pieces if saving >= SMALLEST_SAVING else apart
