"""Adapters' factors, one matrix at a time.

A parameter `...qkv_proj_lora.lora_a` is the A's of several Hugging Face weights, one below the other, and
`lora_b` has their B's rows in the order of our fused weight. What an optimizer does with whole matrices
must not depend on that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl.models.spec import StateDictAdapter


@dataclass(frozen=True, kw_only=True, slots=True)
class Factor:
    """One parameter of an adapter."""

    weight: str
    """Our name of the weight that it is added to."""
    adapted: Sequence[str]
    """Hugging Face's names of the weights in that one which have factors."""
    num_rows: Mapping[str, int] | None
    """Of all Hugging Face weights in it, which B's rows are; None for A."""


class FactorAdapter:
    """A `rl.models.spec.StateDictAdapter` that knows the factors too: a matrix for each adapted weight."""

    def __init__(self, plain: StateDictAdapter, factors: Mapping[str, Factor]) -> None:
        """`factors` by the parameter's name; all others are those of `plain`."""
        self.plain = plain
        self.factors = factors

    def hf_names(self, name: str) -> list[str]:
        factor = self.factors.get(name)
        if factor is None:
            return self.plain.hf_names(name)
        return [f"{hf_name}.{name.rpartition('.')[2]}" for hf_name in factor.adapted]

    def to_hf(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        factor = self.factors.get(name)
        if factor is None:
            return self.plain.to_hf(name, tensor)
        if factor.num_rows is None:
            parts = list(tensor.chunk(len(factor.adapted)))
        else:
            rows_of = self.plain.to_hf(factor.weight, tensor)
            parts = [rows_of[hf_name] for hf_name in factor.adapted]
        return dict(zip(self.hf_names(name), parts, strict=True))

    def from_hf(self, name: str, tensors: list[Tensor]) -> Tensor:
        """Rows of B that belong to no A are zeros."""
        factor = self.factors.get(name)
        if factor is None:
            return self.plain.from_hf(name, tensors)
        if factor.num_rows is None:
            return torch.cat(tensors)
        given = dict(zip(factor.adapted, tensors, strict=True))
        parts = [
            given[hf_name] if hf_name in given else tensors[0].new_zeros(num, tensors[0].size(1))
            for hf_name, num in factor.num_rows.items()
        ]
        return self.plain.from_hf(factor.weight, parts)

    def hf_config(self) -> dict[str, Any]:
        return self.plain.hf_config()
