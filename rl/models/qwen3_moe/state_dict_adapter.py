"""Qwen3 MoE's parameters and configuration, ours and Hugging Face's.

Their files hold three matrices an expert; ours, two stacks of all experts (see model.py). The
load-balance bias has no place in their model; where there is one, it is written beside the
router's weight, and others ignore it.

Shape legend: E model width, N experts, F width of one expert, K key-value heads, W = F / K.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl.models.qwen3.model import Qwen3
from rl.models.qwen3.state_dict_adapter import (
    Qwen3StateDictAdapter,
    boolean,
    check_architecture,
    positive_int,
    refuse_other_values,
    trunk_from_hf,
    trunk_to_hf,
)
from rl.models.qwen3_moe.model import MoE

ARCHITECTURE = "Qwen3MoeForCausalLM"
MODEL_TYPE = "qwen3_moe"

_GATE_UP = "feed_forward.experts.gate_up_proj"
_DOWN = "feed_forward.experts.down_proj"
_ROUTER = {
    "feed_forward.router.weight": "mlp.gate.weight",
    "feed_forward.router.load_balance_bias": "mlp.gate.e_score_correction_bias",
}


class Qwen3MoeStateDictAdapter:
    """Implements `rl.models.spec.StateDictAdapter`; works on meta tensors too, for shapes alone."""

    def __init__(self, config: Qwen3.Config) -> None:
        self.config = config
        self.trunk = Qwen3StateDictAdapter(config)
        self.num_groups = config.block.attention.num_kv_heads
        self.num_experts = moe_config(config).num_experts

    def hf_names(self, name: str) -> list[str]:
        """Raises KeyError for a name that is no parameter of Qwen3 MoE."""
        _, layer, kind = name.split(".", 2) if name.startswith("layers.") else ("", "", name)
        if kind in _ROUTER:
            return [f"model.layers.{layer}.{_ROUTER[kind]}"]
        if kind not in (_GATE_UP, _DOWN):
            return self.trunk.hf_names(name)
        parts = ("gate_proj", "up_proj") if kind == _GATE_UP else ("down_proj",)
        expert = f"model.layers.{layer}.mlp.experts"
        return [f"{expert}.{n}.{part}.weight" for n in range(self.num_experts) for part in parts]

    def from_hf(self, name: str, tensors: list[Tensor]) -> Tensor:
        if name.endswith(_DOWN):
            return torch.stack(tensors)
        if name.endswith(_GATE_UP):
            grouped_KWE = [x.unflatten(0, (self.num_groups, -1)) for x in tensors]
            num_groups, width, dim = grouped_KWE[0].shape
            # Filled in place: a layer's experts are the largest of all parameters.
            stack_NK2WE = tensors[0].new_empty(self.num_experts, num_groups, 2, width, dim)
            for i, x_KWE in enumerate(grouped_KWE):
                stack_NK2WE[i // 2, :, i % 2] = x_KWE
            return stack_NK2WE.flatten(1, 3)
        if ".feed_forward." in name:
            (tensor,) = tensors
            return tensor
        return self.trunk.from_hf(name, tensors)

    def to_hf(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        if name.endswith(_GATE_UP):
            x_N2KWE = tensor.unflatten(1, (self.num_groups, 2, -1)).transpose(1, 2)
            parts = [x.flatten(0, 1) for pair in x_N2KWE for x in pair]
        elif name.endswith(_DOWN):
            parts = list(tensor)
        elif ".feed_forward." in name:
            parts = [tensor]
        else:
            return self.trunk.to_hf(name, tensor)
        return dict(zip(self.hf_names(name), parts, strict=True))

    def hf_config(self) -> dict[str, Any]:
        """Token ids and dtype are not the model's and are added by whoever writes the folder."""
        moe = moe_config(self.config)
        return {
            "architectures": [ARCHITECTURE],
            "model_type": MODEL_TYPE,
            # transformers 5 writes the second; the published folders, and vLLM, have the first.
            "num_experts": moe.num_experts,
            "num_local_experts": moe.num_experts,
            "num_experts_per_tok": moe.num_experts_per_token,
            "moe_intermediate_size": moe.hidden_dim,
            "norm_topk_prob": moe.normalize_weights,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "output_router_logits": False,
            **trunk_to_hf(self.config),
        }


def moe_config(config: Qwen3.Config) -> MoE.Config:
    """Of the feed-forward layers."""
    assert isinstance(config.block.feed_forward, MoE.Config)
    return config.block.feed_forward


def config_from_hf(hf: dict[str, Any]) -> Qwen3.Config:
    """Our config of a Hugging Face `config.json`.

    Raises:
        ValueError: for another architecture, a missing field, or what this model does not do
            (layers without experts, the router's auxiliary loss, and what the dense one does not).
    """
    check_architecture(hf, model_type=MODEL_TYPE, architecture=ARCHITECTURE)
    refuse_other_values(
        hf,
        {
            "decoder_sparse_step": (None, 1),
            "mlp_only_layers": (None, []),
            "output_router_logits": (None, False),
        },
    )
    named = {f: hf[f] for f in ("num_experts", "num_local_experts") if hf.get(f) is not None}
    if len(set(named.values())) > 1:
        raise ValueError(f"config.json: {named} are not equal: both are the number of experts")
    config = MoE.Config(
        num_experts=positive_int(named, next(iter(named), "num_experts")),
        num_experts_per_token=positive_int(hf, "num_experts_per_tok"),
        hidden_dim=positive_int(hf, "moe_intermediate_size"),
        normalize_weights=boolean({"norm_topk_prob": False} | hf, "norm_topk_prob"),
    )
    return trunk_from_hf(hf, feed_forward=config)
