"""Stochastic rounding of an optimizer's results to bfloat16.

A bfloat16 number has eight bits of precision. Rounded to the nearest number, a step below 1/512 of
a weight leaves the weight as it is, in this step and in every later one. Here a result is rounded
up or down at random, with probabilities that make it right on average (Gupta et al., "Deep Learning
with Limited Numerical Precision", arXiv:1502.02551).

The random bits of a number are a hash of the seed, the policy version, its parameter's name and its
place in the whole tensor. So replicas round alike, a resumed run repeats its steps, no layout
changes a number, and nothing is stored.

Shape legend: R rows (all dimensions but the last) and C columns of this rank's part of a parameter,
r rows of a piece.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rl.distributed.collectives import sum_each_over_world
from rl.distributed.mesh import count_ranks_of_stage
from rl.distributed.sharding import count_shards, local_tensor, slice_local_shard, unwrap
from rl.trainer_types import RoundingResult

PIECE_NUMBERS = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Numbers of a parameter that are stepped at once in float32, by device: on a CPU they stay in its
cache.
"""
PIECE_BYTES = 50
"""Bytes for each of these numbers, as measured: four tensors in float32, and what rounding makes of
them.
"""
_LOW_BITS = 0xFFFF
"""Bits of a float32 that bfloat16 does not have."""


class Rounding:
    """Rounding of the parameters and running means of one optimizer, step by step."""

    def __init__(self, *, seed: int) -> None:
        self.seed = seed
        self.version = 0
        """Policy version before the step."""
        self._sums: dict[nn.Parameter, Tensor] = {}
        """Number and sum of updates, then of changes of stored numbers, [4] float64 each."""

    def split_rows(self, name: str, parameter: nn.Parameter) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of the rows [R] of this rank's part, and their random bits [r, C], int32."""
        local = rows_of(parameter)
        if not local.numel():
            return

        identity = f"{self.seed} {self.version} {name}"
        digest = hashlib.blake2b(identity.encode(), digest_size=4).digest()
        rows_R, columns_C = _compute_places(parameter)
        # An odd factor, the golden ratio's, spreads the columns before they are mixed with the row.
        columns_C = columns_C * -1640531535
        keys_R = _hash_bits(rows_R ^ int.from_bytes(digest, "little", signed=True))
        num_rows = max(1, PIECE_NUMBERS[local.device.type] // local.size(1))
        for start in range(0, local.size(0), num_rows):
            rows = slice(start, start + num_rows)
            yield rows, _hash_bits(keys_R[rows, None] + columns_C)

    def store_weights(
        self, parameter: nn.Parameter, rows: slice, wide_rC: Tensor, bits_rC: Tensor
    ) -> None:
        """Round new weights into the parameter, and count what was lost."""
        stored_rC = rows_of(parameter)[rows]
        before_rC = stored_rC.float()
        round_into(stored_rC, wide_rC, bits_rC & _LOW_BITS)
        # A weight moves towards its new value or beyond, never the other way, and only if it has an
        # update.
        sums: list[Tensor] = []
        for differences_rC in (wide_rC - before_rC, stored_rC.float() - before_rC):
            sums.append(torch.count_nonzero(differences_rC).double())
            sums.append(torch.linalg.vector_norm(differences_rC, ord=1).double())
        total = torch.stack(sums)
        self._sums[parameter] = total + self._sums.get(parameter, 0.0)

    def reduce(self, *, mesh: DeviceMesh | None) -> RoundingResult:
        """Sum over ranks what was stored since the last call."""
        total = torch.zeros(4, dtype=torch.float64)
        for parameter, sums in self._sums.items():
            total += sums.cpu() * count_shards(parameter) / count_ranks_of_stage(mesh)
        self.forget()
        if mesh is not None:
            total = total.to(mesh.device_type)
        num_updates, updates, num_changes, changes = sum_each_over_world(total, mesh=mesh)
        return RoundingResult(
            rounded_away=1.0 - num_changes / num_updates if num_updates else 0.0,
            applied=changes / updates if updates else 1.0,
        )

    def forget(self) -> None:
        self._sums = {}


def rows_of(tensor: Tensor) -> Tensor:
    """Return a view [R, C] of this rank's part."""
    local = local_tensor(unwrap(tensor.detach()))
    return (
        local.view(-1, local.size(-1) if local.ndim else 1)
        if local.numel()
        else local.new_empty(0, 1)
    )


def round_into(target: Tensor, wide: Tensor, noise: Tensor) -> None:
    """Round float32 numbers into a bfloat16 tensor.

    A number goes away from zero if its low bits plus `noise`, 16 bits, overflow, so with a
    probability that is its share of the way to the next number.
    """
    bits = (wide.view(torch.int32) + noise) & ~_LOW_BITS
    # The bits of a NaN may overflow; those of infinity stay.
    target.copy_(torch.where(wide == wide, bits.view(torch.float32), wide))


def derive_bits(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return two more random numbers of 16 bits, independent of the low bits and each other."""
    high = (bits >> 16) & _LOW_BITS
    return high, (bits & _LOW_BITS) ^ high


def _compute_places(parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
    """Return the numbers of this rank's rows [R] and columns [C] in the whole tensor, int32."""
    shape, device = parameter.shape, local_tensor(parameter.detach()).device
    if not shape:  # one number
        place = torch.zeros(1, dtype=torch.int32, device=device)
        return place, place

    # Where this rank's part lies in the whole tensor depends on the layout; sharding the numbers of
    # each dimension as the parameter is sharded finds out.
    indices = []
    for dim, size in enumerate(shape):
        numbers = torch.arange(size, device=device)
        along = numbers.view(-1, *[1] * (len(shape) - dim - 1)).expand(shape)
        mine = slice_local_shard(along, parameter)
        # The numbers are the same along all other dimensions.
        first: list[slice | int] = [0] * len(shape)
        first[dim] = slice(None)
        indices.append(mine[tuple(first)])

    rows_R = torch.zeros(1, dtype=torch.int64, device=device)
    for size, index in zip(shape[:-1], indices[:-1], strict=True):
        rows_R = (rows_R[:, None] * size + index).flatten()
    return rows_R.to(torch.int32), indices[-1].to(torch.int32)


def _hash_bits(x: Tensor) -> Tensor:
    """Return a hash of each number, 32 bits (Wellons, "Prospecting for Hash Functions").

    The function is lowbias32; masks after each shift make it that of unsigned numbers.
    """
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * -2073254261
    return x ^ ((x >> 16) & 0xFFFF)
