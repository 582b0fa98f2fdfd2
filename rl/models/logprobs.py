"""Log-probabilities of given tokens, as the `head` of `Qwen3.forward`.

    head = functools.partial(token_logprobs, targets_T=targets, temperatures_T=temperatures)
    logprobs_T, entropy_T = model(tokens, positions=positions, sequences=layout, head=head)

Under tensor parallelism each rank holds the logits of its part of the vocabulary. Maximum,
sum of exponentials and the target's logit are reduced over the ranks, [C] numbers each; the
whole vocabulary is nowhere.

Shape legend: T packed tokens, C tokens of one chunk, K targets of each, E model width, V vocabulary, W
the part of the vocabulary that this rank holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from rl.distributed.collectives import all_reduce


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyShard:
    """Which rows of the head's weight this rank holds."""

    first_row: int
    group: str
    """Name of the process group whose ranks hold the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gather:
    """What turns a rank's logits into whole ones."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    """Of the logits."""
    vocab_size: int


Split = VocabularyShard | Gather | None
"""How logits are split over ranks, and what is to be done about it; None where they are whole."""

ChunkLogprobs = Callable[[Tensor, Tensor, Tensor, Tensor, Split, bool], tuple[Tensor, Tensor]]
"""`logprobs_of_chunk`, or a compiled form of it."""


