"""End of a server process by a signal."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
from collections.abc import Iterator

from rl.utils.compat import exit_at_once
from rl.utils.processes import handle_end_signals

END_TIMEOUT_S = 40.0
"""Time from the stop signal to the forced end of the process."""


@contextlib.contextmanager
def stop_on_signals() -> Iterator[asyncio.Event]:
    """Yield an event that the first of `END_SIGNALS` sets.

    A process that does not end in time prints its stacks and exits; a second signal ends it at
    once, as `kill -9` does.
    """
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    is_asked = False

    def handle(number: int) -> None:
        nonlocal is_asked
        if is_asked:
            exit_at_once(128 + number)
        is_asked = True
        # This handler may run between any two lines of the loop's own thread.
        loop.call_soon_threadsafe(stop.set)
        faulthandler.dump_traceback_later(END_TIMEOUT_S, exit=True)

    with handle_end_signals(handle, loop=loop):
        yield stop
