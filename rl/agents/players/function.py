"""The process of an agent that is a Python function: calls it once, keeps its value, and ends.

A fork of the guard of the play, which has all modules of the function. It has its own environment,
working folder, event loop and session, so that it can do whatever a program of its own could.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from rl.agents.players.oom import be_killed_first
from rl.utils.compat import exit_at_once
from rl.utils.descendants import is_killed_with
from rl.utils.nesting import MAX_VALUE_DEPTH, exceeds_depth

MAX_VALUE_BYTES = 256 * 1024
"""Longest JSON text of a value that is kept."""


def run_function(
    function: Callable[[Any], Any],
    argument: bytes,
    *,
    env: Mapping[str, str],
    output: int,
    value: int,
    guard: int,
) -> NoReturn:
    """Call the function in this process, a child of the guard, and end with its exit status.

    Args:
        argument: pickled.
        env: variables beside those of this process.
        output: descriptor that becomes stdout and stderr.
        value: descriptor of the file for the JSON text of what the function returns.
        guard: pid of the guard, with which this process ends.
    """
    status = 1
    try:
        if is_killed_with(guard):
            _become_program(env, output=output)
            status = _call(function, argument, value=value)
    except BaseException:  # noqa: BLE001  (reported here: nobody is above)
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        # Not by `sys.exit`: the return is the agent's end, and a thread that hangs must not delay
        # it.
        exit_at_once(status)


def _become_program(env: Mapping[str, str], *, output: int) -> None:
    """Give this process what a program of its own would have."""
    be_killed_first()
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)

    for stream in (sys.stdout, sys.stderr):
        # By lines, as the rest is lost when the process is killed; before the descriptors change,
        # as the position in the owner's file is asked for. A module may have replaced the stream.
        with suppress(Exception):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(output)

    os.environ.update(env)
    # What modules remember of the process that imported them. Python's own random numbers are
    # seeded anew by a fork; numpy's would be the same in all plays.
    tempfile.tempdir = None
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    gc.enable()


def _call(function: Callable[[Any], Any], argument: bytes, *, value: int) -> int:
    """Return the exit status, as the Python interpreter would for a program."""
    try:
        result = function(pickle.loads(argument))
        if inspect.isawaitable(result):
            result = asyncio.run(_wait_for(result))
        _keep(result, file=value)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            # The kernel keeps the lowest byte.
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001  (foreign code)
        # Without the frame of this function.
        trace = error.__traceback__
        traceback.print_exception(error.with_traceback(trace and trace.tb_next))
        return 1
    return 0


async def _wait_for(awaitable: Any) -> Any:
    return await awaitable


def write_value(value: Any) -> bytes:
    """Return the JSON text of a value; raise an error for a value that cannot be kept."""
    text = json.dumps(value).encode()
    if exceeds_depth(value):
        raise ValueError(f"it is nested deeper than {MAX_VALUE_DEPTH} levels")
    return text


def _keep(value: Any, *, file: int) -> None:
    """Write the JSON text of a value, or say on stderr why there is none."""
    try:
        text = write_value(value)
        if len(text) > MAX_VALUE_BYTES:
            raise ValueError(f"{len(text)} bytes of JSON, at most {MAX_VALUE_BYTES}")
        os.pwrite(file, text, 0)
    except Exception as error:  # noqa: BLE001  (a foreign value; also a limit of the file's size)
        # No error of the agent's: frameworks return objects of their own.
        reason = f"{type(error).__name__}: {error}"
        print(f"relay: the value that the agent returned is not kept ({reason})", file=sys.stderr)
