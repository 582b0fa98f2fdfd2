"""The way of a bank of adapters to the layers of a model, and the choice of a bank."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rl.models.layers.moe import DOWN, GATE_UP, GroupedExperts
from rl.models.low_rank.layer import Factors
from rl.models.low_rank.types import HEAD
from rl.models.parallelize import ShardedLinear


class AttachedBank:
    """Base of the banks: layers add the products of adapters to their outputs.

    Between `begin` and the end of a forward nothing may be loaded or dropped.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        *,
        dtype: torch.dtype,
        head_dtype: torch.dtype | None = None,
    ) -> None:
        """Attach to these layers of a model, by name: linear layers and experts.

        Args:
            dtype: of the base's products, in which adapters are kept too.
            head_dtype: of the output head's products, for which a caller uses `add_to_rows`; None
                takes no adapters for it.
        """
        self.dtypes: dict[str, torch.dtype] = {}
        """Dtype of the factors of each layer."""
        for name, layer in layers.items():
            if isinstance(layer, GroupedExperts):
                for leaf in (GATE_UP, DOWN):
                    self.dtypes[f"{name}.{leaf}"] = dtype
                    layer.adapters[leaf] = partial(self.add_to_experts, f"{name}.{leaf}")
            else:
                self.dtypes[name] = dtype
                _attach(layer, partial(self.add_to, name))
        if head_dtype is not None:
            self.dtypes[HEAD] = head_dtype

    @abstractmethod
    def add_to(self, name: str, x_TI: Tensor, out_TO: Tensor) -> None:
        """Add the products of the present forward's rows to a layer's output, in place."""

    @abstractmethod
    def add_to_experts(
        self, name: str, out_SO: Tensor, x_SI: Tensor, ends_N: Tensor, tokens_S: Tensor | None
    ) -> Tensor:
        """Add the products of experts to the output of the present forward's copies, in place."""

    def check_layers(self, factors: Mapping[str, Factors]) -> None:
        """Raise ValueError for a layer that takes no adapters."""
        unknown = sorted(factors.keys() - self.dtypes.keys())
        if unknown:
            raise ValueError(
                f"the adapter has factors for {unknown[0]}, which takes none here: must be of "
                f"{', '.join(sorted(self.dtypes))}"
            )


def _attach(layer: nn.Module, add: Callable[[Tensor, Tensor], None]) -> None:
    """Let a layer add products to its output."""
    if isinstance(layer, ShardedLinear):
        layer.adapt = add  # Before the sum over ranks.
        return

    def hook(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        add(args[0], out)

    layer.register_forward_hook(hook)
