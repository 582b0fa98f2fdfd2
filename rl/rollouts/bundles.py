"""Episodes of several rows: the samples that a loss sees as one sequence.

A loss that reads sequences, such as a mean by sequence or a ratio of sequences, needs all rows of
an episode in one micro-batch; another loss gets them together where they fit.

Shape legend: S samples of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl.rollouts.shared_prefixes import list_lengths
from rl.types import TrainingSample


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeRoom:
    """What one micro-batch can hold of an episode."""

    max_tokens: int
    """Most inputs of its rows together: one fewer than the tokens of each row."""
    max_rows: int | None = None

    def holds(self, row_tokens: Sequence[int]) -> bool:
        """Return whether rows of these many tokens fit together."""
        is_few = self.max_rows is None or len(row_tokens) <= self.max_rows
        return is_few and sum(row_tokens) - len(row_tokens) <= self.max_tokens


def bundle_episodes(
    samples: Sequence[TrainingSample],
    *,
    max_tokens: int,
    max_sequences: int | None,
    undivided_for: str | None,
) -> list[list[int]]:
    """Return lists of samples that go into one micro-batch, in the order of their first samples.

    Raises ValueError for an episode that does not fit and must not be divided.
    """
    episodes: dict[int, list[int]] = {}
    bundles: list[list[int]] = []
    for index, sample in enumerate(samples):
        rows = [] if sample.episode is None else episodes.setdefault(sample.episode, [])
        if not rows:
            bundles.append(rows)
        rows.append(index)

    room = EpisodeRoom(max_tokens=max_tokens, max_rows=max_sequences)
    fitting: list[list[int]] = []
    for rows in bundles:
        if room.holds([len(samples[i].token_ids) for i in rows]):
            fitting.append(rows)
        elif undivided_for is None:
            fitting += [[index] for index in rows]
        else:
            num_tokens = sum(list_lengths([samples[i] for i in rows]))
            raise ValueError(
                f"episode {samples[rows[0]].episode} has {len(rows)} rows of {num_tokens} tokens "
                f"together, more than fit into a micro-batch with max_tokens_per_microbatch="
                f"{max_tokens} and max_sequences_per_microbatch={max_sequences} (in a pipeline "
                "at most pipeline_parallel_microbatch_size), and a loss with "
                f"{undivided_for} needs all of them there: raise the limit, or take a loss of "
                "tokens alone (normalization 'token_mean' and no ratio of sequences)"
            )
    return fitting


def number_episodes(samples: Sequence[TrainingSample]) -> np.ndarray:
    """Return [S + 1] int64: the number of each sample's episode, then the number of episodes.

    Episodes are numbered in the order of their first samples.
    """
    numbers: dict[tuple[bool, int], int] = {}
    ids: list[int] = []
    for place, sample in enumerate(samples):
        # A sample without a number is an episode of its own.
        key = (True, place) if sample.episode is None else (False, sample.episode)
        ids.append(numbers.setdefault(key, len(numbers)))
    return np.asarray([*ids, len(numbers)], dtype=np.int64)


def count_episodes(samples: Sequence[TrainingSample]) -> int:
    """Return the number of episodes that the samples are rows of."""
    return int(number_episodes(samples)[-1])
