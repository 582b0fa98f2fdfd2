"""What a generator's calls fail with."""

from __future__ import annotations

from rl.errors import RunError


class GeneratorError(RunError):
    """The generator cannot serve: it has no weights, was closed, or its engine has failed."""


class GeneratorTimeoutError(GeneratorError, TimeoutError):
    """The engine has failed because a rank of it did not take part within a deadline."""


class DivergedError(GeneratorError):
    """Of a call: the weights give it logprobs that are not numbers. With other weights the engine goes on."""
