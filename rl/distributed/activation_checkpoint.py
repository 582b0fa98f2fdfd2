"""Activation checkpointing of a model's blocks, for any model.

A checkpointed block keeps its input and recomputes the activations in the backward. Only the block's `forward` is
wrapped, so parameter names and FSDP's hooks around it stay.

When a block is recomputed, FSDP has gathered its parameters again in the dtype of the forward. Parameters that
`call_in_dtype` cast for the forward alone are kept by the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rl.config.effect import only_if

KEPT_OPS = {
    "aten::mm", "aten::bmm", "aten::addmm", "aten::_scaled_mm", "aten::_grouped_mm",
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
    "_c10d_functional::reduce_scatter_tensor", "_c10d_functional::all_to_all_single",
}  # fmt: skip
"""Operations whose results selective checkpointing keeps: matrix products, attention, and collectives with small
results. Norms, rotations, activations and gathers are recomputed."""


@dataclass(kw_only=True, slots=True)
class ActivationCheckpointConfig:
    """Choice between keeping activations for the backward and recomputing them."""

    mode: Literal["none", "selective", "full"] = "none"
    """none keeps all activations; full keeps only each block's input; selective keeps those that
    `selective_option` selects."""
    selective_option: str = field(default="op", metadata=only_if("mode", "selective"))
    """Selection in mode selective. op keeps the results of matrix products and of attention in every block; a
    number n keeps only the input of every n-th block and everything in the other blocks."""

    def __post_init__(self) -> None:
        option = self.selective_option
        if option != "op" and not (option.isdecimal() and int(option) >= 1):
            raise ValueError(f"selective_option={option!r}: must be 'op' or a number of layers from '1' up")


def checkpoint_activations(blocks: Iterable[nn.Module], config: ActivationCheckpointConfig) -> None:
    """Wrap the blocks' forwards in place, before they are compiled and sharded."""
    if config.mode == "none":
        return
    by_op = config.mode == "selective" and config.selective_option == "op"
    every = int(config.selective_option) if config.mode == "selective" and not by_op else 1
    for index, block in enumerate(blocks):
        if index % every == 0:
            _wrap(block, context_fn=_keep_some if by_op else None)


def _wrap(block: nn.Module, *, context_fn: Callable[[], Any] | None) -> None:
    inner = block.forward

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        contexts = context_fn
        # A compiled block takes its parameters as inputs of its graph, and so keeps them itself.
        if torch.compiler.is_compiling():
            contexts = context_fn or _keep_random
        elif cast := _cast_parameters(block):
            contexts = partial(_recompute_with, block, cast, context_fn)
        settings: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
        return checkpoint(inner, *args, use_reentrant=False, **settings, **kwargs)

    block.forward = forward


def _cast_parameters(block: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that replace parameters during this forward, by name."""
    return {name: p for name, p in block.named_parameters() if not isinstance(p, nn.Parameter)}


def _recompute_with(
    block: nn.Module, cast: Mapping[str, Tensor], context_fn: Callable[[], Any] | None
) -> tuple[Any, Any]:
    """Return the contexts of the forward and of its recomputation, for `checkpoint`."""
    first, again = (nullcontext(), nullcontext()) if context_fn is None else context_fn()
    return first, _with_parameters(block, cast, again)


@contextmanager
def _with_parameters(block: nn.Module, cast: Mapping[str, Tensor], inside: Any) -> Iterator[None]:
    """Enter the context `inside` with the cast tensors in place of the parameters."""
    with ExitStack() as stack:
        for name, tensor in cast.items():
            owner, _, leaf = name.rpartition(".")
            parameters: dict[str, Any] = block.get_submodule(owner)._parameters
            stack.callback(parameters.__setitem__, leaf, parameters[leaf])
            parameters[leaf] = tensor
        stack.enter_context(inside)
        yield


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    schema = getattr(op, "_schema", None)
    kept = schema is not None and schema.name in KEPT_OPS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


_keep_some = partial(create_selective_checkpoint_contexts, _policy)


def _random_policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep only the results of operations that may draw random numbers (attention on a CPU).

    To recompute those, PyTorch 2.13's compiler would keep a random state, which it confuses with the mesh of a
    tensor-parallel block.
    """
    kept = torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


_keep_random = partial(create_selective_checkpoint_contexts, _random_policy)
