"""Servers of the Tinker API: `tiny` on a CPU, ready in seconds."""

from __future__ import annotations

from rl.tinker.http.server import TinkerServer
from rl.tinker.local_backend import LocalBackend
from rl.tinker.local_base import Base


def tiny() -> TinkerServer.Config:
    """A model of 0.8M parameters that is drawn from a seed, with a tokenizer of bytes; on a CPU, no GPU."""
    return TinkerServer.Config(
        description="Qwen3 of 0.8M parameters, computed in this process",
        backend=LocalBackend.Config(bases=(Base.Config(name="tiny", batch_invariant=True),)),
    )