def token_logprobs(
    hidden_TE: Tensor,
    weight_VE: Tensor,
    *,
    targets_T: Tensor,
    temperatures_T: Tensor,
    chunk_tokens: int | None = None,
    loss_parallel: bool = True,
    chunk_logprobs: ChunkLogprobs | None = None,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Logprob of each target under `softmax(hidden @ weight.T / temperature)`, and the entropy of that.

    Logits are computed in the inputs' dtype, as the generator does, everything after in float32.
    Under tensor parallelism hidden is a DTensor, replicated or sharded by token, and the weight
    is sharded by vocabulary; every rank returns the same plain tensors.

    Args:
        targets_T: int64; or [T, K], several of the same distribution.
        temperatures_T: float32, above 0.
        chunk_tokens: with it, logits of at most that many tokens exist at once, in the forward
            and, by computing them again, in the backward.
        loss_parallel: leave each rank its part of the vocabulary; False gathers the logits.
        chunk_logprobs: a compiled form of `logprobs_of_chunk`.
        entropy_gradient: let the entropy have a gradient; the backward may then take more memory.

    Returns:
        [T] float32 nats with gradient ([T, K] of K targets), and [T] float32 nats, with gradient if that is
        asked for.
    """
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}: must be at least 1, or None for no chunks")
    compute = chunk_logprobs or logprobs_of_chunk
    hidden_TE, weight, split = _local_inputs(hidden_TE, weight_VE, loss_parallel=loss_parallel)
    num_tokens = targets_T.size(0)
    if chunk_tokens is None or num_tokens <= chunk_tokens:
        return compute(hidden_TE, weight, targets_T, temperatures_T, split, entropy_gradient)
    chunks = zip(*(x.split(chunk_tokens) for x in (hidden_TE, targets_T, temperatures_T)), strict=True)
    parts = [
        checkpoint(
            compute, hidden, weight, targets, temperatures, split, entropy_gradient,
            use_reentrant=False, preserve_rng_state=False,
        )
        for hidden, targets, temperatures in chunks
    ]  # fmt: skip
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _local_inputs(
    hidden_TE: Tensor, weight_VE: Tensor, *, loss_parallel: bool
) -> tuple[Tensor, Tensor, Split]:
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
    split = _split(weight_VE, loss_parallel=loss_parallel)
    return hidden_TE.to_local(grad_placements=grad_placements), weight_VE.to_local(), split


def _split(weight_VE: DTensor, *, loss_parallel: bool) -> Split:
    mesh, vocab_size = weight_VE.device_mesh, weight_VE.size(0)
    sharded = [axis for axis, placement in enumerate(weight_VE.placements) if placement.is_shard(0)]
    if loss_parallel and len(sharded) == 1:
        (axis,) = sharded
        # As DTensor cuts a dim: every part is as large as the first, as far as there are rows.
        num_rows = -(-vocab_size // mesh.size(axis))
        return VocabularyShard(
            first_row=min(mesh.get_local_rank(axis) * num_rows, vocab_size),
            group=mesh.get_group(axis).group_name,
        )
    placements = tuple(Shard(1) if axis in sharded else Replicate() for axis in range(mesh.ndim))
    return Gather(mesh=mesh, placements=placements, vocab_size=vocab_size)


def logprobs_of_chunk(
    hidden_CE: Tensor,
    weight: Tensor,
    targets_C: Tensor,
    temperatures_C: Tensor,
    split: Split,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """What `token_logprobs` returns, of plain tensors of which all fits into memory."""
    logits_CV = F.linear(hidden_CE, weight)
    if isinstance(split, VocabularyShard):
        of_targets = _ShardedLogprobs if targets_C.ndim == 1 else _ShardedLogprobsOfSeveral
        return of_targets.apply(
            logits_CV, targets_C, temperatures_C, split.first_row, split.group, entropy_gradient
        )
    if split is not None:
        logits_CV = _gather_vocabulary(logits_CV, split)
    logprobs_CV = torch.log_softmax(logits_CV.float() / temperatures_C.unsqueeze(1), dim=-1)
    if targets_C.ndim == 2:
        logprobs_C = logprobs_CV.gather(1, targets_C)
    else:
        # Not a view, as gather and squeeze would be: FSDP2 warns of views that leave the model.
        logprobs_C = -F.nll_loss(logprobs_CV, targets_C, reduction="none")
    if entropy_gradient:
        return logprobs_C, _Entropy.apply(logprobs_CV)
    with torch.no_grad():
        return logprobs_C, _entropy(logprobs_CV)


def _entropy(logprobs_CV: Tensor) -> Tensor:
    return -(logprobs_CV.exp() * logprobs_CV).sum(-1)


class _Entropy(torch.autograd.Function):
    """Of logprobs [C, V], which are all that it keeps for the backward: autograd would keep two more."""

    @staticmethod
    def forward(ctx: Any, logprobs_CV: Tensor) -> Tensor:
        ctx.save_for_backward(logprobs_CV)
        return _entropy(logprobs_CV)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (logprobs_CV,) = ctx.saved_tensors
        grad_CV: Tensor = logprobs_CV.exp()
        grad_CV.addcmul_(grad_CV, logprobs_CV)
        return grad_CV.mul_(-grads[0].unsqueeze(1))


class _ShardedLogprobs(torch.autograd.Function):
    """Of logits [C, W] split over ranks by vocabulary: two reductions of [C] forward, none backward."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_CW: Tensor,
        targets_C: Tensor,
        temperatures_C: Tensor,
        first_row: int,
        group: str,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        scaled_CW = logits_CW.float() / temperatures_C.unsqueeze(1)
        maxima_C = all_reduce(scaled_CW.amax(-1), "max", group)
        scaled_CW -= maxima_C.unsqueeze(1)
        rows_C, is_here_C = _local_rows(targets_C, first_row, logits_CW.size(1))
        target_C = scaled_CW.gather(1, rows_C.unsqueeze(1)).squeeze(1)
        exponentials_CW = scaled_CW.exp()
        parts = (
            exponentials_CW.sum(-1),
            (exponentials_CW * scaled_CW).sum(-1),
            torch.where(is_here_C, target_C, 0.0),
        )
        total_C, weighted_C, target_C = all_reduce(torch.stack(parts), "sum", group).unbind(0)
        log_total_C = total_C.log()
        logprobs_C, entropy_C = target_C - log_total_C, log_total_C - weighted_C / total_C
        saved = (logits_CW, targets_C, temperatures_C, maxima_C + log_total_C)
        ctx.save_for_backward(*saved, *((entropy_C,) if entropy_gradient else ()))
        ctx.first_row = first_row
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_C)
        return logprobs_C, entropy_C

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits_CW, targets_C, temperatures_C, log_normalizer_C, *entropy = ctx.saved_tensors
        logprobs_CW = logits_CW.float() / temperatures_C.unsqueeze(1)
        logprobs_CW -= log_normalizer_C.unsqueeze(1)
        # d entropy / d logit = -probability (logprob + entropy), over the temperature.
        of_entropy = None
        if entropy:
            of_entropy = logprobs_CW + entropy[0].unsqueeze(1)
            of_entropy *= grads[1].unsqueeze(1)
        # d logprob / d logit = (1 if target else 0) - probability, over the temperature.
        grad_CW = logprobs_CW.exp_().neg_()
        if of_entropy is not None:
            of_entropy *= grad_CW
        rows_C, is_here_C = _local_rows(targets_C, ctx.first_row, logits_CW.size(1))
        grad_CW.scatter_add_(1, rows_C.unsqueeze(1), is_here_C.float().unsqueeze(1))
        if of_entropy is None:
            grad_CW *= (grads[0] / temperatures_C).unsqueeze(1)
        else:
            grad_CW *= grads[0].unsqueeze(1)
            grad_CW += of_entropy
            grad_CW /= temperatures_C.unsqueeze(1)
        return grad_CW.to(logits_CW.dtype), None, None, None, None, None


