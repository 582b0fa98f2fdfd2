"""The agent that is a Python function, imported; errors say what its module does too early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rl.utils.errors import list_causes
from rl.utils.user_code import load_function

EARLY_CLIENT = (
    "the module makes its client when it is imported, before an episode has its URL and key: make "
    "it in the function"
)
WITHOUT_KEY = "Could not resolve authentication method"
"""Words of the anthropic package at the first request of a client that was made without a key."""


def load_agent_function(place: str) -> Callable[[Any], Any]:
    """Return the function at a place.

    Raises:
        ValueError: as `load_function`; says so if a client at the top of the module is the reason.
    """
    try:
        return load_function(place)
    except ValueError as error:
        if any(map(_is_of_client, list_causes(error))):
            raise ValueError(f"{EARLY_CLIENT}; {error}") from error
        raise


def _is_of_client(error: BaseException) -> bool:
    """Return whether an error is that of a client without a key.

    Errors of requests are subclasses.
    """
    package, name = type(error).__module__.partition(".")[0], type(error).__name__
    return (package, name) in (("openai", "OpenAIError"), ("anthropic", "AnthropicError"))
