"""Private functions of the Python interpreter (3.11 and 3.12), and the reason for each.

`threading._shutdown`, `atexit._run_exitfuncs`: taking the interpreter apart takes 2.0 s once vllm
is imported (2026-11-22, 2 cores of an AMD EPYC, no GPU). No public function ends a process properly
without that.

`asyncio.tasks._all_tasks` (3.11), `_scheduled_tasks` and `_eager_tasks` (3.12): `asyncio.all_tasks`
returns the tasks of one event loop only, and a process that hangs may have several.

`os._exit` is documented; it is here because its name looks private.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn


def exit_process(status: int) -> NoReturn:
    """End this process like `sys.exit`, but without finalising objects.

    Non-daemon threads are joined, `atexit` handlers run, and standard output and error are flushed;
    the kernel frees the memory.
    """
    # In the interpreter's own order; `multiprocessing` ends its children through the same two
    # functions.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a broken pipe, or a closed stream
            stream.flush()
    os._exit(status)


def exit_after(main: Callable[[], int]) -> NoReturn:
    """Exit with the status of a program's main function, also if nobody reads its output."""
    try:
        status = main()
    except SystemExit as end:  # of a parser of options
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    exit_process(status)


def exit_at_once(status: int) -> NoReturn:
    """End this process without any cleanup, for a forked child.

    `sys.exit` would run the handlers and flush the buffers that the child has inherited.
    """
    os._exit(status)


def list_tasks() -> list[asyncio.Task[Any]]:
    """Return the asyncio tasks of all event loops of this process."""
    tasks: list[asyncio.Task[Any]] = []
    for name in ("_all_tasks", "_scheduled_tasks", "_eager_tasks"):
        tasks += getattr(asyncio.tasks, name, ())
    return tasks
