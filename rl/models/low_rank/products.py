"""Low-rank products on a CPU with the kernel of `kernel.py`: of one adapter with gradients, and of
many adapters in one batch.

Shape legend: T rows, M tiles of eight rows, I input and O output width, N products, R rank. Arrays
of experts have one dimension more, the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rl.models.batch_invariant.functions import share
from rl.models.low_rank.kernel import NARROW, NUM_FIELDS, ROWS, add_low_rank


class LayerFactors(Protocol):
    """What is needed here of `rl.models.low_rank.layer.Factors`, which needs this module."""

    @property
    def a(self) -> Tensor: ...
    @property
    def b(self) -> Tensor: ...
    @property
    def rows_ON(self) -> Tensor: ...  # noqa: N802
    @property
    def layer(self) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedFactors:
    """Factors of one layer in the order in which the kernel reads them."""

    a: Tensor
    """A^T, [I, N * R in whole narrow tiles]."""
    b: Tensor
    """B^T, [R, O]."""
    runs: np.ndarray
    """[runs, 3] int64: begin and end of neighbouring columns, and the product they belong to."""
    work: int
    """Multiply-adds of a full tile of rows."""

    @property
    def entry(self) -> list[int]:
        """Row of the kernel's table; valid while the tensors stay where they are."""
        return [
            self.a.data_ptr(),
            self.b.data_ptr(),
            self.runs.ctypes.data,
            len(self.runs),
            self.b.size(-2),
            self.a.size(-1),
        ]


def count_packed(factors: LayerFactors) -> tuple[torch.Size, torch.Size]:
    """Return the shapes of the packed A and B."""
    *stack, num_low, num_in = factors.a.shape
    num_out, rank = factors.b.shape[-2:]
    return (
        torch.Size((*stack, num_in, _round_up(num_low, NARROW))),
        torch.Size((*stack, rank, num_out)),
    )


def pack_factors(
    factors: LayerFactors,
    *,
    into: tuple[Tensor, Tensor] | None = None,
    runs: np.ndarray | None = None,
) -> PackedFactors:
    """Copy factors into tensors of `count_packed`'s shapes, of which A holds zeros."""
    num_low, num_in = factors.a.shape[-2:]
    num_out, rank = factors.b.shape[-2:]
    if into is None:
        of_a, of_b = count_packed(factors)
        into = factors.a.new_zeros(of_a), factors.b.new_empty(of_b)
    a, b = into
    a[..., :num_low].copy_(factors.a.detach().mT)
    b.copy_(factors.b.detach().mT)
    return PackedFactors(
        a=a,
        b=b,
        runs=find_runs(factors.rows_ON) if runs is None else runs,
        work=ROWS * (num_in * num_low + num_out * rank),
    )


def find_runs(rows_ON: Tensor) -> np.ndarray:
    """Return [runs, 3] int64: the neighbouring rows of B with the same A, and its number.

    Example:
        Two rows of the first weight, one that is not adapted, one of the second weight:
        [[0, 2, 0], [3, 4, 1]].
    """
    mask_ON = rows_ON.cpu().numpy()
    products_O = np.where(mask_ON.any(axis=1), mask_ON.argmax(axis=1), -1)
    begins = np.flatnonzero(np.diff(products_O, prepend=-2))
    ends = np.append(begins[1:], len(products_O))
    runs = np.stack((begins, ends, products_O[begins]), axis=1).astype(np.int64)
    return np.ascontiguousarray(runs[runs[:, 2] >= 0])


