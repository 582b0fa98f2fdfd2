"""Packing of samples of any length into micro-batches, with the same plan on every rank.

All ranks get equally many micro-batches, because FSDP gathers parameters in each; a rank with none
left gets one of padding alone.

Samples of one prompt go together if they fit, and share their prompt
(`rl.rollouts.shared_prefixes`). The rows of an episode go together too: they are one sequence for
the loss, and separate sequences for attention.

Shape legend: T packed tokens, L tokens of one sample (its inputs: one fewer than its token
ids), K targets of a token, M micro-batches, R data-parallel ranks.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl.models.layers.attention import SequenceLayout
from rl.rollouts.bundles import bundle_episodes, number_episodes
from rl.rollouts.shared_prefixes import (
    Piece,
    count_rows,
    group_families,
    list_lengths,
    make_pieces,
)
from rl.types import TrainingSample
from rl.utils.tensor_memory import to_device

OPTIONAL_LOGPROBS = ("reference_logprobs", "proximal_logprobs")
_PER_TARGET = ("mask", "generator_logprobs", "advantages", *OPTIONAL_LOGPROBS)
"""Fields with K values for a token that has K targets."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedBatch:
    """One micro-batch. Entry t belongs to input token t and its target, by default the next token.

    With K targets a token, `targets`, `mask`, `advantages` and all logprobs are [T, K]. Padding is
    a sequence of its own at the end: its mask is False and its sequence id is `num_sequences`. A
    shared prefix has the mask and the sequence id of one of its samples, the only one that may be
    trained on it. A sequence of `sequence_ids` is an episode, one of `sequences` a sample.
    """

    input_ids: Tensor
    """[T] int64."""
    targets: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, from 0 in each sequence."""
    sequences: SequenceLayout
    """Layout of the samples for attention, padding included."""
    mask: Tensor
    """[T] bool, True where the target is trained on."""
    advantages: Tensor
    """[T] float32."""
    generator_logprobs: Tensor
    """[T] float32, nats; NaN at tokens of prompts."""
    temperatures: Tensor
    """[T] float32; 1 in the padding."""
    sequence_ids: Tensor
    """[T] int64, number of the token's episode in this micro-batch."""
    reference_logprobs: Tensor | None = None
    """[T] float32, nats; None if the samples have none."""
    proximal_logprobs: Tensor | None = None
    """[T] float32, nats; None if the samples have none."""
    ratio_mask: Tensor | None = None
    """[T] bool; None if the samples have none."""
    loss_rows: Tensor
    """[R] int64, the tokens that `mask` or `ratio_mask` selects; the first token if they select
    none.
    """
    num_sequences: int
    """Episodes in this micro-batch; 0 for padding alone."""
    sample_indices: tuple[int, ...]
    """Indices of the samples in the packed list, in order."""
    lengths: tuple[int, ...]
    """L of each sample, in order."""
    rows: tuple[tuple[slice, ...], ...]
    """Rows of the inputs of each sample, in order."""
    padding: tuple[int, ...]
    """L of each sequence of padding."""

    def to(self, device: torch.device | str) -> PackedBatch:
        """Return a copy with its tensors on `device`."""
        values: dict[str, Any] = {}
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            values[entry.name] = to_device(value, device) if isinstance(value, Tensor) else value
        return PackedBatch(**(values | {"sequences": self.sequences.to(device)}))

    @property
    def all_lengths(self) -> list[int]:
        """L of each sequence, padding included, of a batch without shared prompts."""
        return [*self.lengths, *self.padding]

    def scatter(self, values_T: np.ndarray) -> dict[int, np.ndarray]:
        """Split values per token into one [L + 1] array for each sample, by its index.

        Entry 0 is 0. Values of shape [T, K] become [L + 1, K].
        """
        pad = np.zeros((1, *values_T.shape[1:]), dtype=values_T.dtype)
        by_sample: dict[int, np.ndarray] = {}
        for index, parts in zip(self.sample_indices, self.rows, strict=True):
            by_sample[index] = np.concatenate([pad, *(values_T[part] for part in parts)])
        return by_sample