class _ShardedLogprobsOfSeveral(torch.autograd.Function):
    """As `_ShardedLogprobs`, of targets [C, K]: K + 1 numbers a token where that reduces two."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_CW: Tensor,
        targets_CK: Tensor,
        temperatures_C: Tensor,
        first_row: int,
        group: str,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        scaled_CW = logits_CW.float() / temperatures_C.unsqueeze(1)
        maxima_C = all_reduce(scaled_CW.amax(-1), "max", group)
        scaled_CW -= maxima_C.unsqueeze(1)
        rows_CK, is_here_CK = _local_rows(targets_CK, first_row, logits_CW.size(1))
        here_CK = torch.where(is_here_CK, scaled_CW.gather(1, rows_CK), 0.0)
        exponentials_CW = scaled_CW.exp()
        sums = torch.stack((exponentials_CW.sum(-1), (exponentials_CW * scaled_CW).sum(-1)), dim=1)
        reduced = all_reduce(torch.cat((sums, here_CK), dim=1), "sum", group)
        total_C, weighted_C = reduced[:, 0], reduced[:, 1]
        log_total_C = total_C.log()
        entropy_C = log_total_C - weighted_C / total_C
        saved = (logits_CW, targets_CK, temperatures_C, maxima_C + log_total_C)
        ctx.save_for_backward(*saved, *((entropy_C,) if entropy_gradient else ()))
        ctx.first_row = first_row
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_C)
        return reduced[:, 2:] - log_total_C.unsqueeze(1), entropy_C

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits_CW, targets_CK, temperatures_C, log_normalizer_C, *entropy = ctx.saved_tensors
        logprobs_CW = logits_CW.float() / temperatures_C.unsqueeze(1)
        logprobs_CW -= log_normalizer_C.unsqueeze(1)
        grad_CW = logprobs_CW.exp()
        if entropy:
            logprobs_CW += entropy[0].unsqueeze(1)
            logprobs_CW *= grads[1].unsqueeze(1)
            grad_CW *= -(logprobs_CW + grads[0].sum(1, keepdim=True))
        else:
            grad_CW *= -grads[0].sum(1, keepdim=True)
        rows_CK, is_here_CK = _local_rows(targets_CK, ctx.first_row, logits_CW.size(1))
        grad_CW.scatter_add_(1, rows_CK, torch.where(is_here_CK, grads[0], 0.0))
        grad_CW /= temperatures_C.unsqueeze(1)
        return grad_CW.to(logits_CW.dtype), None, None, None, None, None


def _local_rows(targets_C: Tensor, first_row: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Row of each target in this rank's part of the vocabulary, 0 where it is not there; whether it is."""
    rows_C = targets_C - first_row
    is_here_C = (rows_C >= 0) & (rows_C < num_rows)
    return torch.where(is_here_C, rows_C, 0), is_here_C


def _gather_vocabulary(logits: Tensor, gather: Gather) -> Tensor:
    """[C, rows of this rank] -> [C, V], the same on every rank."""
    shape = torch.Size((logits.size(0), gather.vocab_size))
    sharded = DTensor.from_local(
        logits, gather.mesh, gather.placements, run_check=False, shape=shape, stride=(gather.vocab_size, 1)
    )
    return sharded.full_tensor()
