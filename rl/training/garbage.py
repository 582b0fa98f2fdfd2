"""Python's garbage collection at chosen moments.

A collection stops one process for a while, at a moment of its own; ranks that wait for each
other then wait for all of their collections, one after another.
"""

from __future__ import annotations

import gc
import logging
import time

from torch import Tensor

logger = logging.getLogger(__name__)


class GarbageCollector:
    """Collects after every n-th step and at no other time, until closed. Of the whole process."""

    def __init__(self, *, every_steps: int, debug: bool) -> None:
        """0 changes nothing."""
        self.every_steps = every_steps
        self.debug = debug
        self._enable_again = False
        if every_steps:
            self._enable_again = gc.isenabled()
            gc.disable()
            gc.collect()

    def after_step(self, step: int) -> None:
        """`step` is the number of steps done."""
        if self.every_steps and step % self.every_steps == 0:
            if self.debug:
                _collect_and_log(step)
            else:
                gc.collect()

    def close(self) -> None:
        """Leave collecting to Python again, if it was; idempotent."""
        if self._enable_again:
            gc.enable()
            self._enable_again = False


def _collect_and_log(step: int) -> None:
    started = time.perf_counter()
    flags = gc.get_debug()
    gc.set_debug(flags | gc.DEBUG_SAVEALL)  # keep what is found, to look at it
    try:
        num_objects = gc.collect()
        tensors = [found for found in gc.garbage if isinstance(found, Tensor)]
        num_tensors, num_bytes = len(tensors), sum(tensor.nbytes for tensor in tensors)
        del tensors
    finally:
        gc.garbage.clear()
        gc.set_debug(flags)
    gc.collect()
    logger.info(
        "garbage collection after step %d: %d objects in cycles, %d tensors of %d bytes among them, %.3f s",
        step, num_objects, num_tensors, num_bytes, time.perf_counter() - started,
    )  # fmt: skip
