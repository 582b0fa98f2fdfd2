"""Servers of the Tinker API: `tiny` on a CPU, ready in seconds; `tiny_actors` its model over actors."""

from __future__ import annotations

from rl.tinker.http.server import TinkerServer
from rl.tinker.local.backend import LocalBackend
from rl.tinker.local.base import Base


def tiny() -> TinkerServer.Config:
    """A model of 0.8M parameters that is drawn from a seed, with a tokenizer of bytes; on a CPU, no GPU."""
    return TinkerServer.Config(
        description="Qwen3 of 0.8M parameters, computed in this process",
        backend=LocalBackend.Config(bases=(Base.Config(name="tiny", batch_invariant=True),)),
    )


def tiny_actors() -> TinkerServer.Config:
    """The same model trained by one actor, and sampled from by vLLM in another; on a CPU, or on two GPUs."""
    # Their imports take seconds, which `tiny` is ready without.
    from actors.generator import VLLMGenerator
    from actors.tinker_backend import ActorBackend

    return TinkerServer.Config(
        description="Qwen3 of 0.8M parameters, a trainer and a generator",
        backend=ActorBackend.Config(
            base=Base.Config(name="tiny"),
            generator=VLLMGenerator.Config(dtype="float32", max_model_len=1024, cpu_kv_cache_gib=0.5),
        ),
    )
