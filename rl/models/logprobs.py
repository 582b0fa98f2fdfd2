"""Log-probabilities of given tokens, as the `head` of `Decoder.forward`.

    head = functools.partial(compute_token_logprobs, targets_T=targets, temperatures_T=temperatures)
    logprobs_T, entropy_T = model(tokens, positions=positions, sequences=layout, head=head)

Under tensor parallelism each rank holds the logits of its part of the vocabulary. Maximum, sum of
exponentials and the target's logit are reduced over the ranks, [C] numbers each; no rank holds the
whole vocabulary.

Shape legend: T packed tokens, R of them whose values are needed, C tokens of one chunk, K targets
of each token, E model width, V vocabulary, W part of the vocabulary on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils.checkpoint import checkpoint

from rl.distributed.collectives import all_reduce
from rl.models.low_rank.layer import AdaptedWeight, Factors

PART_NUMBERS = 1 << 19
"""Logits that a CPU works on at once, so that later passes find them in a core's cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyShard:
    """This rank's rows of the head's weight."""

    first_row: int
    group: str
    """Name of the process group that shares the vocabulary."""


def compute_token_logprobs(
    hidden_TE: Tensor,
    head: Tensor | AdaptedWeight,
    *,
    targets_T: Tensor,
    temperatures_T: Tensor,
    rows_R: Tensor | None = None,
    chunk_tokens: int | None = None,
    loss_parallel: bool = True,
    chunk_logprobs: Callable[..., tuple[Tensor, Tensor]] | None = None,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return each target's logprob under `softmax(hidden @ weight.T / temperature)`, and entropies.

    Logits are computed in the inputs' dtype, as in the generator (`Decoder.float32_head`),
    everything after them in float32. Under tensor parallelism hidden is a DTensor, replicated or
    sharded by token, and the weight is sharded by vocabulary; every rank returns the same plain
    tensors.

    Args:
        head: weight of the output head, [V, E].
        targets_T: int64; or [T, K] for several targets of each distribution.
        temperatures_T: float32, above 0.
        rows_R: int64, the tokens whose values are needed; those of all others are 0. None for all
            tokens.
        chunk_tokens: largest number of tokens whose logits exist at once; the backward recomputes
            them.
        loss_parallel: keep each rank's part of the vocabulary; False gathers the head's weight.
        chunk_logprobs: a compiled form of `compute_chunk_logprobs`.
        entropy_gradient: give the entropy a gradient, which may cost memory in the backward.

    Returns:
        Logprobs [T] or [T, K], float32 nats with gradient, and entropy [T], float32 nats.
    """
    adapted: AdaptedWeight | None = None
    if isinstance(head, AdaptedWeight):
        adapted, head = head, head.weight
    hidden_TE, weight, shard = _prepare_inputs(hidden_TE, head, loss_parallel=loss_parallel)
    compute = partial(
        chunk_logprobs or compute_chunk_logprobs,
        weight=weight,
        factors=None if adapted is None else adapted.get_factors(whole=shard is None),
        shard=shard,
        entropy_gradient=entropy_gradient,
    )
    if rows_R is None:
        return _compute_in_chunks(compute, chunk_tokens, hidden_TE, targets_T, temperatures_T)
    logprobs_R, entropy_R = _compute_in_chunks(
        compute,
        chunk_tokens,
        hidden_TE.index_select(0, rows_R),
        targets_T.index_select(0, rows_R),
        temperatures_T.index_select(0, rows_R),
    )
    # Back to the places of all tokens, so that callers index by token.
    num_tokens = targets_T.size(0)
    logprobs = logprobs_R.new_zeros(num_tokens, *logprobs_R.shape[1:])
    entropy = entropy_R.new_zeros(num_tokens)
    return logprobs.index_copy(0, rows_R, logprobs_R), entropy.index_copy(0, rows_R, entropy_R)


def _compute_in_chunks(
    compute: Callable[..., tuple[Tensor, Tensor]],
    chunk_tokens: int | None,
    hidden: Tensor,
    targets: Tensor,
    temperatures: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return logprobs and entropies of the tokens; the backward recomputes chunk after chunk."""
    if chunk_tokens is None or hidden.size(0) <= chunk_tokens:
        return compute(hidden, targets, temperatures)
    chunks = zip(
        hidden.split(chunk_tokens),
        targets.split(chunk_tokens),
        temperatures.split(chunk_tokens),
        strict=True,
    )
    logprobs, entropies = [], []
    for chunk in chunks:
        # Nothing is drawn at random, so there is no state to keep for the second computation.
        results = checkpoint(compute, *chunk, use_reentrant=False, preserve_rng_state=False)
        logprobs.append(results[0])
        entropies.append(results[1])
    return torch.cat(logprobs), torch.cat(entropies)


def _prepare_inputs(
    hidden_TE: Tensor, weight_VE: Tensor, *, loss_parallel: bool
) -> tuple[Tensor, Tensor, VocabularyShard | None]:
    """Return all tokens and this rank's vocabulary rows as plain tensors, and the rows' place."""
    if not isinstance(weight_VE, DTensor):
        if isinstance(hidden_TE, DTensor):
            hidden_TE = hidden_TE.full_tensor()
        return hidden_TE, weight_VE, None

    mesh, (placement,) = weight_VE.device_mesh, weight_VE.placements
    if not placement.is_replicate() and not placement.is_shard(0):
        raise ValueError(f"head weight is placed as {placement}: must be Shard(0) or Replicate()")
    if isinstance(hidden_TE, DTensor):
        hidden_TE = hidden_TE.redistribute(mesh, [Replicate()])
    else:
        hidden_TE = DTensor.from_local(hidden_TE, mesh, [Replicate()], run_check=False)
    if placement.is_replicate() or not loss_parallel:
        whole_VE = weight_VE.redistribute(mesh, [Replicate()]).to_local()
        return hidden_TE.to_local(), whole_VE, None
    # DTensor's rule: every part is as large as the first, as far as rows remain.
    num_rows = -(-weight_VE.size(0) // mesh.size())
    first_row = min(mesh.get_local_rank() * num_rows, weight_VE.size(0))
    shard = VocabularyShard(first_row=first_row, group=mesh.get_group().group_name)
    # Each rank computes the gradient of the hidden states from its own vocabulary rows only.
    return hidden_TE.to_local(grad_placements=[Partial()]), weight_VE.to_local(), shard


def compute_chunk_logprobs(
    hidden_CE: Tensor,
    targets_C: Tensor,
    temperatures_C: Tensor,
    *,
    weight: Tensor,
    shard: VocabularyShard | None,
    entropy_gradient: bool,
    factors: Factors | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `compute_token_logprobs` from plain tensors in one chunk."""
    logits_CV = F.linear(hidden_CE, weight)
    if factors is not None:
        logits_CV = factors.add_to(logits_CV, hidden_CE)
    # Our own functions save memory. A compiler saves it too, and sees through PyTorch's alone.
    if shard is not None or not (entropy_gradient or torch.compiler.is_compiling()):
        targets_CK = targets_C.view(targets_C.size(0), -1)
        if shard is None:
            logprobs_CK, entropy_C = _Logprobs.apply(logits_CV, targets_CK, temperatures_C)
        else:
            logprobs_CK, entropy_C = _ShardedLogprobs.apply(
                logits_CV, targets_CK, temperatures_C, shard, entropy_gradient
            )
        # A sum of one number instead of a view: FSDP2's hooks on an output that is a view are lost
        # if a loss changes it in place.
        return (logprobs_CK if targets_C.ndim == 2 else logprobs_CK.sum(1)), entropy_C

    # From here on PyTorch's functions alone, with their own gradients.
    logprobs_CV = torch.log_softmax(logits_CV.float() / temperatures_C.unsqueeze(1), dim=-1)
    if targets_C.ndim == 2:
        logprobs_C = logprobs_CV.gather(1, targets_C)
    else:
        # gather and squeeze would return a view, as above.
        logprobs_C = -F.nll_loss(logprobs_CV, targets_C, reduction="none")
    if entropy_gradient:
        return logprobs_C, _Entropy.apply(logprobs_CV)
    with torch.no_grad():
        return logprobs_C, _compute_entropy(logprobs_CV)


def _compute_entropy(logprobs_CV: Tensor) -> Tensor:
    return -(logprobs_CV.exp() * logprobs_CV).sum(-1)


class _Logprobs(torch.autograd.Function):
    """Logprobs [C, K] with gradient, and entropy [C], of whole logits [C, V].

    The logits' memory holds the probabilities until the backward, and then the gradient. Everything
    else of this size exists for a part of the rows at a time.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_CV: Tensor, targets_CK: Tensor, temperatures_C: Tensor
    ) -> tuple[Tensor, Tensor]:
        parts = []
        for logits, targets, temperatures in _split_rows(logits_CV, targets_CK, temperatures_C):
            logprobs = torch.log_softmax(logits.float() / temperatures.unsqueeze(1), dim=-1)
            probabilities = logprobs.exp()
            # The logits are not needed again: their memory takes the probabilities.
            logits.copy_(probabilities)
            of_targets = logprobs.gather(1, targets), probabilities.gather(1, targets)
            parts.append((*of_targets, -probabilities.mul_(logprobs).sum(-1)))
        logprobs_CK, of_targets_CK, entropy_C = map(torch.cat, zip(*parts, strict=True))
        ctx.save_for_backward(logits_CV, targets_CK, temperatures_C, of_targets_CK)
        ctx.mark_non_differentiable(entropy_C)
        return logprobs_CK, entropy_C

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        probabilities_CV, targets_CK, temperatures_C, of_targets_CK = ctx.saved_tensors
        # d logprob / d logit = (1 if target else 0) - probability, over the temperature; the
        # targets' in float32, because in bfloat16 a probability near 1 has lost 1 - p.
        slopes_C1 = -grads[0].sum(1, keepdim=True)
        is_same_CKK = targets_CK.unsqueeze(2) == targets_CK.unsqueeze(1)
        pulls_CK = torch.where(is_same_CKK, grads[0].unsqueeze(1), 0.0).sum(2)
        of_targets_CK = (pulls_CK + of_targets_CK * slopes_C1) / temperatures_C.unsqueeze(1)
        slopes_C1 = slopes_C1 / temperatures_C.unsqueeze(1)
        for grad, slopes, targets, values in _split_rows(
            probabilities_CV, slopes_C1, targets_CK, of_targets_CK
        ):
            grad.mul_(slopes).scatter_(1, targets, values.to(grad.dtype))
        return probabilities_CV, None, None


def _split_rows(logits_CV: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the rows of all tensors in parts that fit a CPU's caches; on a GPU in one part."""
    # A GPU has no cache of this size, and would pay for each launch.
    num_rows = len(logits_CV) if logits_CV.is_cuda else max(1, PART_NUMBERS // logits_CV.size(1))
    return zip(*(x.split(max(1, num_rows)) for x in (logits_CV, *others)), strict=True)


class _Entropy(torch.autograd.Function):
    """Entropy of logprobs [C, V] that keeps one tensor for the backward; autograd keeps three."""

    @staticmethod
    def forward(ctx: Any, logprobs_CV: Tensor) -> Tensor:
        ctx.save_for_backward(logprobs_CV)
        return _compute_entropy(logprobs_CV)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (logprobs_CV,) = ctx.saved_tensors
        grad_CV: Tensor = logprobs_CV.exp()
        grad_CV.addcmul_(grad_CV, logprobs_CV)
        return grad_CV.mul_(-grads[0].unsqueeze(1))


class _ShardedLogprobs(torch.autograd.Function):
    """Logprobs [C, K] and entropy [C] of vocabulary-sharded logits [C, W].

    The forward has two reductions over the ranks, the backward none.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_CW: Tensor,
        targets_CK: Tensor,
        temperatures_C: Tensor,
        shard: VocabularyShard,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        # The maximum of all ranks is subtracted, or exponentials would overflow.
        scaled_CW = logits_CW.float() / temperatures_C.unsqueeze(1)
        maxima_C = all_reduce(scaled_CW.amax(-1), "max", shard.group)
        scaled_CW -= maxima_C.unsqueeze(1)

        # Both sums and the targets' logits in one reduction; only the rank that holds a target adds
        # its logit.
        rows_CK, is_here_CK = _find_local_rows(targets_CK, shard.first_row, logits_CW.size(1))
        here_CK = torch.where(is_here_CK, scaled_CW.gather(1, rows_CK), 0.0)
        exponentials_CW = scaled_CW.exp()
        sums = torch.stack((exponentials_CW.sum(-1), (exponentials_CW * scaled_CW).sum(-1)), dim=1)
        reduced = all_reduce(torch.cat((sums, here_CK), dim=1), "sum", shard.group)
        total_C, weighted_C = reduced[:, 0], reduced[:, 1]

        log_total_C = total_C.log()
        entropy_C = log_total_C - weighted_C / total_C
        saved = (logits_CW, targets_CK, temperatures_C, maxima_C + log_total_C)
        ctx.save_for_backward(*saved, *((entropy_C,) if entropy_gradient else ()))
        ctx.first_row = shard.first_row
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_C)
        return reduced[:, 2:] - log_total_C.unsqueeze(1), entropy_C

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits_CW, targets_CK, temperatures_C, log_normalizer_C, *entropy = ctx.saved_tensors
        # Computed again from the logits in their own dtype, rather than kept in float32.
        logprobs_CW = logits_CW.float() / temperatures_C.unsqueeze(1)
        logprobs_CW -= log_normalizer_C.unsqueeze(1)
        # d logprob / d logit = (1 if target else 0) - probability, and
        # d entropy / d logit = -probability (logprob + entropy), both over the temperature.
        grad_CW = logprobs_CW.exp().neg_()
        slope = grads[0].sum(1, keepdim=True)
        if entropy:
            logprobs_CW += entropy[0].unsqueeze(1)
            slope = logprobs_CW.mul_(grads[1].unsqueeze(1)).add_(slope)
        grad_CW *= slope
        rows_CK, is_here_CK = _find_local_rows(targets_CK, ctx.first_row, logits_CW.size(1))
        grad_CW.scatter_add_(1, rows_CK, torch.where(is_here_CK, grads[0], 0.0))
        grad_CW /= temperatures_C.unsqueeze(1)
        return grad_CW.to(logits_CW.dtype), None, None, None, None


def _find_local_rows(targets_CK: Tensor, first_row: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return each target's row in this rank's part of the vocabulary, or 0, and if it is there."""
    rows_CK = targets_CK - first_row
    is_here_CK = (rows_CK >= 0) & (rows_CK < num_rows)
    return torch.where(is_here_CK, rows_CK, 0), is_here_CK
