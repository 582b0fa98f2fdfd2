"""Our model inside vLLM: the trainer's definition around vLLM's paged attention.

Shape legend: T tokens of all running requests, E model width, V vocabulary, H and K query and
key-value heads of this rank, D head size, P head size of the attention kernel.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from vllm import ModelRegistry
from vllm.config import CacheConfig, ModelConfig, VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size, get_tp_group
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.v1.attention.selector import get_attn_backend

from actors.vllm.invariant import InvariantPagedAttention
from rl.distributed.shards import local_shard_of, local_tensor
from rl.models.attention import SequenceLayout
from rl.models.batch_invariant.model import make_batch_invariant
from rl.models.batch_invariant.rows import pad_rows
from rl.models.buffers import persistent_buffers, reset_buffers
from rl.models.hf import hf_buffers
from rl.models.qwen3.parallelize_generator import generator_head
from rl.models.spec import ModelSpec

FROM_STORE = "relay_store"
"""Load format: weights are zero until the first pull."""


def register_policy(spec: ModelSpec) -> str:
    """Make vLLM know the model of `spec`; returns the architecture to ask it for."""
    architecture = f"Relay{spec.name.title().replace('_', '')}ForCausalLM"
    ModelRegistry.register_model(architecture, type(architecture, (Policy,), {"spec": spec}))
    return architecture


class Policy(nn.Module):
    """What vLLM asks of a model, over `self.model`, whose parameter names are the trainer's."""

    spec: ClassVar[ModelSpec]

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        folder = Path(vllm_config.model_config.model)
        config: Any = self.spec.from_hf_config(json.loads((folder / "config.json").read_text("utf-8")))
        self.adapter = self.spec.adapter(config)
        tp_size = get_tensor_model_parallel_world_size()
        heads = _HeadCounts(
            num_heads=config.block.attention.num_heads // tp_size,
            num_kv_heads=config.block.attention.num_kv_heads // tp_size,
            head_dim=config.block.attention.head_dim,
        )
        device = torch.get_default_device()
        self.pads_rows = self.spec.batch_invariant and device.type == "cpu"

        def core_attention(layer: int) -> nn.Module:
            with device:
                paged = PagedAttention(
                    heads,
                    cache_config=vllm_config.cache_config,
                    prefix=f"{prefix}layers.{layer}.attention.core",
                )
            return InvariantPagedAttention(paged) if self.pads_rows else paged

        # A rank never holds more than its share: sharded before there is memory behind it.
        with torch.device("meta"):
            self.model = config.build(core_attention=core_attention)
            # Those of the trainer's model: vLLM's attention brings buffers of its own.
            self.buffer_names = tuple(persistent_buffers(config.build()))
        if tp_size > 1:
            mesh = DeviceMesh.from_group(get_tp_group().device_group, device.type, mesh_dim_names=("tp",))
            self.spec.parallelize_generator(self.model, mesh)
        make_batch_invariant(self.model, spec=self.spec, device=device)
        self.model.to_empty(device=device)
        reset_buffers(self.model)
        self.model.requires_grad_(False)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: None = None,
    ) -> Tensor:
        """Final hidden states [T, E]."""
        if self.pads_rows:
            num_tokens = input_ids.size(0)
            return self.model(pad_rows(input_ids), positions=pad_rows(positions))[:num_tokens]
        return self.model(input_ids, positions=positions)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[T, V] on every rank."""
        if self.pads_rows:
            num_rows = hidden_states.size(0)
            return generator_head(pad_rows(hidden_states), self.model.head_weight)[:num_rows]
        return generator_head(hidden_states, self.model.head_weight)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take Hugging Face tensors in any order; returns the names that are now loaded.

        Raises:
            ValueError: naming parameters for which tensors are missing.
        """
        parameters = dict(self.model.named_parameters())
        tensors = parameters | hf_buffers(self.model, self.adapter)
        owner = {hf_name: name for name in tensors for hf_name in self.adapter.hf_names(name)}
        waiting: dict[str, dict[str, Tensor]] = {name: {} for name in tensors}
        for hf_name, tensor in weights:
            # A tied model's folder may hold the output head once more.
            if (name := owner.get(hf_name)) is None:
                continue
            parts = waiting[name]
            parts[hf_name] = tensor
            needed = self.adapter.hf_names(name)
            if len(parts) == len(needed):
                whole = self.adapter.from_hf(name, [parts[n] for n in needed])
                local_tensor(tensors[name]).copy_(local_shard_of(whole, tensors[name]))
                del waiting[name]
        # A buffer that the folder does not have stays at zero.
        if missing := sorted(waiting.keys() & parameters.keys()):
            raise ValueError(f"tensors are missing for {', '.join(missing)}")
        return {f"model.{name}" for name in parameters}


@dataclass(frozen=True, kw_only=True, slots=True)
class _HeadCounts:
    """Of one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class PagedAttention(nn.Module):
    """vLLM's attention over its paged cache as our core attention.

    Kernels exist for some head sizes only. Smaller heads are filled up with zeros, which
    change no product; the scale stays that of the real size.
    """

    def __init__(self, heads: _HeadCounts, *, cache_config: CacheConfig, prefix: str) -> None:
        super().__init__()
        self.num_heads = heads.num_heads
        self.head_dim = heads.head_dim
        kernel_dim = _kernel_head_dim(heads.head_dim)
        self.padding = kernel_dim - heads.head_dim
        self.attention = Attention(
            heads.num_heads,
            kernel_dim,
            heads.head_dim**-0.5,
            num_kv_heads=heads.num_kv_heads,
            cache_config=cache_config,
            prefix=prefix,
        )

    def forward(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, sequences: SequenceLayout | None = None
    ) -> Tensor:
        """Returns [T, H, D]. Where sequences lie is in vLLM's forward context."""
        if not self.padding:
            # The kernels take rows at any stride, but heads of a row one after another.
            return self.attention(q_THD, k_TKD, v_TKD.contiguous()).unflatten(-1, (-1, self.head_dim))
        q_THP, k_TKP, v_TKP = (F.pad(x, (0, self.padding)) for x in (q_THD, k_TKD, v_TKD))
        out_THP = self.attention(q_THP, k_TKP, v_TKP).unflatten(-1, (self.num_heads, -1))
        return out_THP[..., : self.head_dim]


def _kernel_head_dim(head_dim: int) -> int:
    backend = get_attn_backend(head_dim, torch.get_default_dtype(), None)
    if backend.supports_head_size(head_dim):
        return head_dim
    larger = [size for size in backend.get_supported_head_sizes() if size > head_dim]
    if not larger:
        raise ValueError(
            f"head_dim={head_dim} is larger than {backend.get_name()} attention supports: "
            f"at most {max(backend.get_supported_head_sizes())}"
        )
    return min(larger)


@register_model_loader(FROM_STORE)
class StoreLoader(BaseModelLoader):
    """Leaves the weights to the first pull; until then they are zero, not what the memory held."""

    def download_model(self, model_config: ModelConfig) -> None:
        pass

    @torch.no_grad()
    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        assert isinstance(model, Policy)
        for tensor in (*model.parameters(), *map(model.model.get_buffer, model.buffer_names)):
            tensor.zero_()
