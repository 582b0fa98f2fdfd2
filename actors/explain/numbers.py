"""Numbers as a reader sees them."""

from __future__ import annotations

from collections.abc import Sequence

NUM_LISTED = 6
"""Steps that are listed one by one; of more only the first and the last."""


def count(number: int) -> str:
    """With commas: 8,192."""
    return f"{number:,}"


def size(num_bytes: int) -> str:
    """To three digits, in the largest unit that it has one of: 2.38 MB."""
    for unit, of_unit in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= of_unit:
            digits = max(0, 3 - len(str(num_bytes // of_unit)))
            return f"{num_bytes / of_unit:.{digits}f} {unit}"
    return f"{num_bytes} bytes"


def steps_text(steps: Sequence[int]) -> str:
    """`step 80`, `steps 0, 20, 40`, or of many `steps 0, 20, 40, ... 1000`."""
    if len(steps) == 1:
        return f"step {steps[0]}"
    if len(steps) <= NUM_LISTED:
        return f"steps {', '.join(map(str, steps))}"
    return f"steps {', '.join(map(str, steps[:3]))}, ... {steps[-1]}"
