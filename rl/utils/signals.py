"""Signals by which a user, a scheduler or a terminal ends a run."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a scheduler's end of the run, and the end of its terminal or ssh session."""
WAKE_UP = signal.SIGRTMIN + 6
"""Signal that nobody sends."""
REPEAT_S = 0.1
"""Time within which the same signal counts once: `timeout` sends it to the process and to its
group.
"""


@contextmanager
def handling_end_signals(
    on_signal: Callable[[int], None], *, loop: asyncio.AbstractEventLoop
) -> Iterator[None]:
    """Handle `END_SIGNALS` in this block, if this is the main thread.

    Signals that were ignored before stay so: SIGINT in a shell's background job, SIGHUP under
    nohup. The end of a terminal counts once, and not after Ctrl-C, because the kernel and the shell
    both tell it, and nobody is there to ask for a faster end.
    """
    before = {number: signal.getsignal(number) for number in END_SIGNALS}
    before = {
        number: handler for number, handler in before.items() if handler is not signal.SIG_IGN
    }
    if threading.current_thread() is not threading.main_thread():
        before.clear()
    last: tuple[int, float] | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal last
        now_s, earlier = time.monotonic(), last
        last = (number, now_s)
        if earlier is not None:
            is_repeated = earlier[0] == number and now_s - earlier[1] < REPEAT_S
            if number == signal.SIGHUP or is_repeated:
                return
        on_signal(number)

    for number in before:
        signal.signal(number, handle)
    if before:
        # With any handler of its own the loop wakes up for every signal, also for one that the
        # kernel gave to another thread of this process.
        loop.add_signal_handler(WAKE_UP, lambda: None)
    try:
        yield
    finally:
        loop.remove_signal_handler(WAKE_UP)
        for number, handler in before.items():
            signal.signal(number, handler)
