"""The generator's parallel plan for decoders: tensor parallelism alone, for any number of tokens.

Every rank sees all tokens. The fused projections, the embedding and the output head hold this rank's rows; the
output projections hold its columns and sum their results over the ranks. A mixture's router is whole on every
rank and chooses the same experts there; each rank computes its part of each expert, and one sum per layer
combines the parts.

Parameters are DTensors, so weights move between this layout and any other by name. The forward works on their
local shards with explicit collectives, because DTensor's dispatch costs a small layer several times its
arithmetic. There is no backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from rl.distributed.sharding import distributed, local_tensor
from rl.models.decoder import Decoder, linear_head

ROWS = 0
COLUMNS = 1
_DIMS = {
    "embed_tokens": ROWS, "lm_head": ROWS, "qkv_proj": ROWS, "gate_up_proj": ROWS,
    "o_proj": COLUMNS, "down_proj": COLUMNS,
}  # fmt: skip
"""Dimension over which the plan splits each layer's weight."""


def parallelize_decoder_generator(model: Decoder, mesh: DeviceMesh) -> Decoder:
    """Shard the model in place over a mesh of one axis, preferably on the meta device.

    Nothing is sent: every rank holds the same weights, or none yet. On a mesh of size 1 the model keeps its
    plain tensors. Norms are whole, plain tensors on every rank. `check_tensor_parallel` allows the size of the
    mesh.
    """
    if mesh.size() == 1:
        return model
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if name in _DIMS and isinstance(layer, nn.Linear):
                setattr(parent, name, ShardedLinear(layer, mesh, dim=_DIMS[name]))
            elif name in _DIMS and isinstance(layer, nn.Embedding):
                setattr(parent, name, VocabShardedEmbedding(layer, mesh))
    if model.config.has_experts:
        mixtures: list[Any] = [block.feed_forward for block in model.layers]
        for mixture in mixtures:
            mixture.shard_for_generation(mesh)
    return model


def generator_head(hidden_TE: Tensor, weight_VE: Tensor) -> Tensor:
    """Return the logits [T, V] on every rank, from a plain or a vocabulary-sharded head weight."""
    if not isinstance(weight_VE, DTensor):
        return linear_head(hidden_TE, weight_VE)
    mesh = weight_VE.device_mesh
    part = F.linear(hidden_TE, local_tensor(weight_VE))
    parts = [torch.empty_like(part) for _ in range(mesh.size())]
    dist.all_gather(parts, part, group=mesh.get_group())
    return torch.cat(parts, dim=1)


class ShardedLinear(nn.Module):
    """Linear layer with this rank's rows, which returns its part of the output, or columns, which returns the sum
    over all ranks."""

    def __init__(self, layer: nn.Linear, mesh: DeviceMesh, *, dim: int) -> None:
        super().__init__()
        self.weight = distributed(layer.weight, mesh, [Shard(dim)])
        self.bias = layer.bias
        if layer.bias is not None and dim == ROWS:
            self.bias = distributed(layer.bias, mesh, [Shard(ROWS)])
        self.group = mesh.get_group() if dim == COLUMNS else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else local_tensor(self.bias)
        if self.group is None:
            return F.linear(x, local_tensor(self.weight), bias)
        out = F.linear(x, local_tensor(self.weight))
        dist.all_reduce(out, group=self.group)
        return out if bias is None else out + bias


class VocabShardedEmbedding(nn.Module):
    """Embedding of which each rank looks up its part of the vocabulary; the sum over ranks is complete."""

    def __init__(self, layer: nn.Embedding, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = distributed(layer.weight, mesh, [Shard(ROWS)])
        self.group = mesh.get_group()
        self.num_rows = layer.num_embeddings // mesh.size()
        self.first_row = mesh.get_local_rank() * self.num_rows

    def forward(self, token_ids_T: Tensor) -> Tensor:
        rows_T = token_ids_T - self.first_row
        elsewhere_T = (rows_T < 0) | (rows_T >= self.num_rows)
        out_TE = F.embedding(rows_T.masked_fill(elsewhere_T, 0), local_tensor(self.weight))
        out_TE.masked_fill_(elsewhere_T.unsqueeze(-1), 0)
        dist.all_reduce(out_TE, group=self.group)
        return out_TE
