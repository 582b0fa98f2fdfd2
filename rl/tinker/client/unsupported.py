"""What the official client can ask for and this one cannot do."""

from __future__ import annotations


def refuse(name: str, value: object, *, only: object, why: str) -> None:
    """Raises ValueError unless `value` is `only`."""
    if value != only:
        raise ValueError(f"{name}={value!r} is not supported here ({why}): must be {only!r}")
