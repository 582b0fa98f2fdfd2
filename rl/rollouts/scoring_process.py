"""The process that calls reward functions: sync ones in its main thread, async ones in an event loop.

What goes over the link, each as a frame (number of the call, length, pickle):

    to the process      RubricCall
                        StatesCall
    from the process    READY once; for each call BEGAN, when its functions are called, and its CallResult;
                        for a StatesCall the random states of the process, at once

That a call began is told before anything of somebody else's code runs, so that who started the process knows
what it was at when it ends or hangs.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import struct
import threading
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from rl.random_states import process_states, restore_process_states
from rl.rollouts.rubric import Rubric, RubricCall
from rl.rollouts.rubric_functions import CallResult, Concurrency, shown
from rl.rollouts.scoring_limit import MainThreadLimit, result_within

HEADER = struct.Struct("<QQ")
READY, BEGAN = "ready", "began"


@dataclass(frozen=True, kw_only=True, slots=True)
class StatesCall:
    """Asks for the random states of the process."""

    restored: bytes | None = None
    """Set before."""


def frame(call_id: int, message: Any) -> bytes:
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(call_id, len(payload)) + payload


def serve(link: socket.socket, rubric: Rubric, time_limit_s: float, max_concurrency: int) -> None:
    """The process's main thread; the process ends when the other end of the link is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle.
    _Process(link=link, rubric=rubric, time_limit_s=time_limit_s, max_concurrency=max_concurrency).run()


class _Process:
    def __init__(
        self, *, link: socket.socket, rubric: Rubric, time_limit_s: float, max_concurrency: int
    ) -> None:
        self._link = link
        self._rubric = rubric
        self._time_limit_s = time_limit_s
        self._sending = threading.Lock()
        self._sync: SimpleQueue[tuple[int, RubricCall]] = SimpleQueue()
        self._loop = asyncio.new_event_loop() if rubric.has_async_functions else None
        self._concurrency = Concurrency(max_concurrency)
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self) -> None:
        limits = MainThreadLimit(self._time_limit_s)
        if self._loop is not None:
            threading.Thread(
                target=self._run_loop, args=(self._loop,), name="async rewards", daemon=True
            ).start()
        threading.Thread(target=self._read, name="link", daemon=True).start()
        self._send(0, READY)
        while True:
            call_id, call = self._sync.get()
            self._send(call_id, BEGAN)
            made = result_within(self._rubric, call, limits=limits, time_limit_s=self._time_limit_s)
            self._send(call_id, made)

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.run_forever()
        finally:  # A task that a reward function started raised SystemExit: there is no loop any more.
            os._exit(1)

    def _read(self) -> None:
        """Take calls until the parent is gone; then whatever still runs is for nobody."""
        try:
            with self._link.makefile("rb") as incoming:
                while len(header := incoming.read(HEADER.size)) == HEADER.size:
                    call_id, length = HEADER.unpack(header)
                    self._take(call_id, incoming.read(length))
        finally:
            os._exit(0)

    def _take(self, call_id: int, payload: bytes) -> None:
        try:
            call = pickle.loads(payload)
        except Exception as error:  # noqa: BLE001  (a class of somebody else's, in a rollout)
            self._send(call_id, CallResult(failure=f"the scoring process cannot read it: {shown(error)}"))
            return
        if isinstance(call, StatesCall):
            if call.restored is not None:
                restore_process_states(call.restored)
            self._send(call_id, process_states())
            return
        if not self._rubric.is_async(call):
            self._sync.put((call_id, call))
            return
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._start, call_id, call)

    def _start(self, call_id: int, call: RubricCall) -> None:
        assert self._loop is not None
        task = self._loop.create_task(self._overlap(call_id, call))
        self._tasks.add(task)  # The loop itself holds tasks weakly.
        task.add_done_callback(self._tasks.discard)

    async def _overlap(self, call_id: int, call: RubricCall) -> None:
        limit_s = self._time_limit_s * len(call.rollouts)
        async with self._concurrency.place(self._rubric.criterion(call.names[0])):
            self._send(call_id, BEGAN)
            made = await self._rubric.async_result(call, limit_s=limit_s)
        self._send(call_id, made)

    def _send(self, call_id: int, message: Any) -> None:
        with self._sending:
            self._link.sendall(frame(call_id, message))
