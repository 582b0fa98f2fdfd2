"""Activation checkpointing of a model's blocks, for any model.

A checkpointed block keeps its input and recomputes the activations in the backward. Only the
block's `forward` is wrapped, so parameter names and FSDP's hooks around it stay.

When a block is recomputed, FSDP has gathered its parameters again in the dtype of the forward.
Parameters that `call_in_dtype` cast for the forward alone are kept by the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from rl.config.configurable import only_if
from rl.distributed.compat import replace_parameters

KEPT_OPS = {
    "aten::mm", "aten::bmm", "aten::addmm", "aten::_scaled_mm", "aten::_grouped_mm",
    "aten::_scaled_grouped_mm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn", "aten::_efficient_attention_forward",
    "_c10d_functional::reduce_scatter_tensor", "_c10d_functional::all_to_all_single",
}  # fmt: skip
"""Operations whose results selective checkpointing keeps: matrix products, attention, and
collectives with small results. Norms, rotations, activations and gathers are recomputed."""


@dataclass(kw_only=True, slots=True)
class ActivationCheckpointConfig:
    """Choice between keeping activations for the backward and recomputing them."""

    mode: Literal["none", "selective", "full"] = "none"
    """none keeps all activations; full keeps only each block's input; selective keeps those that
    `selective_option` selects."""
    selective_option: str = field(default="op", metadata=only_if("mode", "selective"))
    """Selection in mode selective. op keeps the results of matrix products and of attention in
    every block; a number n keeps only the input of every n-th block and everything in the other
    blocks."""

    def __post_init__(self) -> None:
        option = self.selective_option
        if option != "op" and not (option.isdecimal() and int(option) >= 1):
            raise ValueError(
                f"selective_option={option!r}: must be 'op' or a number of layers from '1' up"
            )


def checkpoint_activations(blocks: Iterable[nn.Module], config: ActivationCheckpointConfig) -> None:
    """Wrap the blocks' forwards in place, before they are compiled and sharded."""
    if config.mode == "none":
        return
    by_op = config.mode == "selective" and config.selective_option == "op"
    every = int(config.selective_option) if config.mode == "selective" and not by_op else 1
    # Before compilation and FSDP: the wrapper has to be within their hooks around the forward.
    for index, block in enumerate(blocks):
        if index % every == 0:
            _wrap(block, context_fn=_keep_some if by_op else None)


def _wrap(block: nn.Module, *, context_fn: Callable[[], Any] | None) -> None:
    inner = block.forward

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        # A compiled block takes its parameters as inputs of its graph, and so keeps them itself.
        if torch.compiler.is_compiling():
            return checkpoint(
                inner, *args, use_reentrant=False, context_fn=context_fn or _keep_random, **kwargs
            )

        # By the time of the backward `call_in_dtype` has put the parameters back: the recomputation
        # has to take the cast tensors again, or it would compute in another dtype.
        named: Iterable[tuple[str, Tensor]] = block.named_parameters()
        cast = {name: p for name, p in named if not isinstance(p, nn.Parameter)}

        def call_with_cast(*args: Any, **kwargs: Any) -> Any:
            with replace_parameters(block, cast):
                return inner(*args, **kwargs)

        run = call_with_cast if cast else inner
        return checkpoint(
            run, *args, use_reentrant=False, context_fn=context_fn or noop_context_fn, **kwargs
        )

    block.forward = forward


def _choose_by_name(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # Higher-order operations have no schema, and no name to compare.
    schema = getattr(op, "_schema", None)
    is_kept = schema is not None and schema.name in KEPT_OPS
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


_keep_some = partial(create_selective_checkpoint_contexts, _choose_by_name)


def _choose_random(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep only the results of operations that may draw random numbers (attention on a CPU).

    To recompute those, PyTorch 2.13's compiler would keep a random state, which it confuses with
    the mesh of a tensor-parallel block.
    """
    is_random = torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
    return CheckpointPolicy.MUST_SAVE if is_random else CheckpointPolicy.PREFER_RECOMPUTE


_keep_random = partial(create_selective_checkpoint_contexts, _choose_random)
