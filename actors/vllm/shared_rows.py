"""Rows of a step that are computed once for all requests that have them in common.

The samples of a prompt begin together. vLLM shares the keys and values of whole cache blocks among
them, so each sample computes the rest of its prompt, which is all of it if it is shorter than a
block. Those rows are equal until the first token is drawn. Here the layers compute them once; only
the attention sees every request's rows, because each request has keys and values of its own.

Shape legend: T tokens of all running requests, U of them that differ, S requests.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata


class SharedRows:
    """The rows of the current step; used by the model, and by each attention within it.

    On a GPU nothing is shared: to look at the rows would wait for the step before.
    """

    def __init__(self, *, block_size: int) -> None:
        """`block_size`: tokens of a cache block."""
        self._block_size = block_size
        self._kept_U: Tensor | None = None
        """[U] int64 indices into the step's rows; None if nothing is shared."""
        self._places_T: Tensor | None = None
        """[T] int64 place of each row among the kept ones."""

    def begin_step(
        self, input_ids_T: Tensor, positions_T: Tensor, versions_T: np.ndarray | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the ids and positions, [U], of the rows that the layers have to compute.

        `versions_T` are the rows' adapters, None if no row has one.
        """
        self._kept_U = self._places_T = None
        by_layer = get_forward_context().attn_metadata
        # None while vLLM measures the memory of a forward.
        metadata = next(iter(by_layer.values())) if isinstance(by_layer, dict) else None
        # A row of a request that only draws belongs to it alone.
        if not isinstance(metadata, CPUAttentionMetadata) or metadata.max_query_len == 1:
            return input_ids_T, positions_T

        equal_T = find_equal_rows(
            input_ids_T.numpy(),
            positions_T.numpy(),
            queries_S=metadata.query_start_loc.numpy(),
            tables=metadata.block_table.numpy(),
            block_size=self._block_size,
            versions_T=versions_T,
        )
        kept_U, places_T = np.unique(equal_T, return_inverse=True)
        if len(kept_U) == len(equal_T):
            return input_ids_T, positions_T

        self._kept_U, self._places_T = torch.from_numpy(kept_U), torch.from_numpy(places_T)
        return input_ids_T[self._kept_U], positions_T[self._kept_U]

    def spread(self, rows_U: Tensor) -> Tensor:
        """Return the rows of every request, [T, ...]; rows after the first U are left out."""
        return rows_U if self._places_T is None else _select(rows_U, self._places_T)

    def keep_array(self, values_T: np.ndarray) -> np.ndarray:
        """Return the values of the rows that differ, [U]."""
        return values_T if self._kept_U is None else values_T[self._kept_U.numpy()]

    def keep(self, rows_T: Tensor) -> Tensor:
        """Return the rows that differ, [U, ...]."""
        return rows_T if self._kept_U is None else _select(rows_T, self._kept_U)


def _select(rows: Tensor, indices: Tensor) -> Tensor:
    # Whole contiguous rows are copied several times as fast as by indexing.
    return rows.contiguous().index_select(0, indices)


def find_equal_rows(
    input_ids_T: np.ndarray,
    positions_T: np.ndarray,
    *,
    queries_S: np.ndarray,
    tables: np.ndarray,
    block_size: int,
    versions_T: np.ndarray | None = None,
) -> np.ndarray:
    """Return [T] int64: for each row the first one with the same tokens up to and with its own.

    Args:
        queries_S: [S+1] offsets of the requests' rows.
        tables: [S, largest number of blocks], the cache blocks of each request in order.
        versions_T: adapters of the rows; rows of different ones differ.
    """
    equal_T = np.arange(len(input_ids_T))
    first_begins: dict[tuple[int, bytes, bytes], int] = {}
    offsets = queries_S.tolist()
    for request, (begin, end) in enumerate(pairwise(offsets)):
        position = int(positions_T[begin])
        # The rest is in a block of the request's own, whose tokens are not known here.
        if position % block_size:
            continue
        # Blocks in common hold the keys and values of the same tokens.
        blocks = tables[request, : position // block_size]
        version = 0 if versions_T is None else int(versions_T[begin])
        key = version, blocks.tobytes(), input_ids_T[begin:end].tobytes()
        first = first_begins.setdefault(key, begin)
        equal_T[begin:end] = np.arange(first, first + end - begin)
    return equal_T
