"""Activation checkpointing of a model's blocks, for any model.

A checkpointed block keeps its input and computes what its backward needs again. It is the
block's `forward` that is wrapped: parameter names and FSDP's hooks, which stand around it, stay.

FSDP has gathered a block's parameters again, in the dtype of the forward, when the block is computed
again. Where `call_in_dtype` cast them for the forward alone, the checkpoint keeps the cast ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

KEPT_OPS = frozenset(
    (
        "aten::mm",
        "aten::bmm",
        "aten::addmm",
        "aten::_scaled_mm",
        "aten::_grouped_mm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "torch_attn::_varlen_attn",
        "_c10d_functional::reduce_scatter_tensor",
        "_c10d_functional::all_to_all_single",
    )
)
"""What selective checkpointing by operation keeps: matrix products, attention, and collectives whose
result is small. Norms, rotations, activations and gathers are computed again."""


@dataclass(kw_only=True, slots=True)
class ActivationCheckpointConfig:
    """Which activations are kept for the backward, and which are computed again."""

    mode: Literal["none", "selective", "full"] = "none"
    """none keeps all; full keeps each block's input alone; selective is between, as the next field says."""
    selective_option: str = "op"
    """In mode selective: op keeps the results of matrix products and of attention in every block; a
    number n keeps all in every block but each n-th, of which it keeps the input alone."""

    def __post_init__(self) -> None:
        option = self.selective_option
        if option != "op" and not (option.isdecimal() and int(option) >= 1):
            raise ValueError(f"selective_option={option!r}: must be 'op' or a number of layers from '1' up")
        if option != "op" and self.mode != "selective":
            raise ValueError(
                f"selective_option={option!r} has no effect with mode={self.mode!r}: must be 'op', or mode "
                "'selective'"
            )


def checkpoint_activations(blocks: Iterable[nn.Module], config: ActivationCheckpointConfig) -> None:
    """Wrap the blocks' forwards, in place; before they are compiled and sharded."""
    config.__post_init__()  # A field may have been edited since.
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
    """Tensors that stand in the place of parameters during this forward, by name."""
    return {name: p for name, p in block.named_parameters() if not isinstance(p, nn.Parameter)}


def _recompute_with(
    block: nn.Module, cast: Mapping[str, Tensor], context_fn: Callable[[], Any] | None
) -> tuple[Any, Any]:
    """Contexts of the forward and of its repetition, as `checkpoint` takes them."""
    first, again = (nullcontext(), nullcontext()) if context_fn is None else context_fn()
    return first, _with_parameters(block, cast, again)


@contextmanager
def _with_parameters(block: nn.Module, cast: Mapping[str, Tensor], inside: Any) -> Iterator[None]:
    """In the context `inside`, with `cast` in the place of parameters."""
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
    """Nothing is kept but results of operations that may draw random numbers (attention on a CPU).

    To compute those again, PyTorch 2.13's compiler keeps a random state, and takes it for the mesh of a
    tensor-parallel block.
    """
    kept = torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


_keep_random = partial(create_selective_checkpoint_contexts, _random_policy)
