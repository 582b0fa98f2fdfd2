"""Log-probabilities of given tokens, as the `head` of `Qwen3.forward`.

    head = functools.partial(token_logprobs, targets_T=targets, temperatures_T=temperatures)
    logprobs_T, entropy_T = model(tokens, positions=positions, sequences=layout, head=head)

Shape legend: T packed tokens, C tokens of one chunk, E model width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils.checkpoint import checkpoint


def token_logprobs(
    hidden_TE: Tensor,
    weight_VE: Tensor,
    *,
    targets_T: Tensor,
    temperatures_T: Tensor,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Logprob of each target under `softmax(hidden @ weight.T / temperature)`, and the entropy of that.

    Logits are computed in the inputs' dtype, as the generator does, everything after in float32.
    Under tensor parallelism hidden is a DTensor, replicated or sharded by token, and the weight
    is sharded by vocabulary; every rank gathers the logits and returns the same plain tensors.

    Args:
        targets_T: int64.
        temperatures_T: float32, above 0.
        chunk_tokens: with it, logits of at most that many tokens exist at once, in the forward
            and, by computing them again, in the backward.

    Returns:
        [T] float32 nats with gradient, and [T] float32 nats without.
    """
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}: must be at least 1, or None for no chunks")
    hidden_TE, weight, gather = _local_inputs(hidden_TE, weight_VE)
    num_tokens = targets_T.numel()
    if chunk_tokens is None or num_tokens <= chunk_tokens:
        return _chunk_logprobs(hidden_TE, weight, targets_T, temperatures_T, gather)
    chunks = zip(*(x.split(chunk_tokens) for x in (hidden_TE, targets_T, temperatures_T)), strict=True)
    parts = [
        checkpoint(
            _chunk_logprobs, hidden, weight, targets, temperatures, gather,
            use_reentrant=False, preserve_rng_state=False,
        )
        for hidden, targets, temperatures in chunks
    ]  # fmt: skip
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


_Gather = tuple[DeviceMesh, tuple[Placement, ...], int]
"""Mesh, placements of the logits and vocabulary size: what turns local logits into whole ones."""


def _local_inputs(hidden_TE: Tensor, weight_VE: Tensor) -> tuple[Tensor, Tensor, _Gather | None]:
    """All tokens and this rank's vocabulary rows, as plain tensors."""
    if not isinstance(weight_VE, DTensor):
        if isinstance(hidden_TE, DTensor):
            hidden_TE = hidden_TE.full_tensor()
        return hidden_TE, weight_VE, None
    mesh = weight_VE.device_mesh
    for placement in weight_VE.placements:
        if not placement.is_replicate() and not placement.is_shard(0):
            raise ValueError(f"head weight is placed as {placement}: must be Shard(0) or Replicate()")
    if not isinstance(hidden_TE, DTensor):
        hidden_TE = DTensor.from_local(hidden_TE, mesh, [Replicate()] * mesh.ndim, run_check=False)
    # Each rank's gradient of the hidden states comes from its own vocabulary rows alone.
    grad_placements = [Partial() if p.is_shard(0) else Replicate() for p in weight_VE.placements]
    hidden_TE = hidden_TE.redistribute(mesh, [Replicate()] * mesh.ndim)
    logit_placements = tuple(Shard(1) if p.is_shard(0) else Replicate() for p in weight_VE.placements)
    gather = (mesh, logit_placements, weight_VE.size(0))
    return hidden_TE.to_local(grad_placements=grad_placements), weight_VE.to_local(), gather


def _chunk_logprobs(
    hidden_CE: Tensor, weight: Tensor, targets_C: Tensor, temperatures_C: Tensor, gather: _Gather | None
) -> tuple[Tensor, Tensor]:
    logits_CV = F.linear(hidden_CE, weight)
    if gather is not None:
        logits_CV = _gather_vocabulary(logits_CV, gather)
    logprobs_CV = torch.log_softmax(logits_CV.float() / temperatures_C.unsqueeze(1), dim=-1)
    # Not a view, as gather and squeeze would be: FSDP2 warns of views that leave the model.
    logprobs_C = -F.nll_loss(logprobs_CV, targets_C, reduction="none")
    with torch.no_grad():
        entropy_C = -(logprobs_CV.exp() * logprobs_CV).sum(-1)
    return logprobs_C, entropy_C


def _gather_vocabulary(logits: Tensor, gather: _Gather) -> Tensor:
    """[C, rows of this rank] -> [C, V], the same on every rank."""
    mesh, placements, vocab_size = gather
    shape = torch.Size((logits.size(0), vocab_size))
    sharded = DTensor.from_local(
        logits, mesh, placements, run_check=False, shape=shape, stride=(vocab_size, 1)
    )
    return sharded.full_tensor()
