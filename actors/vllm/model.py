"""relay's model inside vLLM: the trainer's definition around vLLM's paged attention.

Shape legend: T tokens of all running requests, U of them that are computed (shared_rows.py), E
model width, V vocabulary, H and K query and key-value heads of this rank, D head size, P head size
of the attention kernel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from vllm import ModelRegistry
from vllm.config import CacheConfig, ModelConfig, VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    get_tp_group,
    tensor_model_parallel_all_gather,
)
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata
from vllm.v1.attention.selector import get_attn_backend

from actors.vllm.kernels import PackedLinear, use_kernels
from actors.vllm.shared_rows import SharedRows
from rl.distributed.sharding import local_tensor
from rl.models.batch_invariant.functions import attend_to_cache, store_in_cache
from rl.models.batch_invariant.model import make_batch_invariant, pad_rows
from rl.models.decoder import Attention as DecoderAttention
from rl.models.decoder import find_persistent_buffers, reset_buffers
from rl.models.files.hf import read_hf_config
from rl.models.layers.attention import SequenceLayout
from rl.models.layers.moe import GroupedExperts
from rl.models.low_rank.choice import make_bank
from rl.models.low_rank.types import HEAD, NONE, Bank
from rl.models.parallelize import (
    ShardedLinear,
    gather_parts,
    parallelize_decoder_generator,
)
from rl.models.spec import ModelSpec

ADAPTED_LAYERS = (nn.Linear, PackedLinear, ShardedLinear, GroupedExperts)
"""Layers that adapters can stand beside; an output head is treated apart."""


def register_policy(spec: ModelSpec) -> str:
    """Register the model of `spec` with vLLM; return the name of the architecture."""
    architecture = f"Relay{spec.name.title().replace('_', '')}ForCausalLM"
    ModelRegistry.register_model(architecture, type(architecture, (VLLMPolicy,), {"spec": spec}))
    return architecture


class VLLMPolicy(nn.Module):
    """vLLM's model interface around `self.model`, whose parameter names are the trainer's."""

    spec: ClassVar[ModelSpec]

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        folder = Path(vllm_config.model_config.model)
        config: Any = self.spec.adapter.config_from_hf(read_hf_config(folder))
        tp_size = get_tensor_model_parallel_world_size()
        device = torch.get_default_device()
        # Each layer names its window; without one it must not take one that config.json has and the
        # family ignores.
        vllm_config.cache_config.sliding_window = None
        # On a CPU, products of a few rows sum in another order than products of whole tiles.
        self.pads_rows = self.spec.batch_invariant and device.type == "cpu"
        self.rows = SharedRows(block_size=vllm_config.cache_config.block_size)

        def core_attention(layer: int, window: int | None) -> nn.Module:
            kind = InvariantPagedAttention if self.pads_rows else PagedAttention
            with device:
                return kind(
                    config.block.attention,
                    tp_size=tp_size,
                    window=window,
                    rows=self.rows,
                    cache_config=vllm_config.cache_config,
                    prefix=f"{prefix}layers.{layer}.attention.core",
                )

        # Sharded before memory is allocated, so that a rank never holds more than its share.
        with torch.device("meta"):
            self.model = config.build(core_attention=core_attention)
            # The trainer's buffers only: vLLM's attention adds its own.
            self.buffer_names = tuple(find_persistent_buffers(config.build()))

        self.tp_mesh: DeviceMesh | None = None
        if tp_size > 1:
            self.tp_mesh = DeviceMesh.from_group(
                get_tp_group().device_group, device.type, mesh_dim_names=("tp",)
            )
            parallelize_decoder_generator(self.model, self.tp_mesh)

        make_batch_invariant(self.model, spec=self.spec, device=device)
        self.model.float32_head = self.spec.float32_head
        self.model.to_empty(device=device)
        reset_buffers(self.model)
        self.model.requires_grad_(False)

        self.bank: Bank | None = None
        """Adapters beside the weights; None until the first one comes."""
        self._versions_T: np.ndarray | None = None
        """Versions of the next step's rows."""
        self.head: nn.Module | None = None
        self.shares_logits = False
        """True if ranks exchange their parts of the logits with vLLM's collective."""
        if not self.spec.batch_invariant:
            on_gpu = device.type != "cpu"
            use_kernels(self.model, on_gpu=on_gpu)
            self.shares_logits = on_gpu and tp_size > 1
            if not on_gpu and tp_size == 1:
                self.head = PackedLinear(self.model.head_weight, in_float32=self.spec.float32_head)

    def pack_weights(self) -> None:
        """Copy the weights of linear layers in the order of a CPU's kernel; on a GPU do nothing."""
        for layer in self._list_packed_layers():
            layer.pack()

    def unpack_weights(self) -> None:
        """Give back the memory of the copies."""
        for layer in self._list_packed_layers():
            layer.unpack()

    def _list_packed_layers(self) -> list[PackedLinear]:
        return [layer for layer in self.modules() if isinstance(layer, PackedLinear)]

    def use_adapters(self) -> Bank:
        """Return the adapters beside the weights; the first call attaches them to the layers."""
        if self.bank is None:
            layers: dict[str, nn.Module] = {}
            for name, layer in self.model.named_modules():
                if isinstance(layer, ADAPTED_LAYERS) and name != HEAD:
                    layers[name] = layer
            weight = self.model.embed_tokens.weight
            head_dtype: torch.dtype | None = None  # A tied head has no adapter of its own.
            if self.model.lm_head is not None:
                head_dtype = torch.float32 if self.spec.float32_head else weight.dtype
            self.bank = make_bank(
                layers, dtype=weight.dtype, head_dtype=head_dtype, device=weight.device
            )
        return self.bank

    def assign_adapters(self, versions_T: np.ndarray) -> None:
        """Give each row of the next step the adapter of this version, or NONE."""
        self._versions_T = versions_T

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: None = None,
    ) -> Tensor:
        """Return the final hidden states [T, E], with adapters [T, E + columns of the version]."""
        # Taken, so that a forward that measures memory has none.
        versions_T, self._versions_T = self._versions_T, None
        if versions_T is not None:
            padding = len(input_ids) - len(versions_T)
            versions_T = np.pad(versions_T, (0, padding), constant_values=NONE)
        input_ids, positions = self.rows.begin_step(input_ids, positions, versions_T)
        if self.bank is not None:
            none_T = np.full(len(input_ids), NONE)
            self.bank.begin(none_T if versions_T is None else self.rows.keep_array(versions_T))
        if self.pads_rows:
            num_rows = input_ids.size(0)
            hidden = self.model(pad_rows(input_ids), positions=pad_rows(positions))[:num_rows]
        else:
            hidden = self.model(input_ids, positions=positions)
        hidden = self.rows.spread(hidden)
        if self.bank is None or versions_T is None or not self.bank.has(HEAD):
            return hidden
        # vLLM selects rows before the head, whose adapter goes with them, as bits of two columns.
        versions_T1 = torch.from_numpy(versions_T.astype(np.int32)).unsqueeze(1)
        return torch.cat((hidden, versions_T1.view(hidden.dtype).to(hidden.device)), dim=1)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Return logits [T, V] on every rank."""
        width, num_rows = self.model.config.dim, hidden_states.size(0)
        versions = hidden_states[:, width:]
        hidden_TE = hidden_states[:, :width]
        if self.pads_rows:
            hidden_TE = pad_rows(hidden_TE)
        hidden_TE, weight_VE = self.model.prepare_head_inputs(hidden_TE)
        assert isinstance(weight_VE, Tensor)
        if self.head is not None:
            part_TV = self.head(hidden_TE)
        else:
            part_TV = F.linear(hidden_TE, local_tensor(weight_VE))
        if versions.size(1):
            assert self.bank is not None, "only its versions are in the columns"
            versions_T = versions.contiguous().view(torch.int32).squeeze(1).cpu().numpy()
            # Rows that fill a tile have none.
            padding = len(hidden_TE) - num_rows
            versions_T = np.pad(versions_T, (0, padding), constant_values=NONE)
            self.bank.add_to_rows(HEAD, hidden_TE, part_TV, versions_T)
        if self.shares_logits:
            return tensor_model_parallel_all_gather(part_TV)
        return gather_parts(part_TV, weight_VE)[:num_rows]


class PagedAttention(nn.Module):
    """vLLM's attention over its paged cache, as the model's core attention.

    Kernels exist for some head sizes only. Smaller heads are padded with zeros, which change no
    product; the scale stays that of the real size.
    """

    def __init__(
        self,
        config: DecoderAttention.Config,
        *,
        tp_size: int,
        window: int | None,
        rows: SharedRows,
        cache_config: CacheConfig,
        prefix: str,
    ) -> None:
        super().__init__()
        self.window, self.rows = window, rows
        self.num_heads, self.head_dim = config.num_heads // tp_size, config.head_dim
        kernel_dim = _choose_kernel_head_dim(config.head_dim)
        self.padding = kernel_dim - config.head_dim
        self.attention = Attention(
            self.num_heads,
            kernel_dim,
            config.head_dim**-0.5,
            num_kv_heads=config.num_kv_heads // tp_size,
            cache_config=cache_config,
            per_layer_sliding_window=window,
            prefix=prefix,
        )

    def forward(
        self, q_UHD: Tensor, k_UKD: Tensor, v_UKD: Tensor, sequences: SequenceLayout | None = None
    ) -> Tensor:
        """Return [U, H, D]; vLLM's forward context knows where the sequences lie."""
        q_THD, k_TKD, v_TKD = map(self.rows.spread, (q_UHD, k_UKD, v_UKD))
        return self.rows.keep(self._attend(q_THD, k_TKD, v_TKD))

    def _attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Return [T, H, D], of every request's rows."""
        if not self.padding:
            # The kernels take rows at any stride, but the heads of a row must be contiguous.
            if not v_TKD.is_cuda or v_TKD.stride(1) != self.head_dim:
                v_TKD = v_TKD.contiguous()
            return self.attention(q_THD, k_TKD, v_TKD).unflatten(-1, (-1, self.head_dim))

        widths = (0, self.padding)
        q_THP, k_TKP, v_TKP = F.pad(q_THD, widths), F.pad(k_TKD, widths), F.pad(v_TKD, widths)
        out_THP = self.attention(q_THP, k_TKP, v_TKP).unflatten(-1, (self.num_heads, -1))
        return out_THP[..., : self.head_dim]


