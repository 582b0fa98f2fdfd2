"""What Ctrl-C means while a loop hears a request to end."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from rl.stop_request import StopRequest


@contextlib.contextmanager
def asking_at_ctrl_c(stop: StopRequest) -> Iterator[None]:
    """The first Ctrl-C asks; whether or not it is heard, the next does what it would do without this."""
    otherwise = signal.getsignal(signal.SIGINT)
    if not callable(otherwise):  # ignored, as in a shell's background job
        yield
        return

    def on_sigint(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, otherwise)
        if not stop.ask():
            otherwise(number, frame)

    signal.signal(signal.SIGINT, on_sigint)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is on_sigint:
            signal.signal(signal.SIGINT, otherwise)
