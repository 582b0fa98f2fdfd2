"""Many adapters beside one base model, for sampling: each row of a batch takes the products of its
own.

    bank = AdapterBank(layers, dtype=torch.float32)
    bank.load(7, factors)                        # version 7, between two forwards
    bank.begin(np.array([7, 7, NONE, 3]))        # versions of the rows of the next forward
    model(ids, positions=positions)              # layers add the products to their outputs
    bank.drop(3)

Versions are numbers that the caller chooses. A version of other bits gets another number.

Experts of a mixture get copies of a token, each with the token's adapter and the factors of its own
expert.

Shape legend: T rows of a forward, S copies of them in the order of their experts, N experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from rl.models.low_rank.attach import AttachedBank
from rl.models.low_rank.kernel import NUM_FIELDS
from rl.models.low_rank.layer import Factors
from rl.models.low_rank.products import (
    PackedFactors,
    Tiles,
    add_products,
    count_packed,
    pack_factors,
)
from rl.models.low_rank.types import NONE

FIRST_SLOTS = 16
ALIGNMENT = 64
"""Bytes; a core's cache line."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Loaded:
    """An adapter in memory."""

    slot: int
    layers: dict[str, PackedFactors]
    num_bytes: int


class AdapterBank(AttachedBank):
    """The adapters that a model can sample with on a CPU, and their products by the kernel."""

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        *,
        dtype: torch.dtype,
        head_dtype: torch.dtype | None = None,
    ) -> None:
        """Attach to layers as an `AttachedBank`; factors in float16 are kept in float32."""
        head_dtype = None if head_dtype is None else find_kernel_dtype(head_dtype)
        super().__init__(layers, dtype=find_kernel_dtype(dtype), head_dtype=head_dtype)
        self.versions: dict[int, _Loaded] = {}
        self._tables: dict[str, np.ndarray] = {}
        """By layer: entries of the kernel's table, one row a slot."""
        self._work: dict[str, int] = {}
        """By layer: multiply-adds of a tile of rows, of the largest adapter."""
        self._scales = np.zeros(FIRST_SLOTS, dtype=np.float32)
        self._free = list(range(FIRST_SLOTS))
        self._versions_T = np.empty(0, dtype=np.int64)
        self._tiles: Tiles | None = None
        """Rows of the forward by adapter; None if no row has one."""
        self._slots_T = np.empty(0, dtype=np.int64)
        """Adapters of the rows of the forward, -1 for none."""
        self._of_experts: tuple[Tensor, Tiles] | None = None
        """Copies in the latest mixture, by adapter and expert; and the tensor with their tokens."""
        for name in self.dtypes:
            self._tables[name] = np.zeros((FIRST_SLOTS, NUM_FIELDS), dtype=np.int64)
            self._work[name] = 0

    def count_bytes(self, factors: Mapping[str, Factors]) -> int:
        """Return the memory that an adapter takes; raise ValueError as `check_layers`."""
        self.check_layers(factors)
        num_bytes = 0
        for name, of_layer in factors.items():
            for shape in count_packed(of_layer):
                num_bytes += _count_aligned_bytes(shape, self.dtypes[name])
        return num_bytes

    def has(self, layer: str) -> bool:
        """Return whether an adapter has factors for a layer."""
        return any(layer in loaded.layers for loaded in self.versions.values())

    def load(self, version: int, factors: Mapping[str, Factors]) -> None:
        """Take an adapter, given its factors by layer; they are copied.

        Raises ValueError for a version that is there, or as `count_bytes`.
        """
        if version in self.versions:
            raise ValueError(f"adapter {version} is loaded already")
        # One allocation, which goes back to the system as a whole when the adapter is dropped.
        num_bytes = self.count_bytes(factors)
        memory = torch.zeros(num_bytes, dtype=torch.uint8)
        slot = self._take_slot()
        layers: dict[str, PackedFactors] = {}
        begin = 0
        for name, of_layer in factors.items():
            parts: list[Tensor] = []
            dtype = self.dtypes[name]
            for shape in count_packed(of_layer):
                end = begin + shape.numel() * dtype.itemsize
                parts.append(memory[begin:end].view(dtype).view(shape))
                begin += _count_aligned_bytes(shape, dtype)
            layers[name] = pack_factors(of_layer, into=(parts[0], parts[1]))
            self._tables[name][slot] = layers[name].entry
            # An estimate of how to divide the tiles among threads; it changes no result.
            self._work[name] = max(self._work[name], layers[name].work)
            self._scales[slot] = of_layer.layer.scale
        self.versions[version] = _Loaded(slot=slot, layers=layers, num_bytes=num_bytes)

    def drop(self, version: int) -> None:
        """Free an adapter; raise KeyError if it is not loaded."""
        loaded = self.versions.pop(version)
        for table in self._tables.values():
            # An address that is left would be read after the memory is somebody else's.
            table[loaded.slot] = 0
        self._free.append(loaded.slot)
        self._versions_T, self._tiles = np.empty(0, dtype=np.int64), None
        self._of_experts = None

    def begin(self, versions_T: np.ndarray) -> None:
        """Assign an adapter's version, or NONE, to each row of the next forward.

        Raises KeyError for a version that is not loaded.
        """
        # Most steps have the rows of the step before.
        if np.array_equal(versions_T, self._versions_T):
            return
        self._slots_T = self._find_slots(versions_T)
        self._tiles = Tiles.of(self._slots_T) if (self._slots_T >= 0).any() else None
        self._versions_T, self._of_experts = versions_T.copy(), None

    def _find_slots(self, versions_T: np.ndarray) -> np.ndarray:
        slots_T = np.full(len(versions_T), -1, dtype=np.int64)
        for version in np.unique(versions_T).tolist():
            if version != NONE:
                slots_T[versions_T == version] = self.versions[version].slot
        return slots_T

    def add_to(self, name: str, x_TI: Tensor, out_TO: Tensor) -> None:
        if self._tiles is not None:
            self._add_tiles(name, x_TI, out_TO, self._tiles)

    def add_to_experts(
        self, name: str, out_SO: Tensor, x_SI: Tensor, ends_N: Tensor, tokens_S: Tensor | None
    ) -> Tensor:
        assert tokens_S is not None, "a sampler's experts see rows of their own forward alone"
        if self._tiles is None:
            return out_SO
        # Both products of a mixture have the same rows.
        if self._of_experts is None or self._of_experts[0] is not tokens_S:
            num_rows_N = np.diff(ends_N.numpy(), prepend=0)
            experts_S = np.repeat(np.arange(len(num_rows_N)), num_rows_N)
            slots_S = self._slots_T[tokens_S.numpy()]
            tiles = Tiles.of(slots_S, experts_S, num_experts=len(num_rows_N))
            self._of_experts = tokens_S, tiles
        self._add_tiles(name, x_SI, out_SO, self._of_experts[1])
        return out_SO

    def add_to_rows(self, name: str, x_TI: Tensor, out_TO: Tensor, versions_T: np.ndarray) -> None:
        """Add the products of a layer for rows of these versions, in place."""
        slots_T = self._find_slots(versions_T)
        if self.has(name) and (slots_T >= 0).any():
            self._add_tiles(name, x_TI, out_TO, Tiles.of(slots_T))

    def _add_tiles(self, name: str, x_TI: Tensor, out_TO: Tensor, tiles: Tiles) -> None:
        """Add the products of a layer for these rows, in place."""
        dtype = self.dtypes[name]
        x, out = x_TI.to(dtype).contiguous(), out_TO.to(dtype)
        add_products(x, out, tiles, self._tables[name], self._scales, work=self._work[name])
        if out is not out_TO:
            out_TO.copy_(out)

    def _take_slot(self) -> int:
        if not self._free:
            num_slots = len(self._scales)
            self._scales = np.concatenate((self._scales, np.zeros_like(self._scales)))
            for name, table in self._tables.items():
                self._tables[name] = np.concatenate((table, np.zeros_like(table)))
            self._free = list(range(num_slots, 2 * num_slots))
        return self._free.pop()


def find_kernel_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which factors are kept for the kernel, which has no float16."""
    return torch.float32 if dtype == torch.float16 else dtype


def _count_aligned_bytes(shape: torch.Size, dtype: torch.dtype) -> int:
    """Return the bytes of a tensor, up to where the next one may begin."""
    return -(-shape.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
