"""Workers of `run_ranks` of which one rank dies."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Literal

Death = Literal["kill", "crash", "exit"]


def die(how: Death) -> int:
    """Rank 1 does; the others answer."""
    if os.environ["RANK"] != "1":
        return 0
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "crash":
        read_address_zero()
    os._exit(3)


def read_address_zero() -> None:
    ctypes.string_at(0)
