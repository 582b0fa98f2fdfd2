"""Python's garbage collection on all ranks at the same step.

A collection pauses one process at an unpredictable moment; ranks that wait for each other would wait for the
pauses of all ranks one after another.
"""

from __future__ import annotations

import gc
import logging
import time

logger = logging.getLogger(__name__)


class GarbageCollector:
    """Collects after every n-th step and at no other time until closed, in the whole process."""

    def __init__(self, *, every_steps: int, debug: bool) -> None:
        """
        Args:
            every_steps: 0 leaves collection to Python.
        """
        self.every_steps = every_steps
        self.debug = debug
        self._enable_again = bool(every_steps) and gc.isenabled()
        if every_steps:
            gc.disable()
            gc.collect()

    def after_step(self, step: int) -> None:
        """Collect if `step`, the number of steps done, is due."""
        if not self.every_steps or step % self.every_steps:
            return
        started = time.perf_counter()
        num_objects = gc.collect()
        if self.debug:
            took_s = time.perf_counter() - started
            logger.info("garbage collection after step %d: %d objects, %.3f s", step, num_objects, took_s)

    def close(self) -> None:
        """Re-enable Python's own collection if it was enabled before; idempotent."""
        if self._enable_again:
            gc.enable()
            self._enable_again = False
