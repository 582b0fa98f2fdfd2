"""From samples of any length to packed micro-batches, the same plan on every rank.

Every rank gets the whole list of samples, makes the whole plan and takes its own part of
it. All ranks get equally many micro-batches, because FSDP gathers parameters in each; a
rank that has none left gets one of padding alone.

Shape legend: T packed tokens, L tokens of one sample (its inputs: one fewer than its token
ids), M micro-batches, R data-parallel ranks.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rl.models.attention import SequenceLayout
from rl.types import TrainingSample

OPTIONAL_LOGPROBS = ("reference_logprobs", "proximal_logprobs")
"""Fields of a sample that may be None."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedBatch:
    """One micro-batch. Entry t is about input token t and its target, the next token.

    Padding is a sequence of its own at the end: its mask is False and its sequence id is
    `num_sequences`.
    """

    input_ids: Tensor
    """[T] int64."""
    targets: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, from 0 in each sequence."""
    sequences: SequenceLayout
    """Where each sequence lies, the padding included."""
    mask: Tensor
    """[T] bool, True where the target is trained on."""
    advantages: Tensor
    """[T] float32."""
    generator_logprobs: Tensor
    """[T] float32, nats; NaN where the generator drew nothing."""
    temperatures: Tensor
    """[T] float32; 1 in the padding."""
    sequence_ids: Tensor
    """[T] int64."""
    reference_logprobs: Tensor | None = None
    """[T] float32, nats; None where the samples bring none."""
    proximal_logprobs: Tensor | None = None
    """[T] float32, nats; None where the samples bring none."""
    num_sequences: int
    """Samples in this micro-batch; 0 for one of padding alone."""
    sample_indices: tuple[int, ...]
    """Which samples of the packed list these are, in order."""
    lengths: tuple[int, ...]
    """L of each sample, in order."""

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same with its tensors on `device`."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        moved = {k: v.to(device, non_blocking=True) for k, v in values.items() if isinstance(v, Tensor)}
        sequences = dataclasses.replace(
            self.sequences,
            offsets=self.sequences.offsets.to(device, non_blocking=True),
            slots=self.sequences.slots.to(device, non_blocking=True),
            run_slots=self.sequences.run_slots.to(device, non_blocking=True),
        )
        return PackedBatch(**(values | moved | {"sequences": sequences}))

    @property
    def all_lengths(self) -> list[int]:
        """L of each sequence, the padding included."""
        num_padding = self.input_ids.numel() - sum(self.lengths)
        return [*self.lengths, num_padding] if num_padding else list(self.lengths)

    def scatter(self, values_T: np.ndarray) -> dict[int, np.ndarray]:
        """Values per token as one [L + 1] array a sample, by its index; entry 0, no target, is 0."""
        ends = np.cumsum(self.lengths)
        parts = np.split(values_T[: sum(self.lengths)], ends[:-1])
        pad = np.zeros(1, dtype=values_T.dtype)
        return {
            index: np.concatenate((pad, part))
            for index, part in zip(self.sample_indices, parts, strict=False)
        }


def pack(
    samples: Sequence[TrainingSample],
    *,
    max_tokens: int,
    max_sequences: int | None = None,
    max_length: int | None = None,
    pad_multiple: int = 1,
    rank: int = 0,
    num_ranks: int = 1,
) -> list[PackedBatch]:
    """The micro-batches of one data-parallel rank; equally many on every rank, at least one.

    Args:
        max_tokens: most tokens of a micro-batch, padding not counted.
        max_sequences: most samples of a micro-batch.
        max_length: most tokens of a sample.
        pad_multiple: T becomes a multiple of it, for sequence parallelism.

    Raises:
        ValueError: for a sample that is longer than `max_tokens` or `max_length`, has fewer than two tokens,
            or whose arrays differ in length.
    """
    _check_optional(samples)
    lengths = [_input_length(sample, index, max_tokens, max_length) for index, sample in enumerate(samples)]
    plan = plan_micro_batches(
        lengths, max_tokens=max_tokens, num_ranks=num_ranks, max_sequences=max_sequences
    )
    return [_pack_one(samples, indices, pad_multiple=pad_multiple) for indices in plan[rank]]


def plan_micro_batches(
    lengths: Sequence[int], *, max_tokens: int, num_ranks: int, max_sequences: int | None = None
) -> list[list[list[int]]]:
    """[R][M] lists of sample indices: tokens balanced over ranks, then packed tightly in each.

    Ranks get samples longest first, each to the one with the fewest tokens so far. Within a
    rank, too, longer samples come first, into the first micro-batch with room; so a
    micro-batch holds samples of similar length, which attention on a grid likes.
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    load = [(0, rank) for rank in range(num_ranks)]
    for index in longest_first:
        tokens, rank = heapq.heappop(load)
        shares[rank].append(index)
        heapq.heappush(load, (tokens + lengths[index], rank))
    plan = [_first_fit(share, lengths, max_tokens, max_sequences or len(share)) for share in shares]
    num_micro_batches = max(1, *(len(micro_batches) for micro_batches in plan))
    for micro_batches in plan:
        micro_batches.extend([] for _ in range(num_micro_batches - len(micro_batches)))
    return plan