def pack(
    samples: Sequence[TrainingSample],
    *,
    max_tokens: int,
    max_sequences: int | None = None,
    max_length: int | None = None,
    pad_multiple: int = 1,
    share_prompts: bool = False,
    rank: int = 0,
    num_ranks: int = 1,
    num_allowed: Callable[[int], int] | None = None,
    undivided_for: str | None = None,
) -> list[PackedBatch]:
    """Return the micro-batches of one data-parallel rank; equally many on every rank, at least one.

    Args:
        max_tokens: most tokens of a micro-batch, padding not counted, shared ones each time.
        max_sequences: most samples of a micro-batch.
        max_length: most tokens of a sample.
        pad_multiple: T becomes a multiple of it, for sequence parallelism.
        share_prompts: store the prefix once that samples of a micro-batch have in common.
        num_allowed: smallest number of micro-batches allowed from a number up, for a pipeline:
            micro-batches become smaller until there are as many as `num_allowed(1)`, some may be
            padding alone, and all get one length.
        undivided_for: setting of the loss that needs all rows of an episode in one micro-batch
            (`losses.types.get_sequence_setting`). None: rows that do not fit together are divided.

    Raises:
        ValueError: a sample is longer than `max_tokens` or `max_length`, has fewer than two tokens,
            or has arrays of different shapes; samples differ in K or in their optional fields; or
            an episode that must not be divided does not fit into a micro-batch.
    """
    _check(samples, max_tokens=max_tokens, max_length=max_length)
    lengths = list_lengths(samples)
    bundles = bundle_episodes(
        samples, max_tokens=max_tokens, max_sequences=max_sequences, undivided_for=undivided_for
    )

    if num_allowed is not None:
        # Small enough that a pipeline gets as many as it needs; but a sample is never cut.
        share = -(-sum(lengths) // (num_ranks * num_allowed(1)))
        sizes = [sum(lengths[i] for i in bundle) for bundle in bundles]
        max_tokens = min(max_tokens, max(share, *sizes))
    micro_batches = plan_micro_batches(
        lengths,
        bundles=bundles,
        families=group_families(samples) if share_prompts else None,
        max_tokens=max_tokens,
        num_ranks=num_ranks,
        max_sequences=max_sequences,
    )[rank]
    if num_allowed is not None:
        _fill_up(micro_batches, num_allowed(len(micro_batches)))
    return _pack_plan(
        samples,
        micro_batches,
        share=share_prompts,
        pad_multiple=pad_multiple,
        alike=num_allowed is not None,
    )


def _pack_plan(
    samples: Sequence[TrainingSample],
    micro_batches: Sequence[Sequence[int]],
    *,
    share: bool,
    pad_multiple: int,
    alike: bool,
) -> list[PackedBatch]:
    """Return micro-batches of the samples at these indices; with `alike` all have one length."""
    layouts: list[list[Piece]] = []
    for indices in micro_batches:
        layouts.append(make_pieces([samples[i] for i in indices], share=share))

    max_padding: int | None = None
    if alike:
        # Stages of a pipeline exchange buffers of one size, so the longest micro-batch sets the
        # length of all. Padding is cut, so that it is never the longest sequence of a batch.
        longest = max(map(count_rows, layouts), default=0) or 1
        pad_multiple = longest + -longest % pad_multiple
        max_padding = max(list_lengths(samples), default=1)

    batches = []
    for indices, pieces in zip(micro_batches, layouts, strict=True):
        padding = _add_padding(pieces, len(indices), multiple=pad_multiple, max_length=max_padding)
        batches.append(_pack_micro_batch(samples, indices, pieces, padding=padding))
    return batches


def _fill_up(micro_batches: list[list[int]], num: int) -> None:
    """Append empty micro-batches, which become padding alone, until there are `num`."""
    while len(micro_batches) < num:
        micro_batches.append([])


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    families: Iterable[Sequence[int]] | None = None,
    bundles: Sequence[Sequence[int]] | None = None,
    max_tokens: int,
    num_ranks: int,
    max_sequences: int | None = None,
) -> list[list[list[int]]]:
    """Return [R][M] lists of sample indices: balanced over ranks, then packed tightly.

    Samples are assigned longest first, each to the rank with the fewest tokens so far. Within a
    rank, too, longer samples come first, into the first micro-batch with room; so a micro-batch
    holds samples of similar length, which suits attention on a grid. A family is one unit, which is
    divided if it would unbalance ranks or does not fit a micro-batch. A bundle is never divided: it
    takes the place of a sample, in the family of its first. Without `bundles` each sample is one.
    """
    if bundles is None:
        bundles = [[index] for index in range(len(lengths))]
    sizes_B = [sum(lengths[i] for i in bundle) for bundle in bundles]
    if families is None:
        units = [[number] for number in range(len(bundles))]
    else:
        units = _list_bundles_of_families(families, bundles)
    shares = _balance_ranks(units, sizes_B, num_ranks=num_ranks)
    plan = []
    for units_of_rank in shares:
        plan.append(
            _place_first_fit(
                units_of_rank, bundles, sizes_B, max_tokens, max_sequences or len(lengths)
            )
        )
    num_micro_batches = max(1, *map(len, plan))
    for micro_batches in plan:
        _fill_up(micro_batches, num_micro_batches)
    return plan


