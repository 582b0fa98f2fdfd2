"""Qwen3 MoE: Qwen3 with a mixture of experts in every feed-forward layer.

Hugging Face's files hold three matrices per expert; ours, two stacks of all experts
(`rl.models.layers.moe`). The load-balance bias has no place in their model; it is written beside
the router's weight, and other readers ignore it.

Shape legend: E model width, N experts, F rows of the gate and up projection of one expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl.models.adapter import DecoderAdapter, read_field, refuse_other_values, split_name
from rl.models.decoder import Decoder
from rl.models.layers.moe import MoE
from rl.models.spec import ModelSpec, spec_of_flavor

_EXPERTS, _ROUTER = "feed_forward.experts", "feed_forward.router"
_ROUTER_NAMES = {
    "weight": "mlp.gate.weight",
    "load_balance_bias": "mlp.gate.e_score_correction_bias",
}
_EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Matrices of one expert in Hugging Face's files, by the name of our stack."""


class Qwen3MoeAdapter(DecoderAdapter):
    """Qwen3's names and tensors, with an expert's matrices in place of the feed-forward layer's."""

    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    qk_norm = True
    default_head_dim = 128

    @classmethod
    def is_global(cls, hf: dict[str, Any], layer: int) -> bool:
        return False  # `max_window_layers` does not count.

    def __init__(self, config: Decoder.Config) -> None:
        super().__init__(config)
        mixture = config.block.feed_forward
        assert isinstance(mixture, MoE.Config)
        self.mixture, self.num_experts = mixture, mixture.num_experts

    @classmethod
    def feed_forward_from_hf(cls, hf: dict[str, Any]) -> MoE.Config:
        """Return the config of the mixture.

        Raises ValueError for layers without experts, or the router's auxiliary loss.
        """
        refuse_other_values(
            hf,
            {
                "decoder_sparse_step": (None, 1),
                "mlp_only_layers": (None, []),
                "output_router_logits": (None, False),
            },
        )
        # Published folders have the first name, transformers 5 writes the second.
        first, second = hf.get("num_experts"), hf.get("num_local_experts")
        if first is not None and second is not None and first != second:
            numbers = {"num_experts": first, "num_local_experts": second}
            raise ValueError(
                f"config.json: {numbers} are not equal: both are the number of experts"
            )
        field = "num_local_experts" if first is None and second is not None else "num_experts"
        return MoE.Config(
            num_experts=read_field(hf, field, int),
            num_experts_per_token=read_field(hf, "num_experts_per_tok", int),
            hidden_dim=read_field(hf, "moe_intermediate_size", int),
            normalize_weights=read_field(hf, "norm_topk_prob", bool, False),
        )

    def hf_names(self, name: str) -> list[str]:
        layer, module, leaf = split_name(name)
        if module == _ROUTER and leaf in _ROUTER_NAMES:
            return [f"model.layers.{layer}.{_ROUTER_NAMES[leaf]}"]
        if module != _EXPERTS or leaf not in _EXPERT_PARTS:
            return super().hf_names(name)
        names: list[str] = []
        for number in range(self.num_experts):
            expert = f"model.layers.{layer}.mlp.experts.{number}"
            names += [f"{expert}.{part}.weight" for part in _EXPERT_PARTS[leaf]]
        return names

    def from_hf(self, name: str, tensors: list[Tensor]) -> Tensor:
        _, module, leaf = split_name(name)
        if module != _EXPERTS:
            return super().from_hf(name, tensors)
        if leaf == "down_proj":
            return torch.stack(tensors)
        width, dim = tensors[0].shape
        # Filled in place: a layer's experts are the largest of all parameters.
        stack_NFE = tensors[0].new_empty(self.num_experts, 2 * width, dim)
        for n in range(self.num_experts):
            stack_NFE[n] = self.join_groups(tensors[2 * n : 2 * n + 2], num_groups=self.num_groups)
        return stack_NFE

    def to_hf(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        _, module, leaf = split_name(name)
        if module != _EXPERTS:
            return super().to_hf(name, tensor)
        parts: list[Tensor] = []
        for expert in tensor:
            # The gate's rows and the up projection's are separate matrices in the files.
            if leaf == "gate_up_proj":
                parts += self.split_groups(expert, (1, 1), num_groups=self.num_groups)
            else:
                parts.append(expert)
        return dict(zip(self.hf_names(name), parts, strict=True))

    def hf_config(self) -> dict[str, Any]:
        mixture = self.mixture
        return {
            # transformers 5 writes the second name; published folders and vLLM have the first.
            "num_experts": mixture.num_experts,
            "num_local_experts": mixture.num_experts,
            "num_experts_per_tok": mixture.num_experts_per_token,
            "moe_intermediate_size": mixture.hidden_dim,
            "norm_topk_prob": mixture.normalize_weights,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "output_router_logits": False,
            **super().hf_config(),
        }


def model_registry(flavor: str) -> ModelSpec:
    """Return a fresh spec of one size, free to edit; raise ValueError for an unknown flavor."""
    flavors = {
        # The dense tiny model with as many feed-forward weights at work for each token.
        "tiny": Qwen3MoeAdapter.sized(
            vocab_size=320,
            dim=128,
            num_layers=3,
            num_heads=8,
            num_kv_heads=4,
            head_dim=32,
            feed_forward=MoE.Config(num_experts=8, num_experts_per_token=2, hidden_dim=192),
            max_positions=1024,
            theta=10_000.0,
            tie_embeddings=True,
            init_std=0.06,
        ),
        "30B-A3B": Qwen3MoeAdapter.sized(
            vocab_size=151_936,
            dim=2048,
            num_layers=48,
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            feed_forward=MoE.Config(num_experts=128, num_experts_per_token=8, hidden_dim=768),
            max_positions=40_960,
            theta=1_000_000.0,
            tie_embeddings=False,
        ),
    }
    return spec_of_flavor(flavor, flavors, adapter=Qwen3MoeAdapter)
