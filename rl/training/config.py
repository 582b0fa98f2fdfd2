"""How samples become gradients: settings of the training engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl.distributed.seeds import check_seed

Dtype = Literal["float32", "bfloat16"]


@dataclass(kw_only=True, slots=True)
class TrainingConfig:
    """How samples become gradients."""

    max_tokens_per_microbatch: int = 16_384
    """Samples are packed into micro-batches of at most that many tokens."""
    max_sequences_per_microbatch: int | None = None
    """At most that many samples in a micro-batch; None: as many as fit its tokens."""
    share_prompts: bool = True
    """Samples of a micro-batch with the same prompt send it through the model once; not with context
    parallelism, a compiled model or a mixture of experts, where each brings its own."""
    global_batch_size: int | None = None
    """Samples of an optimizer step; refused, because the loop decides it."""
    max_sequence_length: int | None = None
    """Longest sample in tokens, prompt and completion; None: the positions that the model knows."""
    max_norm: float = 1.0
    """Gradient clip norm; inf measures and does not clip."""
    dtype: Dtype = "float32"
    """Of the parameters that the optimizer steps, and of its state."""
    param_dtype: Dtype = "float32"
    """Of the parameters in forward and backward."""
    reduce_dtype: Dtype = "float32"
    """In which gradients are summed between ranks."""
    logits_chunk_tokens: int | None = None
    """Logits of at most that many tokens exist at once; None: of the whole micro-batch."""
    cpu_offload: bool = False
    """Parameters, gradients and optimizer state live on the host, where the optimizer steps too; blocks are
    copied to the GPU one after another. On a CPU it changes nothing but the way of the tensors."""
    seed: int = 0
    """Of Python's, numpy's and PyTorch's generators, and of weights that no folder provides."""
    deterministic: bool = False
    """Use only kernels that give the same bits each time; slower on a GPU."""
    gc_every_steps: int = 0
    """Switch Python's own garbage collection off and collect after every n-th optimizer step, on all ranks
    at once; 0 leaves it on."""
    gc_debug: bool = False
    """Log what each of these collections found: objects in cycles, and tensors among them."""

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if self.max_tokens_per_microbatch < 1:
            raise ValueError(
                f"max_tokens_per_microbatch={self.max_tokens_per_microbatch}: must be at least 1"
            )
        for name, at_least in (("max_sequences_per_microbatch", 1), ("max_sequence_length", 2)):
            value = getattr(self, name)
            if value is not None and value < at_least:
                raise ValueError(f"{name}={value}: must be at least {at_least}, or None for no such limit")
        if self.global_batch_size is not None:
            raise ValueError(
                f"global_batch_size={self.global_batch_size}: must be None, as the loop decides what an "
                "optimizer step takes: loop.num_prompts x loop.num_samples / loop.num_minibatches samples"
            )
        if self.gc_every_steps < 0:
            raise ValueError(f"gc_every_steps={self.gc_every_steps}: must be at least 0")
        if self.gc_debug and not self.gc_every_steps:
            raise ValueError(
                "gc_debug=True has no effect with gc_every_steps=0: must be False, or gc_every_steps above 0"
            )
        if not self.max_norm > 0.0:
            raise ValueError(f"max_norm={self.max_norm}: must be above 0, or inf for no clipping")
        if self.logits_chunk_tokens is not None and self.logits_chunk_tokens < 1:
            raise ValueError(
                f"logits_chunk_tokens={self.logits_chunk_tokens}: must be at least 1, or None for no chunks"
            )
