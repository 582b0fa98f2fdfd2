"""Episodes of several rows: the samples that a loss sees as one sequence.

A loss that reads sequences, such as a mean by sequence or a ratio of sequences, needs all rows of
an episode in one micro-batch; another loss gets them together where they fit.

Shape legend: S samples of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl.rollouts.shared_prefixes import list_lengths
from rl.types import TrainingSample


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

    fitting: list[list[int]] = []
    for rows in bundles:
        num_tokens = sum(list_lengths([samples[i] for i in rows]))
        if num_tokens <= max_tokens and len(rows) <= (max_sequences or len(rows)):
            fitting.append(rows)
        elif undivided_for is None:
            fitting += [[index] for index in rows]
        else:
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