def _round_up(count: int, tile: int) -> int:
    return -(-count // tile) * tile


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tiles:
    """Rows of a batch by adapter and expert, in tiles of at most ROWS rows."""

    rows: np.ndarray
    """[M, ROWS] int64; -1 for none, after the others."""
    slots: np.ndarray
    """[M] int64, the adapter of each tile."""
    experts: np.ndarray
    """[M] int64, the expert of each tile; 0 for layers without experts."""

    @staticmethod
    def of(
        slots_T: np.ndarray, experts_T: np.ndarray | None = None, *, num_experts: int = 1
    ) -> Tiles:
        """Return the tiles of rows whose adapters are given; rows of a negative one are left out.

        Example:
            Adapters 7, 3, 7 and none, ROWS 2: rows [[1, -1], [0, 2]] with slots [3, 7].
        """
        # Rows of a tile have both in common, so that it has one A and one B.
        pairs_T = slots_T * num_experts
        if experts_T is not None:
            pairs_T += np.where(slots_T >= 0, experts_T, 0)
        rows_T = np.argsort(pairs_T, kind="stable")
        rows_T = rows_T[pairs_T[rows_T] >= 0]
        sorted_T = pairs_T[rows_T]
        pairs, begins, counts = np.unique(sorted_T, return_index=True, return_counts=True)
        num_tiles = -(-counts // ROWS)
        # The place of a row among those of its adapter gives its tile, and its place in the tile.
        within_T = np.arange(len(rows_T)) - np.repeat(begins, counts)
        first_tiles = np.cumsum(num_tiles) - num_tiles
        tiles_T = np.repeat(first_tiles, counts) + within_T // ROWS
        rows = np.full((int(num_tiles.sum()), ROWS), -1, dtype=np.int64)
        rows[tiles_T, within_T % ROWS] = rows_T
        slots_M, experts_M = np.divmod(np.repeat(pairs, num_tiles), num_experts)
        return Tiles(rows=rows, slots=slots_M, experts=experts_M)

    @staticmethod
    def of_all(num_rows: int) -> Tiles:
        """Return the tiles of rows that all have adapter 0."""
        rows = np.arange(_round_up(num_rows, ROWS), dtype=np.int64).reshape(-1, ROWS)
        rows[rows >= num_rows] = -1
        none_M = np.zeros(len(rows), dtype=np.int64)
        return Tiles(rows=rows, slots=none_M, experts=none_M)


def add_products(
    x_TI: Tensor, out_TO: Tensor, tiles: Tiles, table: np.ndarray, scales: np.ndarray, *, work: int
) -> None:
    """Add each row's product to `out_TO` in place.

    Args:
        table: [adapters, NUM_FIELDS] int64, `PackedFactors.entry` of each; zeros for none.
        scales: [adapters] float32.
        work: multiply-adds of a full tile.
    """
    assert x_TI.dtype == out_TO.dtype, "the kernel reads and writes one dtype"
    x, out = _to_array(x_TI), _to_array(out_TO)
    of_tiles = tiles.rows, tiles.slots, tiles.experts
    # A tile that is not full is computed as one of four rows or of one, at half the speed.
    work_M = np.where(tiles.rows[:, 4] < 0, work // 2, work)
    work_M = np.where(tiles.rows[:, 1] < 0, work // 4, work_M)
    ends = np.concatenate(([0], work_M.cumsum()))
    share(
        lambda begin, end: add_low_rank(x, out, *of_tiles, table, scales, begin, end),
        ends,
    )


def _to_array(x: Tensor) -> np.ndarray:
    """Return a contiguous tensor's memory as an array; bfloat16 as its bits."""
    assert x.is_contiguous(), "the kernel reads and writes whole rows"
    array: np.ndarray = (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()
    return array


def add_in_fixed_order(output_TO: Tensor, x_TI: Tensor, factors: LayerFactors) -> Tensor:
    """Return the output plus the product of one adapter, bit for bit as in a batch of many."""
    out: Tensor = _FixedOrder.apply(output_TO, x_TI, factors.a, factors.b, factors)
    return out


class _FixedOrder(torch.autograd.Function):
    """Product by the kernel, with PyTorch's gradients."""

    @staticmethod
    def forward(
        ctx: Any, output_TO: Tensor, x_TI: Tensor, a: Tensor, b: Tensor, factors: LayerFactors
    ) -> Tensor:
        ctx.save_for_backward(x_TI, a, b)
        ctx.layer, ctx.rows_ON = factors.layer, factors.rows_ON
        packed = pack_factors(factors)
        table = np.array([packed.entry], dtype=np.int64)
        assert table.shape[1] == NUM_FIELDS
        out = output_TO.detach().clone(memory_format=torch.contiguous_format)
        scales = np.array([factors.layer.scale], dtype=np.float32)
        tiles = Tiles.of_all(len(x_TI))
        add_products(x_TI.detach().contiguous(), out, tiles, table, scales, work=packed.work)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, a, b = ctx.saved_tensors
        grad_TO, layer = grads[0], ctx.layer
        low = x_TI @ a.t()
        spread = layer.spread_by_source(b, ctx.rows_ON)
        grad_low = (grad_TO @ spread) * layer.scale
        grad_spread = (grad_TO.t() @ low) * layer.scale
        grad_b = layer.gather_by_source(grad_spread, ctx.rows_ON)
        return grad_TO, grad_low @ a, grad_low.t() @ x_TI, grad_b, None
