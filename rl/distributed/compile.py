"""torch.compile, block by block, and tensor parallelism that overlaps communication.

Blocks of one model share the code compiled for the first of them. FSDP's hooks stand around the
compiled forward, activation checkpointing within it.

For asynchronous tensor parallelism the compiler splits a gather or scatter next to a matrix product
into pieces that are copied while others are multiplied, through memory that GPUs share (symmetric
memory, NVLink).
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rl.config.configurable import only_if
from rl.distributed.compat import allow_variants, enable_micro_pipeline, is_awaited
from rl.utils.caches import ensure_private_caches

NUM_VARIANTS = 32
"""Variants of a compiled function, beyond which PyTorch runs it uncompiled."""

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


@dataclass(kw_only=True, slots=True)
class CompileConfig:
    """Use of torch.compile; the first steps take longer."""

    enable: bool = False
    """Compile the parts that `components` names."""
    components: tuple[Literal["model", "loss"], ...] = field(
        default=("model", "loss"), metadata=only_if("enable", True)
    )
    """Compiled parts. model: each block. loss: logprobs and entropy from the logits."""
    backend: Literal["inductor", "aot_eager", "eager"] = field(
        default="inductor", metadata=only_if("enable", True)
    )
    """Compiler backend. inductor needs a C++ compiler on a CPU, Triton and a C compiler on a GPU;
    eager and aot_eager trace without a speedup, to find code that cannot be compiled."""

    def __post_init__(self) -> None:
        if not self.components:
            raise ValueError(f"components={self.components}: must be 'model', 'loss' or both")

    def includes(self, component: Literal["model", "loss"]) -> bool:
        return self.enable and component in self.components


def check_compiler(config: CompileConfig, *, device_type: str) -> None:
    """Raise ValueError naming the tool that the backend needs and this machine lacks."""
    if not config.enable or config.backend != "inductor":
        return
    # As the inductor chooses: CXX on a CPU, CC for Triton's launcher on a GPU.
    if device_type == "cpu":
        compilers, variable = [os.environ.get("CXX", "g++")], "CXX"
    else:
        compilers, variable = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"], "CC"
    has_triton = device_type == "cpu" or find_spec("triton") is not None
    if not has_triton or not any(map(shutil.which, compilers)):
        needs = "the package triton" if not has_triton else f"a compiler ({' or '.join(compilers)})"
        raise ValueError(
            f"compile.backend='inductor' needs {needs} on device {device_type!r}: install it, set "
            f"the variable {variable} to a compiler, or use compile.backend='aot_eager' or "
            "compile.enable=False"
        )


def compile_blocks(blocks: Iterable[nn.Module], config: CompileConfig) -> None:
    """Compile the blocks' forwards in place, except modules marked `never_compiled`.

    Call it after checkpointing and before sharding.
    """
    if not config.includes("model"):
        return
    for block in blocks:
        for module in block.modules():
            # A decorator in the module's class would import the compiler, 2 s, into every process.
            if getattr(module, "never_compiled", False):
                module.forward = torch.compiler.disable(module.forward)
        block.forward = _compile(block.forward, config)
        block.register_forward_pre_hook(_await_inputs)


def _await_inputs(block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copy inputs that a collective is still writing, as compiled code loses their gradient."""
    return tuple(x.clone() if is_awaited(x) else x for x in inputs)


def compile_function(function: FunctionT, config: CompileConfig) -> FunctionT:
    """Return the function, compiled if the config compiles the loss."""
    return _compile(function, config) if config.includes("loss") else function


def _compile(function: FunctionT, config: CompileConfig) -> FunctionT:
    # With and without gradient, for the first number of tokens and for any, for one sequence and
    # for several: together these variants exceed PyTorch's limit.
    allow_variants(NUM_VARIANTS)
    ensure_private_caches()  # Before PyTorch asks for its folder.
    compiled: Any = torch.compile(function, backend=config.backend)
    return compiled


def check_async_tensor_parallel(
    *, tensor_parallel_degree: int, compile_config: CompileConfig, device_type: str
) -> None:
    """Raise ValueError if a requirement is missing that is visible without touching a GPU."""
    compiles = compile_config.includes("model") and compile_config.backend == "inductor"
    if device_type != "cuda" or tensor_parallel_degree == 1 or not compiles:
        raise ValueError(
            f"parallelism.async_tensor_parallel=True on device {device_type!r} with "
            f"tensor_parallel_degree={tensor_parallel_degree}, "
            f"compile.enable={compile_config.enable}, "
            f"compile.components={compile_config.components}, "
            f"compile.backend={compile_config.backend!r}: must be False, unless GPUs share the "
            "model ('cuda', a degree above 1) and 'inductor' compiles its blocks ('model' among "
            "the components), which makes the overlap"
        )


def overlap_tensor_parallel(mesh: DeviceMesh) -> None:
    """Overlap the collectives of a one-dimensional mesh in all code compiled from now on."""
    with warnings.catch_warnings():
        # Newer PyTorch versions enable every group and warn about the call.
        warnings.simplefilter("ignore", FutureWarning)
        enable_micro_pipeline(mesh.get_group())
