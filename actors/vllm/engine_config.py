"""What can be set about a generator's engine, and what is refused of it before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from actors.vllm.memory import check_cpu_cache
from rl.config.configurable import Configurable
from rl.distributed.seeds import check_seed

OnUpdate = Literal["drain", "keep", "recompute"]
_POSITIVE = (
    "tensor_parallel_degree",
    "max_num_seqs",
    "max_num_batched_tokens",
    "cpu_kv_cache_gib",
    "num_threads",
    "rank_timeout_s",
)


@dataclass(kw_only=True, slots=True)
class GeneratorConfig(Configurable.Config):
    """The fields of `GeneratorEngine.Config`."""

    tensor_parallel_degree: int = 1
    """Processes that share one copy of the model; divides the key-value heads and the vocabulary."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Of weights, activations and cache; the trainer's weights are cast to it."""
    max_model_len: int = 4096
    """Longest prompt and completion together, in tokens."""
    max_num_seqs: int = 256
    """Most requests in one step; others wait."""
    max_num_batched_tokens: int = 8192
    """Most tokens in one step, those of prompts included; a longer prompt is read in parts."""
    gpu_memory_utilization: float = 0.85
    """Share of a GPU's memory for weights, activations and cache. Not used on a CPU."""
    cpu_kv_cache_gib: float = 1.0
    """Memory of each rank's key-value cache on a CPU. Not used on a GPU."""
    block_size: int | None = None
    """Tokens of a cache block; prompts share whole blocks. On a CPU a multiple of 32.
    None: 32 on a CPU, vLLM's choice on a GPU."""
    enable_prefix_caching: bool = True
    """The samples of a prompt share its cache blocks."""
    enforce_eager: bool = True
    """Without CUDA graphs. Not used on a CPU."""
    on_update: OnUpdate = "drain"
    """What becomes of running requests when weights are updated.

    "drain": they finish first, and new ones are held back meanwhile. A completion is of one version
    and its logprobs are that version's. Costs the wait for the longest of them, in which the batch
    empties.
    "keep": they go on under the new weights with the keys and values that they have. Costs nothing.
    A completion may be of several versions; a token's logprob is of the distribution it was drawn
    from, which after an update is of no version alone: the new weights see the old ones' keys.
    "recompute": as "keep", but their keys and values are computed anew under the new weights. Costs
    one prefill of all that runs, prompts and completions. A token's logprob is what its version
    gives for the whole sequence before it."""
    can_sleep: bool = False
    """Whether `sleep` may be called. On a GPU, weights and cache are then vLLM's allocator's."""
    initial_weights: Literal["store", "folder"] = "store"
    """Where the first weights come from: the first pull, or the Hugging Face folder."""
    seed: int = 0
    """For calls whose sampling settings have none."""
    num_threads: int = 1
    """CPU threads of each rank."""
    rank_timeout_s: float = 300.0
    """Longest wait of a tensor-parallel rank for the others, in a step or an update."""

    def __post_init__(self) -> None:
        check_seed(self.seed, field="generator.seed", below=2**32)
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ValueError(f"generator.{name}={getattr(self, name)}: must be above 0")
        if self.max_model_len < 2:
            raise ValueError(f"generator.max_model_len={self.max_model_len}: must be at least 2")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"generator.max_num_batched_tokens={self.max_num_batched_tokens}: must be at least "
                f"max_num_seqs={self.max_num_seqs}, as each running request takes a token a step"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"generator.gpu_memory_utilization={self.gpu_memory_utilization}: must be above 0, at most 1"
            )

    def check_model(self, model: Any, *, on_gpu: bool | None = None) -> None:
        """Whether an engine of this config can run a model of config `model`, without starting it.

        `on_gpu` None: if this machine has one.

        Raises:
            ValueError: naming the fields.
        """
        for name, size in (
            ("num_kv_heads", model.block.attention.num_kv_heads),
            ("vocab_size", model.vocab_size),
        ):
            if size % self.tensor_parallel_degree:
                raise ValueError(
                    f"generator.tensor_parallel_degree={self.tensor_parallel_degree} "
                    f"does not divide {name}={size}"
                )
        if self.max_model_len > model.rope.max_positions:
            raise ValueError(
                f"generator.max_model_len={self.max_model_len} is more than the model's "
                f"max_positions={model.rope.max_positions}"
            )
        if not (torch.cuda.is_available() if on_gpu is None else on_gpu):
            check_cpu_cache(self, model)
