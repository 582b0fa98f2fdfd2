"""Random states of a process, whatever it has imported: controller, generators and reward functions.

The trainer's ranks have theirs in the tensors of a checkpoint (`rl.distributed.seeds`). Nothing is imported
here that the process has not imported itself, and no device is touched that it has not used.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol


class RandomStates(Protocol):
    """Random states of other processes, by a name that the same process has in another start of the run."""

    async def random_states(self) -> dict[str, bytes]:
        """Of those that answer in time; the others are left out."""
        ...

    async def restore_random_states(self, states: Mapping[str, bytes]) -> None:
        """Set those of the processes that are there; other names are passed over."""
        ...


def process_states() -> bytes:
    """States of the generators of Python, numpy and PyTorch, as far as they are imported here."""
    states: dict[str, Any] = {"python": random.getstate()}
    # A thread may be in the middle of importing one of them: then it has drawn nothing yet.
    with suppress(AttributeError):
        if (numpy := sys.modules.get("numpy")) is not None:
            states["numpy"] = numpy.random.get_state()
    with suppress(AttributeError):
        if (torch := sys.modules.get("torch")) is not None:
            states["torch"] = torch.get_rng_state()
            if torch.cuda.is_initialized():
                states["cuda"] = torch.cuda.get_rng_state()
    # Each for itself: to unpickle one imports what it is of.
    return pickle.dumps({name: pickle.dumps(state) for name, state in states.items()})


def restore_process_states(packed: bytes) -> None:
    """Set what `process_states` returned, as far as it is imported here too."""
    states: dict[str, bytes] = pickle.loads(packed)
    random.setstate(pickle.loads(states["python"]))
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(pickle.loads(states["numpy"]))
    if (torch := sys.modules.get("torch")) is not None:
        if "torch" in states:
            torch.set_rng_state(pickle.loads(states["torch"]))
        if "cuda" in states and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(pickle.loads(states["cuda"]))
