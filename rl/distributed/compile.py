"""torch.compile, block by block, for any model.

Blocks of one model share what is compiled for the first of them. FSDP's hooks stand around
the compiled forward, activation checkpointing within it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

BACKENDS = ("inductor", "aot_eager", "eager")
NUM_VARIANTS = 32

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


@dataclass(kw_only=True, slots=True)
class CompileConfig:
    """What torch.compile makes faster; the first steps take longer."""

    enable: bool = False
    components: tuple[Literal["model", "loss"], ...] = ("model", "loss")
    """model: each block. loss: logprobs and entropy from the logits."""
    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """inductor needs a C++ compiler on a CPU, Triton and a C compiler on a GPU; eager and aot_eager trace
    without making anything faster, to find what cannot be compiled."""

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"backend={self.backend!r}: must be one of {', '.join(BACKENDS)}")
        unknown = [name for name in self.components if name not in ("model", "loss")]
        if unknown or not self.components:
            raise ValueError(f"components={self.components}: must be 'model', 'loss' or both")
        if self.enable:
            return
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name != "enable" and value != f.default:
                raise ValueError(
                    f"{f.name}={value!r} has no effect with enable=False: must be {f.default!r}, or enable "
                    "True"
                )

    def includes(self, component: Literal["model", "loss"]) -> bool:
        return self.enable and component in self.components


def check_compiler(config: CompileConfig, *, device_type: str) -> None:
    """That the backend finds what it needs on this machine.

    Raises:
        ValueError: names what is missing.
    """
    config.__post_init__()  # A field may have been edited since.
    if not config.enable or config.backend != "inductor":
        return
    missing = _missing_on_cpu() if device_type == "cpu" else _missing_on_gpu()
    if missing:
        raise ValueError(
            f"compile.backend='inductor' needs {missing}; without it, backend must be 'aot_eager' or "
            "'eager', or compile.enable False"
        )


def _missing_on_cpu() -> str | None:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler):
        return None
    return f"a C++ compiler on a CPU, and there is no {compiler}: install g++ or set the variable CXX"


def _missing_on_gpu() -> str | None:
    if find_spec("triton") is None:
        return "the package triton on a GPU, which is not installed"
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if any(shutil.which(name) for name in compilers):
        return None
    names = " or ".join(compilers)
    return f"a C compiler for Triton on a GPU, and there is no {names}: install gcc or set the variable CC"


def compile_blocks(blocks: Iterable[nn.Module], config: CompileConfig) -> None:
    """Compile the blocks' forwards, in place; after checkpointing, before sharding."""
    if config.includes("model"):
        for block in blocks:
            block.forward = _compiled(block.forward, config)
            block.register_forward_pre_hook(_await_inputs)


def _await_inputs(block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies in place of what a collective is still writing: compiled code loses the gradient of those."""
    return tuple(x.clone() if isinstance(x, AsyncCollectiveTensor) else x for x in inputs)


def compile_function(function: FunctionT, config: CompileConfig) -> FunctionT:
    """The function compiled, if `config` compiles the loss; else itself."""
    return _compiled(function, config) if config.includes("loss") else function


def _compiled(function: FunctionT, config: CompileConfig) -> FunctionT:
    # With and without gradient, for the first number of tokens and for any, for one sequence and for
    # several: more variants than PyTorch makes of a function before it leaves it uncompiled.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, NUM_VARIANTS)
    compiled: Any = torch.compile(function, backend=config.backend)
    return compiled
