"""What a generator's calls fail with."""

from __future__ import annotations

from rl.errors import RunError


class GeneratorError(RunError):
    """The generator cannot serve: it has no weights, was closed, or its engine has failed."""


class EngineFailedError(GeneratorError):
    """The generator's engine, or that of another of its ranks, has failed: it serves nothing any more."""


class EngineTimeoutError(EngineFailedError, TimeoutError):
    """It has failed because a rank of it did not take part within a deadline."""


class DivergedError(GeneratorError):
    """Of a call: the weights give it logprobs that are not numbers. With other weights the engine goes on."""