class InvariantPagedAttention(PagedAttention):
    """Paged attention with the trainer's kernel over vLLM's cache.

    The batch-invariant mode on a CPU uses it.
    """

    def forward(
        self, q_UHD: Tensor, k_UKD: Tensor, v_UKD: Tensor, sequences: SequenceLayout | None = None
    ) -> Tensor:
        """Return [U, H, D]."""
        by_layer = get_forward_context().attn_metadata
        # Zeros, for the rows at the end that `pad_rows` added and that belong to no sequence.
        out_UHD = torch.zeros(q_UHD.shape, dtype=q_UHD.dtype)
        if by_layer is None:  # vLLM measures the memory of a forward.
            return out_UHD

        assert isinstance(by_layer, dict)
        metadata = by_layer[self.attention.layer_name]
        assert isinstance(metadata, CPUAttentionMetadata)
        num_tokens = metadata.num_actual_tokens
        q_THD, k_TKD, v_TKD = map(self.rows.spread, (q_UHD, k_UKD, v_UKD))
        cache = self.attention.kv_cache
        block_size = cache.size(2)

        # First, because the new tokens attend to each other through the cache too.
        store_in_cache(
            k_TKD[:num_tokens],
            v_TKD[:num_tokens],
            cache,
            slots_T=metadata.slot_mapping[:num_tokens],
            block_size=block_size,
        )
        attended_THD = attend_to_cache(
            q_THD[:num_tokens],
            cache,
            queries_S=metadata.query_start_loc,
            lengths_S=metadata.seq_lens,
            tables=metadata.block_table,
            block_size=block_size,
            window=self.window,
        )
        kept_UHD = self.rows.keep(attended_THD)
        out_UHD[: len(kept_UHD)] = kept_UHD
        return out_UHD


def _choose_kernel_head_dim(head_dim: int) -> int:
    """Return the smallest head size of the attention kernel that holds `head_dim` numbers."""
    backend = get_attn_backend(head_dim, torch.get_default_dtype(), None)
    if backend.supports_head_size(head_dim):
        return head_dim
    sizes = backend.get_supported_head_sizes()
    if head_dim > max(sizes):
        raise ValueError(
            f"head_dim={head_dim}: must be at most {max(sizes)}, the largest that "
            f"{backend.get_name()} supports"
        )
    return min(size for size in sizes if size > head_dim)


@register_model_loader("relay_store")
class StoreLoader(BaseModelLoader):
    """Model loader that leaves the weights to the first pull; until then they are zero."""

    def download_model(self, model_config: ModelConfig) -> None:
        pass

    @torch.no_grad()
    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        assert isinstance(model, VLLMPolicy)
        for parameter in model.model.parameters():
            parameter.zero_()
        for name in model.buffer_names:
            model.model.get_buffer(name).zero_()
