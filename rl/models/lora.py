"""LoRA: training of low-rank products next to frozen weights.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685), equation 3.
Generators get the factors alone and compute the same product beside the same base
(`rl.models.low_rank`). Hugging Face folders, and with `merge` generators too, get the sums
W + alpha / rank * B A under the weights' own names; an adapter alone is read and written in PEFT's
format (`rl.models.files.peft`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rl.distributed.sharding import gather_whole, local_tensor, slice_local_shard
from rl.models.converter import ModelConverter
from rl.models.files.peft import read_peft_folder
from rl.models.layers.moe import DOWN, GATE_UP, GroupedExperts, multiply_groups
from rl.models.low_rank.layer import FACTORS, SUFFIX, LowRank

HEAD = "lm_head"
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoRA(ModelConverter):
    """Converter that freezes the model and adds adapters.

    There is no dropout, because the policy that is trained also samples.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConverter.Config):
        """Size of the adapters, the layers that get them, and their initial values."""

        rank: int = 16
        """Rank of the products."""
        alpha: float = 32.0
        """Numerator of the products' scale, alpha / rank."""
        target_modules: tuple[str, ...] | None = None
        """Linear layers to adapt, by Hugging Face's names (q_proj, gate_proj ...) or ours (qkv_proj
        is q_proj, k_proj and v_proj; gate_up_proj is gate_proj and up_proj). None selects all
        layers of attention and feed-forward, those of a mixture's experts included; its router is
        never adapted."""
        unembedding: bool = False
        """Adapt the output head too, unless it shares the embedding's weight."""
        seed: int = 0
        """Seed of the initial values: A is uniform within 1 / sqrt(input width), B is zero."""
        initial_adapter: str | None = None
        """Folder of an adapter in PEFT's format to start from; None draws one."""
        merge: bool = False
        """Give generators the sums of weights and products, as large as the model and rounded to
        their dtype, in place of the adapter. What is trained is then not what is sampled from: the
        metric `sync/merge_lost` is the share of the products that rounding loses."""

        def __post_init__(self) -> None:
            if self.rank < 1:
                raise ValueError(f"rank={self.rank}: must be at least 1")
            if not 0.0 < self.alpha < math.inf:
                raise ValueError(f"alpha={self.alpha}: must be a finite number above 0")
            if self.target_modules == () and not self.unembedding:
                raise ValueError(
                    "target_modules=(): must name at least one, or unembedding be True"
                )

        @property
        def scale(self) -> float:
            """Factor of the products."""
            return self.alpha / self.rank

        @property
        def keeps_bits(self) -> bool:
            return not self.merge

        @property
        def is_served_apart(self) -> bool:
            return not self.merge

    config: Config

    def convert(self, model: nn.Module) -> None:
        """Attach the adapters; raise ValueError naming an unknown target and the valid ones."""
        self._hf = self.spec.adapter(self.spec.model)
        self._adapters: dict[str, LowRank] = {}
        """Adapters by the name of our adapted weight."""
        if any(isinstance(module, LowRank) for module in model.modules()):
            raise ValueError("the model has adapters of an earlier LoRA: must be one LoRA")
        weights = self._find_weights(model)
        targets = self._resolve_targets(weights)

        # Before the adapters are attached, whose factors are trained.
        model.requires_grad_(False)
        for weight, hf_names in weights.items():
            num_fused = len(hf_names) // _count_experts(model.get_parameter(weight))
            adapted: dict[str, int] = {}
            for number, hf_name in enumerate(hf_names):
                if _get_leaf(hf_name) in targets or _get_leaf(weight) in targets:
                    adapted[hf_name] = number % num_fused
            if adapted:
                self._attach(model, weight, adapted)

        if self.config.unembedding:
            head = getattr(model, HEAD, None)
            if head is None:
                raise ValueError(
                    f"unembedding=True: {self.spec.name} {self.spec.flavor} has no output head of "
                    "its own, its weight is the embedding's, which the adapter would change too: "
                    "must be False"
                )
            self._attach(model, f"{HEAD}.weight", {f"{HEAD}.weight": 0})
        if self.config.initial_adapter is not None:
            # Read now too, so that an adapter that does not fit is refused before weights are read.
            self._open_peft(self.config.initial_adapter)

    def _find_weights(self, model: nn.Module) -> dict[str, list[str]]:
        """Return the weights that can be adapted by our name, with their Hugging Face names."""
        weights: dict[str, list[str]] = {}
        for name, module in model.named_modules():
            leaves: tuple[str, ...] = ()
            if isinstance(module, nn.Linear) and name != HEAD:
                leaves = ("weight",)
            elif isinstance(module, GroupedExperts):
                leaves = (GATE_UP, DOWN)
            for leaf in leaves:
                # Layers added by other converters are unknown to the adapter.
                with suppress(KeyError):
                    weights[f"{name}.{leaf}"] = self._hf.hf_names(f"{name}.{leaf}")
        return weights

    def _resolve_targets(self, weights: Mapping[str, list[str]]) -> set[str]:
        """Return the last name parts of the layers to adapt."""
        valid: dict[str, None] = {}
        for weight, hf_names in weights.items():
            valid |= dict.fromkeys(map(_get_leaf, (*hf_names, weight)))
        targets = self.config.target_modules
        if targets is None:
            return valid.keys() & set(ALL_LINEAR)
        for target in targets:
            if target not in valid:
                hint = "; the output head is unembedding=True" if target == HEAD else ""
                raise ValueError(
                    f"target_modules has {target!r}, which is no linear layer of {self.spec.name} "
                    f"{self.spec.flavor}: valid are {', '.join(valid)}{hint}"
                )
        return set(targets)

    def _attach(self, model: nn.Module, weight: str, adapted: dict[str, int]) -> None:
        """Add the adapter of a weight beside it; `adapted` numbers its Hugging Face weights."""
        parameter = model.get_parameter(weight)
        adapter = LowRank(
            parameter,
            source_O=self._find_sources(weight, parameter),
            adapted=adapted,
            rank=self.config.rank,
            scale=self.config.scale,
        )
        # A generator on a CPU computes products in this order, and the mode promises its bits.
        adapter.has_fixed_order = self.spec.batch_invariant and self.device.type == "cpu"
        name = weight.removesuffix(".weight")
        parent, _, leaf = name.rpartition(".")
        module = model.get_submodule(parent)
        setattr(module, f"{leaf}{SUFFIX}", adapter)
        self._adapters[weight] = adapter
        if isinstance(module, GroupedExperts):
            module.adapters[leaf] = lambda out, x, ends, _: adapter.add_to_groups(
                out, x, ends, multiply=multiply_groups
            )
        elif name != HEAD:  # The loss uses the head's weight without calling its layer.
            # A hook, so that the layer stays what the parallel plans expect.
            model.get_submodule(name).register_forward_hook(
                lambda _, args, out: adapter.add_to(out, args[0])
            )

    def _find_sources(self, weight: str, parameter: Tensor) -> Tensor:
        """Return the number of the Hugging Face weight that each row of ours comes from, [O].

        All experts of a stack have the rows of their weights in the same places.

        Example:
            A qkv_proj of two groups with two query heads each, of one row a head: q_proj's rows
            are 0, k_proj's 1 and v_proj's 2, in groups: [0, 0, 1, 2, 0, 0, 1, 2].
        """
        # The family's own regrouping of rows tells: it gets weights of one column whose rows hold
        # the weight's number.
        num_hf_rows = self._count_hf_rows(weight, parameter)
        num_fused = len(num_hf_rows) // _count_experts(parameter)
        hf_weights = []
        for number, num_rows in enumerate(num_hf_rows.values()):
            hf_weights.append(torch.full((num_rows, 1), number % num_fused, device="cpu"))
        sources = self._hf.from_hf(weight, hf_weights)
        assert sources.shape == (*parameter.shape[:-1], 1), (
            "the state-dict adapter must regroup rows alone"
        )
        return sources.view(-1, parameter.size(-2))[0]

    def _count_hf_rows(self, weight: str, parameter: Tensor) -> dict[str, int]:
        """Return the number of rows of each Hugging Face weight in ours, or in its B."""
        meta = torch.empty(*parameter.shape[:-1], 1, device="meta")
        return {name: tensor.size(0) for name, tensor in self._hf.to_hf(weight, meta).items()}

    @torch.no_grad()
    def weights_loaded(self, model: nn.Module, *, fresh: bool) -> None:
        """Initialize fresh adapters, from a folder or at random."""
        if not fresh:
            return
        if self.config.initial_adapter is not None:
            self.load_peft(self.config.initial_adapter)
            return
        # Drawn whole and sliced, so that the numbers are equal in every layout.
        generator = torch.Generator().manual_seed(self.config.seed)
        for adapter in self._adapters.values():
            bound = 1.0 / math.sqrt(adapter.lora_a.size(-1))
            a = torch.empty(adapter.lora_a.shape).uniform_(-bound, bound, generator=generator)
            _fill(adapter.lora_a, a)
            # B is zero, so that the first policy is the plain model.
            local_tensor(adapter.lora_b).zero_()

    @property
    def adapters(self) -> list[LowRank]:
        """The adapters of all weights that have one."""
        return list(self._adapters.values())

    @property
    def names(self) -> set[str]:
        """Names of the factors among the model's parameters."""
        names: set[str] = set()
        for weight in self._adapters:
            prefix = f"{weight.removesuffix('.weight')}{SUFFIX}"
            names |= {f"{prefix}.{factor}" for factor in FACTORS}
        return names

    def plain_tensor(self, name: str, tensor: Tensor) -> Tensor:
        adapter = self._adapters.get(name)
        return tensor if adapter is None else adapter.merge_without_gradient(tensor)

    def yield_updates(self, name: str, weight: Tensor) -> Iterator[tuple[Any, Tensor]]:
        """Yield `LowRank.yield_updates` of a weight; nothing if it has no adapter."""
        adapter = self._adapters.get(name)
        if adapter is not None:
            yield from adapter.yield_updates(weight)

    def yield_peft_factors(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the Hugging Face name of each weight with its whole A and B.

        Factors are gathered, so every rank must consume all. Adapters that only other ranks of a
        pipeline have are on the meta device, and left out.
        """
        for weight, adapter in self._adapters.items():
            if adapter.lora_a.is_meta:
                continue
            a = gather_whole(adapter.lora_a.detach())
            b = gather_whole(adapter.lora_b.detach())
            b_of = self._hf.to_hf(weight, b)
            # Of a stack, the A's of the first expert are first.
            a_of = a.view(-1, a.size(-1)).split(adapter.rank)
            for hf_name, a_RI in zip(adapter.adapted, a_of, strict=True):
                yield hf_name, a_RI, b_of[hf_name]

    @torch.no_grad()
    def load_peft(self, folder: str | Path) -> None:
        """Load the adapters of a folder in PEFT's format; every rank reads it.

        Raises ValueError if the adapters do not fit.
        """
        factors = self._open_peft(folder)
        for weight, adapter in self._adapters.items():
            a = torch.cat([factors[name][0] for name in adapter.adapted])
            _fill(adapter.lora_a, a.view(adapter.lora_a.shape))
            parts: list[Tensor] = []
            for name, num_rows in self._count_hf_rows(weight, adapter.lora_b).items():
                # Rows of a weight that is not adapted are zeros, which add nothing.
                is_adapted = name in adapter.adapted
                parts.append(
                    factors[name][1] if is_adapted else torch.zeros(num_rows, adapter.rank)
                )
            _fill(adapter.lora_b, self._hf.from_hf(weight, parts))

    def saved_settings(self) -> dict[str, Any]:
        """Return the settings; shapes do not reveal alpha, and targets within fused weights."""
        targets: set[str] = set()
        for adapter in self._adapters.values():
            targets.update(_get_leaf(name) for name in adapter.adapted)
        return {
            "rank": self.config.rank,
            "alpha": self.config.alpha,
            "target_modules": sorted(targets - {HEAD}),
            "unembedding": self.config.unembedding,
        }

    def _open_peft(self, folder: str | Path) -> dict[str, tuple[Tensor, Tensor]]:
        widths: dict[str, tuple[int, int]] = {}
        for weight, adapter in self._adapters.items():
            rows = self._count_hf_rows(weight, adapter.lora_b)
            for hf_name in adapter.adapted:
                widths[hf_name] = adapter.lora_a.size(-1), rows[hf_name]
        return read_peft_folder(
            folder, rank=self.config.rank, alpha=self.config.alpha, widths=widths
        )


def _get_leaf(name: str) -> str:
    """Return `q_proj` of `model.layers.0.self_attn.q_proj.weight`."""
    return name.removesuffix(".weight").rpartition(".")[2]


def _count_experts(weight: Tensor) -> int:
    """Return the number of experts in a stack of weights, 1 for a single weight."""
    return weight.size(0) if weight.ndim == 3 else 1


def _fill(parameter: nn.Parameter, whole: Tensor) -> None:
    local_tensor(parameter).copy_(slice_local_shard(whole, parameter))
