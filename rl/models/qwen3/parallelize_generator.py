"""The generator's plan for Qwen3: tensor parallelism alone, for any number of tokens.

Every rank sees all tokens. The fused projections, the embedding and the output head hold this
rank's rows; the output projections hold its columns and add their results up over the ranks.

Parameters are DTensors, so weights move between this layout and any other by name. The forward
works on their local shards with explicit collectives: through DTensor's dispatch a small layer
costs several times its arithmetic. For inference only, there is no backward.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rl.distributed.shards import local_tensor
from rl.models.qwen3.model import FeedForward, Qwen3, TransformerBlock, linear_head
from rl.models.qwen3.parallelize import check_tensor_parallel

ROWS = 0
COLUMNS = 1
SPLIT = frozenset(("embed_tokens", "lm_head", "qkv_proj", "o_proj", "gate_up_proj", "down_proj"))
"""Layers whose weights are split over the ranks, those of experts too; all others are whole on each."""


def is_split(name: str) -> bool:
    """Whether a generator's rank holds a part of this parameter."""
    return not SPLIT.isdisjoint(name.split("."))


def parallelize_qwen3_generator(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard `model`, best on the meta device, in place over a mesh of one axis.

    Nothing is sent: every rank holds the same weights, or none yet. A mesh of size 1 leaves the
    model as it is, with plain tensors. Norms are whole on every rank, and plain tensors.

    Raises:
        ValueError: if the size of the mesh does not divide the key-value heads or the vocabulary.
    """
    assert isinstance(model, Qwen3)
    if mesh.size() > 1:
        shard_for_generation(model, mesh)
    return model


def shard_for_generation(model: Qwen3, mesh: DeviceMesh) -> None:
    """All but feed-forward layers of another kind, over a mesh of more than one rank."""
    check_tensor_parallel(model.config, mesh.size())
    _swap(model, "embed_tokens", VocabShardedEmbedding, mesh)
    if model.lm_head is not None:
        _swap(model, "lm_head", RowShardedLinear, mesh)
    for block in model.layers:
        assert isinstance(block, TransformerBlock)
        _swap(block.attention, "qkv_proj", RowShardedLinear, mesh)
        _swap(block.attention, "o_proj", ColumnShardedLinear, mesh)
        if isinstance(block.feed_forward, FeedForward):
            _swap(block.feed_forward, "gate_up_proj", RowShardedLinear, mesh)
            _swap(block.feed_forward, "down_proj", ColumnShardedLinear, mesh)


def generator_head(hidden_TE: Tensor, weight_VE: Tensor) -> Tensor:
    """Logits [T, V] on every rank, of a plain or a vocabulary-sharded head weight."""
    if not isinstance(weight_VE, DTensor):
        return linear_head(hidden_TE, weight_VE)
    mesh = weight_VE.device_mesh
    part = F.linear(hidden_TE, local_tensor(weight_VE))
    parts = [torch.empty_like(part) for _ in range(mesh.size())]
    dist.all_gather(parts, part, group=mesh.get_group())
    return torch.cat(parts, dim=1)


class RowShardedLinear(nn.Module):
    """Gives this rank's part of the output features."""

    def __init__(self, weight: Tensor, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = sharded(weight, mesh, dim=ROWS)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, local_tensor(self.weight))


class ColumnShardedLinear(nn.Module):
    """Takes this rank's part of the input features; gives the whole output on every rank."""

    def __init__(self, weight: Tensor, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = sharded(weight, mesh, dim=COLUMNS)
        self.group = mesh.get_group()

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, local_tensor(self.weight))
        dist.all_reduce(out, group=self.group)
        return out


class VocabShardedEmbedding(nn.Module):
    """Each rank looks up the tokens of its part of the vocabulary; the sum has them all."""

    def __init__(self, weight: Tensor, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = sharded(weight, mesh, dim=ROWS)
        self.group = mesh.get_group()
        self.num_rows = weight.size(0) // mesh.size()
        self.first_row = mesh.get_local_rank() * self.num_rows

    def forward(self, token_ids_T: Tensor) -> Tensor:
        rows_T = token_ids_T - self.first_row
        elsewhere_T = (rows_T < 0) | (rows_T >= self.num_rows)
        out_TE = F.embedding(rows_T.masked_fill(elsewhere_T, 0), local_tensor(self.weight))
        out_TE.masked_fill_(elsewhere_T.unsqueeze(-1), 0)
        dist.all_reduce(out_TE, group=self.group)
        return out_TE


def _swap(parent: nn.Module, name: str, kind: type[nn.Module], mesh: DeviceMesh) -> None:
    setattr(parent, name, kind(getattr(parent, name).weight, mesh))


def sharded(weight: Tensor, mesh: DeviceMesh, *, dim: int) -> nn.Parameter:
    """Split over the ranks of `mesh`, without a gradient."""
    shard = distribute_tensor(weight.detach(), mesh, [Shard(dim)], src_data_rank=None)
    return nn.Parameter(shard, requires_grad=False)
