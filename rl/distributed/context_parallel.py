"""Context parallelism: the tokens of each micro-batch split over ranks.

The T packed tokens are cut into 2n pieces for n ranks; rank r takes pieces r and 2n - 1 - r, one
that sees few keys and one that sees many, so that causal attention costs about the same everywhere.
All layers except attention see a rank's own tokens alone. Attention gathers the keys and values of
all ranks (allgather), or exchanges tokens for heads: each rank gets all tokens of its share of the
heads (alltoall). Either way each query sees exactly the keys that it sees on one device. The
logprobs of all tokens are then gathered on every rank, which computes the whole loss and sends back
the gradient of its own tokens: any loss stays exact, and each token counts once.

Shape legend: T packed tokens, n ranks, t = T / n tokens of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rl.distributed.collectives import ExchangeRows, GatherAlike


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextParallel:
    """This process's position on the context-parallel axis."""

    rank: int
    num_ranks: int
    group: str
    """Name of the process group."""

    @classmethod
    def of(cls, mesh: DeviceMesh) -> ContextParallel | None:
        """Return the position on a one-dimensional mesh, or None if it has a single rank."""
        if mesh.size() == 1:
            return None
        return cls(
            rank=mesh.get_local_rank(), num_ranks=mesh.size(), group=mesh.get_group().group_name
        )

    def pad_multiple(self, multiple: int) -> int:
        """Return the divisor of T for equal pieces with a `multiple` of tokens on each rank."""
        return self.num_ranks * math.lcm(2, multiple)

    def pieces(self, num_tokens: int, *, rank: int | None = None) -> list[tuple[int, int]]:
        """Return start and end of a rank's pieces (None: this rank), in order.

        Adjacent pieces are joined. Example: of 16 tokens on 4 ranks, rank 1 has [(2, 4), (12, 14)]
        and rank 3 has [(6, 10)].
        """
        rank = self.rank if rank is None else rank
        size = num_tokens // (2 * self.num_ranks)
        assert size * 2 * self.num_ranks == num_tokens, (
            "the packed tokens do not divide into equal pieces"
        )
        first, last = rank * size, (2 * self.num_ranks - 1 - rank) * size
        if first + size == last:
            return [(first, last + size)]
        return [(first, first + size), (last, last + size)]

    def token_indices(self, num_tokens: int) -> Tensor:
        """Return the indices of this rank's tokens among all T, [t] int64, in order."""
        return join_ranges(self.pieces(num_tokens))

    def gather(self, values_t: Tensor, places_T: Tensor) -> Tensor:
        """Return the values of all ranks' tokens, [T], in the order of `places`, alike on every
        rank.
        """
        gathered = GatherAlike.apply(values_t, self.rank, self.num_ranks, self.group)
        return gathered.index_select(0, places_T)

    def to_all_tokens(self, x_tn: Tensor) -> Tensor:
        """Send part p of each token, [t, n, ...], to rank p; return this rank's parts, [T, ...]."""
        # Early pieces arrive in the order of the tokens, late pieces in the opposite order.
        early, late = self._exchange(x_tn.transpose(0, 1)).chunk(2, dim=1)
        return torch.cat((early, late.flip(0))).flatten(0, 1)

    def to_own_tokens(self, x_T: Tensor) -> Tensor:
        """Undo `to_all_tokens`: return all parts of this rank's tokens, [t, n, ...]."""
        early, late = x_T.unflatten(0, (2 * self.num_ranks, -1)).chunk(2)
        return self._exchange(torch.cat((early, late.flip(0)), dim=1)).transpose(0, 1)

    def _exchange(self, x_nt: Tensor) -> Tensor:
        """Send row p to rank p and return the rows received, in the order of their ranks."""
        rows = [x_nt.size(1)] * self.num_ranks
        exchanged: Tensor = ExchangeRows.apply(x_nt.flatten(0, 1), rows, rows, self.group)
        return exchanged.view(x_nt.shape)

    def places(self, num_tokens: int) -> Tensor:
        """Return the index of each token in the concatenation of all ranks' tokens, [T] int64."""
        pieces = []
        for rank in range(self.num_ranks):
            pieces += self.pieces(num_tokens, rank=rank)
        # The concatenation has the tokens in the order of `pieces`; the inverse says where each is.
        return torch.argsort(join_ranges(pieces))


def join_ranges(ranges: Sequence[tuple[int, int]]) -> Tensor:
    """Return the integers of all ranges, one range after another, int64."""
    return torch.cat([torch.arange(start, end) for start, end in ranges])