def _first_fit(
    indices: list[int], lengths: Sequence[int], max_tokens: int, max_sequences: int
) -> list[list[int]]:
    micro_batches: list[list[int]] = []
    room: list[int] = []
    for index in indices:
        length = lengths[index]
        place = next((m for m, free in enumerate(room) if free >= length), len(room))
        if place == len(room):
            micro_batches.append([])
            room.append(max_tokens)
        micro_batches[place].append(index)
        room[place] = room[place] - length if len(micro_batches[place]) < max_sequences else 0
    return micro_batches


def _check_optional(samples: Sequence[TrainingSample]) -> None:
    """All samples bring logprobs of another policy, or none does."""
    for name in OPTIONAL_LOGPROBS:
        for index, sample in enumerate(samples):
            values = getattr(sample, name)
            if (values is None) != (getattr(samples[0], name) is None):
                which = f"sample {index} has none" if values is None else f"sample {index} has"
                raise ValueError(f"{name} must be there in all samples or in none: {which}")


def _input_length(sample: TrainingSample, index: int, max_tokens: int, max_length: int | None) -> int:
    num_tokens = len(sample.token_ids)
    for name in ("mask", "generator_logprobs", "advantages", *OPTIONAL_LOGPROBS):
        if getattr(sample, name) is not None and len(getattr(sample, name)) != num_tokens:
            raise ValueError(
                f"sample {index}: {name} has {len(getattr(sample, name))} entries for {num_tokens} tokens"
            )
    if num_tokens < 2:
        raise ValueError(
            f"sample {index} has {num_tokens} tokens: must have at least 2, one input and one target"
        )
    if max_length is not None and num_tokens > max_length:
        raise ValueError(
            f"sample {index} has {num_tokens} tokens, more than max_sequence_length={max_length}"
        )
    if num_tokens - 1 > max_tokens:
        raise ValueError(
            f"sample {index} has a length of {num_tokens - 1} input tokens, "
            f"more than max_tokens_per_microbatch={max_tokens}"
        )
    return num_tokens - 1


def _pack_one(samples: Sequence[TrainingSample], indices: list[int], *, pad_multiple: int) -> PackedBatch:
    chosen = [samples[i] for i in indices]
    lengths = [len(sample.token_ids) - 1 for sample in chosen]
    num_tokens = sum(lengths)
    num_padding = -num_tokens % pad_multiple if num_tokens else pad_multiple
    all_lengths = [*lengths, num_padding] if num_padding else lengths
    lengths_S = np.asarray(all_lengths, dtype=np.int64)
    starts_S = np.cumsum(lengths_S) - lengths_S
    num_total = num_tokens + num_padding

    def joined(arrays: list[np.ndarray], dtype: type, padding: float) -> Tensor:
        values_T: np.ndarray = np.full(num_total, padding, dtype=dtype)
        if arrays:
            np.concatenate(arrays, out=values_T[:num_tokens], casting="same_kind")
        return torch.from_numpy(values_T)

    def joined_if_there(name: str) -> Tensor | None:
        if getattr(samples[0], name) is None:
            return None
        return joined([getattr(s, name)[1:] for s in chosen], np.float32, 0.0)

    temperatures_S = np.asarray([s.temperature for s in chosen] + [1.0] * bool(num_padding), dtype=np.float32)
    return PackedBatch(
        input_ids=joined([s.token_ids[:-1] for s in chosen], np.int64, 0),
        targets=joined([s.token_ids[1:] for s in chosen], np.int64, 0),
        positions=torch.from_numpy(np.arange(num_total) - np.repeat(starts_S, lengths_S)),
        sequences=SequenceLayout.from_lengths(all_lengths),
        mask=joined([s.mask[1:] for s in chosen], np.bool_, False),
        advantages=joined([s.advantages[1:] for s in chosen], np.float32, 0.0),
        generator_logprobs=joined([s.generator_logprobs[1:] for s in chosen], np.float32, np.nan),
        reference_logprobs=joined_if_there("reference_logprobs"),
        proximal_logprobs=joined_if_there("proximal_logprobs"),
        temperatures=torch.from_numpy(np.repeat(temperatures_S, lengths_S)),
        sequence_ids=torch.from_numpy(np.repeat(np.arange(len(all_lengths)), lengths_S)),
        num_sequences=len(chosen),
        sample_indices=tuple(indices),
        lengths=tuple(lengths),
    )
