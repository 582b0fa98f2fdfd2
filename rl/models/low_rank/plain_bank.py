"""Many adapters beside one base model in plain PyTorch, for devices without the kernel of
`rl.models.low_rank.bank`; the class there says how both are used.

Shape legend: T rows of a forward, S copies of them in the order of their experts, N experts, I
input and O output width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from rl.models.low_rank.attach import AttachedBank
from rl.models.low_rank.layer import Factors


class PlainBank(AttachedBank):
    """An `AdapterBank` that multiplies adapter by adapter, each with its own rows."""

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        *,
        dtype: torch.dtype,
        head_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(layers, dtype=dtype, head_dtype=head_dtype)
        self.versions: dict[int, dict[str, Factors]] = {}
        self._versions_T = np.empty(0, dtype=np.int64)
        """Versions of the rows of the present forward."""

    def has(self, layer: str) -> bool:
        """Return whether an adapter has factors for a layer."""
        return any(layer in factors for factors in self.versions.values())

    def count_bytes(self, factors: Mapping[str, Factors]) -> int:
        """Return the memory that an adapter takes; raise ValueError as `check_layers`."""
        self.check_layers(factors)
        num_bytes = 0
        for name, of_layer in factors.items():
            num_bytes += (of_layer.a.numel() + of_layer.b.numel()) * self.dtypes[name].itemsize
        return num_bytes

    def load(self, version: int, factors: Mapping[str, Factors]) -> None:
        """Take an adapter, given its factors by layer; they are copied.

        Raises ValueError for a version that is there, or a layer that takes no adapters.
        """
        if version in self.versions:
            raise ValueError(f"adapter {version} is loaded already")
        self.check_layers(factors)
        copies: dict[str, Factors] = {}
        for name, given in factors.items():
            a = given.a.detach().to(self.dtypes[name], copy=True)
            b = given.b.detach().to(self.dtypes[name], copy=True)
            copies[name] = replace(given, a=a, b=b, rows_ON=given.rows_ON.to(a.device))
        self.versions[version] = copies

    def drop(self, version: int) -> None:
        """Free an adapter; raise KeyError if it is not loaded."""
        del self.versions[version]
        self._versions_T = np.empty(0, dtype=np.int64)

    def begin(self, versions_T: np.ndarray) -> None:
        """Assign an adapter's version, or NONE, to each row of the next forward.

        Raises KeyError for a version that is not loaded.
        """
        self._check(versions_T)
        self._versions_T = versions_T

    def add_to_rows(self, name: str, x_TI: Tensor, out_TO: Tensor, versions_T: np.ndarray) -> None:
        """Add the products of a layer for rows of these versions, in place."""
        self._check(versions_T)
        for version in np.unique(versions_T).tolist():
            factors = self.versions.get(version, {}).get(name)
            if factors is not None:
                rows = torch.from_numpy(np.flatnonzero(versions_T == version)).to(x_TI.device)
                out_TO[rows] = factors.add_to(out_TO[rows], x_TI[rows])

    def _check(self, versions_T: np.ndarray) -> None:
        for version in np.unique(versions_T[versions_T >= 0]).tolist():
            if version not in self.versions:
                raise KeyError(version)

    def add_to(self, name: str, x_TI: Tensor, out_TO: Tensor) -> None:
        self.add_to_rows(name, x_TI, out_TO, self._versions_T)

    def add_to_experts(
        self, name: str, out_SO: Tensor, x_SI: Tensor, ends_N: Tensor, tokens_S: Tensor | None
    ) -> Tensor:
        assert tokens_S is not None, "a sampler's experts see rows of their own forward alone"
        if not (self._versions_T >= 0).any():
            return out_SO
        versions_S = self._versions_T[tokens_S.cpu().numpy()]
        experts_S = np.searchsorted(ends_N.cpu().numpy(), np.arange(len(versions_S)), side="right")
        for version, expert in sorted(
            set(zip(versions_S.tolist(), experts_S.tolist(), strict=True))
        ):
            factors = self.versions.get(version, {}).get(name)
            if factors is not None:
                own = replace(factors, a=factors.a[expert], b=factors.b[expert])
                places_S = (versions_S == version) & (experts_S == expert)
                rows = torch.from_numpy(np.flatnonzero(places_S)).to(x_SI.device)
                out_SO[rows] = own.add_to(out_SO[rows], x_SI[rows])
        return out_SO
