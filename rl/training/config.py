"""Settings of the training engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl.distributed.runtime import check_seed

Dtype = Literal["float32", "bfloat16"]

REFUSED = {
    "global_batch_size": (
        "the loop decides how many samples an optimizer step takes: loop.groups_per_batch x loop.group_size / "
        "loop.num_minibatches"
    ),
    "early_step_in_backward": (
        "optim_step divides the gradient by the denominators of all forward_backward calls and clips it by its "
        "norm over all parameters, and neither is known during a backward pass"
    ),
    "initial_load_in_hf_quantized": (
        "quantized weights cannot be trained; convert the folder to bfloat16 and load it with initial_load_in_hf"
    ),
}
"""Options that other trainers have and this one refuses, with the reason."""


def check_refused(config: object) -> None:
    """Raise ValueError for a field that is set although `REFUSED` names it."""
    for name, reason in REFUSED.items():
        value = getattr(config, name, None)
        if value is not None and value is not False:
            valid = False if isinstance(value, bool) else None
            raise ValueError(f"{name}={value!r}: must be {valid}: {reason}")


@dataclass(kw_only=True, slots=True)
class TrainingConfig:
    """Packing, precision, seeds and garbage collection of training."""

    max_tokens_per_microbatch: int = 16_384
    """Maximum number of tokens that are packed into one micro-batch."""
    max_sequences_per_microbatch: int | None = None
    """Maximum number of samples in a micro-batch; None for no limit."""
    share_prompts: bool = True
    """Send the prompt that samples of a micro-batch have in common through the model once; ignored with
    context parallelism, a compiled model or a mixture of experts."""
    global_batch_size: int | None = None
    """Samples of an optimizer step; refused."""
    max_sequence_length: int | None = None
    """Longest sample in tokens, prompt and completion; None for the positions that the model has."""
    max_norm: float = 1.0
    """Gradient norm above which gradients are clipped; inf only measures the norm."""
    dtype: Dtype = "float32"
    """Dtype of the stored parameters and of the optimizer's state."""
    param_dtype: Dtype = "float32"
    """Dtype of the parameters in forward and backward."""
    reduce_dtype: Dtype = "float32"
    """Dtype in which gradients are summed over ranks."""
    logits_chunk_tokens: int | None = None
    """Maximum number of tokens whose logits exist at once; None for the whole micro-batch."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory, step the optimizer there, and copy blocks
    to the GPU one by one."""
    seed: int = 0
    """Seed of Python's, numpy's and PyTorch's generators, and of weights that no folder provides."""
    deterministic: bool = False
    """Use only kernels that return the same bits every time; slower on a GPU."""
    gc_every_steps: int = 0
    """Steps between garbage collections, which then run on all ranks at once; 0 leaves them to Python."""
    gc_debug: bool = False
    """Log the number of objects that each of these collections freed, and its time."""

    def __post_init__(self) -> None:
        check_refused(self)
        check_seed(self.seed)
        for name, minimum, limit in (
            ("max_tokens_per_microbatch", 1, ""),
            ("max_sequences_per_microbatch", 1, ", or None for no limit"),
            ("max_sequence_length", 2, ", or None for no limit"),
            ("logits_chunk_tokens", 1, ", or None for no chunks"),
            ("gc_every_steps", 0, ""),
        ):
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ValueError(f"{name}={value}: must be at least {minimum}{limit}")
        if self.gc_debug and not self.gc_every_steps:
            raise ValueError(
                "gc_debug=True has no effect with gc_every_steps=0: must be False, or gc_every_steps above 0"
            )
        if not self.max_norm > 0.0:
            raise ValueError(f"max_norm={self.max_norm}: must be above 0, or inf for no clipping")


@dataclass(kw_only=True, slots=True)
class ReferenceConfig:
    """Settings of the reference policy."""

    enable: bool = False
    """Keep a frozen copy of the weights that training starts from, for a KL term; costs one more forward a step
    and, on each rank, the parameters' size in param_dtype."""