def _balance_ranks(
    units: Sequence[Sequence[int]], sizes_B: Sequence[int], *, num_ranks: int
) -> list[list[list[int]]]:
    """Return the units of each rank, the largest first, each with its longest bundle first."""
    if num_ranks > 1:
        # With units of at most a quarter of a rank's share, the smallest ones decide the balance.
        limit = sum(sizes_B) // (4 * num_ranks)
        parts: list[list[int]] = []
        for unit in units:
            parts += _divide(unit, sizes_B, limit)
        units = parts

    sized = []
    for unit in units:
        longest_first = sorted(unit, key=lambda b: (-sizes_B[b], b))
        sized.append((sum(sizes_B[b] for b in unit), longest_first))

    # Ties are broken by sample indices and by rank: every rank computes the plan on its own, and
    # all must come to the same.
    shares: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    load = [(0, rank) for rank in range(num_ranks)]
    for size, longest_first in sorted(sized, key=lambda pair: (-pair[0], pair[1])):
        tokens, rank = heapq.heappop(load)
        shares[rank].append(longest_first)
        heapq.heappush(load, (tokens + size, rank))
    return shares


def _list_bundles_of_families(
    families: Iterable[Sequence[int]], bundles: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Return the numbers of the bundles whose first sample is in each family."""
    number_of_first = {bundle[0]: number for number, bundle in enumerate(bundles)}
    units: list[list[int]] = []
    for family in families:
        unit = [number_of_first[index] for index in family if index in number_of_first]
        if unit:
            units.append(unit)
    return units


def _divide(unit: Sequence[int], lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Divide a unit into parts of at most `limit` tokens, or of one bundle.

    Example: a unit [3, 5, 8] of bundles with 40, 50 and 60 tokens and a limit of 100 is divided
    into [3, 5] and [8].
    """
    parts: list[list[int]] = [[]]
    num_tokens = 0
    for index in unit:
        if parts[-1] and num_tokens + lengths[index] > limit:
            parts.append([])
            num_tokens = 0
        parts[-1].append(index)
        num_tokens += lengths[index]
    return parts


def _place_first_fit(
    units: Iterable[Sequence[int]],
    bundles: Sequence[Sequence[int]],
    sizes_B: Sequence[int],
    max_tokens: int,
    max_sequences: int,
) -> list[list[int]]:
    """Put the bundles of each unit into one micro-batch as long as it has room."""
    micro_batches: list[list[int]] = []
    room: list[int] = []

    def has_room(place: int, number: int) -> bool:
        num_samples = len(micro_batches[place]) + len(bundles[number])
        return room[place] >= sizes_B[number] and num_samples <= max_sequences

    for unit in units:
        place = 0
        for number in unit:
            # First the micro-batch of the unit's last bundle, so that a family stays together.
            if place == len(room) or not has_room(place, number):
                place = 0
                while place < len(room) and not has_room(place, number):
                    place += 1
            if place == len(room):
                micro_batches.append([])
                room.append(max_tokens)
            micro_batches[place] += bundles[number]
            room[place] -= sizes_B[number]
    return micro_batches


def _check(samples: Sequence[TrainingSample], *, max_tokens: int, max_length: int | None) -> None:
    """Check lengths and shapes, and that each optional field is set in all samples or in none."""
    targets = samples[0].targets if samples else None
    num_targets = () if targets is None else targets.shape[1:]
    if targets is not None and (
        len(num_targets) > 1 or 0 in num_targets or targets.dtype.kind not in "iu"
    ):
        raise ValueError("targets must be whole numbers of shape [T] or [T, K]")
    for index, sample in enumerate(samples):
        num_tokens = len(sample.token_ids)
        which = f"sample {index} has {num_tokens} tokens"
        if num_tokens < 2:
            raise ValueError(f"{which}: must have at least 2, one input and one target")
        if max_length is not None and num_tokens > max_length:
            raise ValueError(f"{which}, more than max_sequence_length={max_length}")
        if num_tokens - 1 > max_tokens:
            raise ValueError(
                f"{which}, a length of {num_tokens - 1} > max_tokens_per_microbatch={max_tokens}"
            )
        if num_targets and sample.ratio_mask is not None:
            raise ValueError(
                f"sample {index}: ratio_mask must be None with targets of shape [T, K]"
            )
        # Arrays of all samples are joined, so a field is there in all of them or in none.
        for name in (*_PER_TARGET, "targets", "ratio_mask"):
            values = getattr(sample, name)
            if (values is None) != (getattr(samples[0], name) is None):
                raise ValueError(f"sample {index}: {name} must be set in all samples or in none")
            shape = (num_tokens,) if name == "ratio_mask" else (num_tokens, *num_targets)
            if values is not None and values.shape != shape:
                raise ValueError(
                    f"sample {index}: {name} has shape {list(values.shape)}: must be {list(shape)}"
                )


def _add_padding(
    pieces: list[Piece], sample: int, *, multiple: int, max_length: int | None
) -> list[int]:
    """Append padding up to a multiple of the rows, as number `sample`; return its lengths."""
    num_rows = count_rows(pieces)
    # A micro-batch of padding alone still has tokens, because every rank runs the model on it.
    num_padding = -num_rows % multiple if num_rows else multiple
    lengths = []
    while num_padding > 0:
        length = num_padding if max_length is None else min(max_length, num_padding)
        pieces.append(Piece(sample, 0, length, slice(num_rows, num_rows + length)))
        lengths.append(length)
        num_rows += length
        num_padding -= length
    return lengths


def _pack_micro_batch(
    samples: Sequence[TrainingSample],
    indices: Sequence[int],
    pieces: Sequence[Piece],
    *,
    padding: Sequence[int],
) -> PackedBatch:
    """Join the samples at `indices` in these pieces, the last of which are padding."""
    chosen = [samples[i] for i in indices]
    # A micro-batch of padding alone has the fields of the samples elsewhere.
    fields = _JoinedFields(chosen, pieces, samples[0])
    mask = fields.join("mask", np.bool_, False)
    ratio_mask = fields.join_optional("ratio_mask", np.bool_)

    sample_ids_T, positions_T = _number_rows(pieces)
    episodes_S = number_episodes(chosen)
    temperatures_S = np.asarray([s.temperature for s in chosen] + [1.0], dtype=np.float32)
    return PackedBatch(
        input_ids=fields.join("token_ids", np.int64, 0, shift=0),
        targets=fields.join("token_ids" if samples[0].targets is None else "targets", np.int64, 0),
        positions=torch.from_numpy(positions_T),
        sequences=_make_layout(pieces),
        mask=mask,
        advantages=fields.join("advantages", np.float32, 0.0),
        generator_logprobs=fields.join("generator_logprobs", np.float32, np.nan),
        reference_logprobs=fields.join_optional("reference_logprobs"),
        proximal_logprobs=fields.join_optional("proximal_logprobs"),
        ratio_mask=ratio_mask,
        loss_rows=_find_loss_rows(mask, ratio_mask),
        temperatures=torch.from_numpy(temperatures_S[sample_ids_T]),
        sequence_ids=torch.from_numpy(episodes_S[sample_ids_T]),
        num_sequences=int(episodes_S[-1]),
        sample_indices=tuple(indices),
        lengths=tuple(list_lengths(chosen)),
        rows=_list_rows(pieces, num_samples=len(chosen)),
        padding=tuple(padding),
    )


@dataclass(frozen=True, slots=True)
class _JoinedFields:
    """Fields of a micro-batch's samples, joined in the order of its pieces."""

    samples: Sequence[TrainingSample]
    pieces: Sequence[Piece]
    like: TrainingSample
    """Sample with the shapes of all; `samples` may be empty."""

    def join(self, name: str, dtype: type, padding: float, *, shift: int = 1) -> Tensor:
        """Return the values of all pieces, with padding; `shift` 1 takes those of the targets."""
        shape = (count_rows(self.pieces), *getattr(self.like, name).shape[1:])
        values_T: np.ndarray = np.full(shape, padding, dtype=dtype)
        for piece in self.pieces:
            if piece.sample < len(self.samples):
                values = getattr(self.samples[piece.sample], name)
                values_T[piece.rows] = values[piece.begin + shift : piece.end + shift]
        return torch.from_numpy(values_T)

    def join_optional(self, name: str, dtype: type = np.float32) -> Tensor | None:
        return None if getattr(self.like, name) is None else self.join(name, dtype, 0)


def _number_rows(pieces: Sequence[Piece]) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's number of its sample, and of its input in the sample, both [T] int64."""
    sample_ids, positions = [], []
    for piece in pieces:
        sample_ids.append(np.full(piece.end - piece.begin, piece.sample))
        positions.append(np.arange(piece.begin, piece.end))
    return np.concatenate(sample_ids), np.concatenate(positions)


def _list_rows(pieces: Sequence[Piece], *, num_samples: int) -> tuple[tuple[slice, ...], ...]:
    """Return the rows of each sample: those of the prefix that it shares, and its own."""
    rows: list[tuple[slice, ...]] = [()] * num_samples
    for piece in pieces:
        if piece.sample < num_samples:
            # The sample that is stored with the prompt has a later piece, which names both.
            rows[piece.sample] = (*piece.prefix, piece.rows)
    return tuple(rows)


def _find_loss_rows(mask: Tensor, ratio_mask: Tensor | None) -> Tensor:
    """Return the rows that a mask selects; the first row if there is none."""
    in_loss_T = mask.view(len(mask), -1).any(1)
    if ratio_mask is not None:
        in_loss_T = in_loss_T | ratio_mask
    loss_rows = in_loss_T.nonzero().squeeze(1)
    # The model's head runs on these rows, and all ranks must run it.
    return loss_rows if len(loss_rows) else loss_rows.new_zeros(1)


def _make_layout(pieces: Sequence[Piece]) -> SequenceLayout:
    lengths = [piece.end - piece.begin for piece in pieces]
    # Without shared prefixes no keys have to be gathered from elsewhere.
    if not any(piece.prefix for piece in pieces):
        return SequenceLayout.from_lengths(lengths)
    paths: list[list[tuple[int, int]]] = []
    for piece in pieces:
        paths.append([(rows.start, rows.stop) for rows in piece.prefix])
    return SequenceLayout.after_paths(lengths, paths)
