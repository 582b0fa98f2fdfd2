"""Errors that end a run and are meant for the person who started it."""

from __future__ import annotations


class RunError(RuntimeError):
    """A run cannot go on; the message says why and needs no traceback beside it."""
