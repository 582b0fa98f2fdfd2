"""All sinks of a run beside metrics.jsonl: what a person sees, and what other packages write.

async with open_sinks(SinksConfig(), folder=folder, title="try-1", num_steps=80) as sinks:
    with MetricsWriter(folder / METRICS) as metrics, sinks.attempt():
        loop = config.loop.build(sinks=[metrics, sinks], watch=sinks.watch, ...)
        await loop.run()
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rl.observability.activity import doing
from rl.observability.console import Console, ConsoleSink, NoConsole, is_terminal
from rl.observability.live import LiveConsole
from rl.observability.metrics import Record, read_metrics
from rl.observability.run_folder import METRICS, TENSORBOARD
from rl.observability.sinks.config import ConsoleConfig, SinksConfig, check_sinks
from rl.observability.sinks.delivery import Backend
from rl.observability.sinks.follower import Follower
from rl.observability.sinks.place import place_of
from rl.observability.sinks.tensorboard import TensorBoard
from rl.observability.sinks.trackio import Trackio
from rl.observability.sinks.wandb import Wandb
from rl.stop_request import StopAskedError
from rl.worker_thread import run_aside

SENT = "sinks"
"""Folder within a run's logs: what each sink was given."""
FINISH_SHARE = 0.8
"""Of the time to end that W&B has to send what is left, so that it can still end in order."""
AT_ONCE_S = 2.0
"""To end, of a run that is ended without being asked: by a second Ctrl-C."""

logger = logging.getLogger(__name__)


class RunSinks:
    """A sink of a loop, which hands records on; an async context manager, left when the run ends."""

    def __init__(
        self, *, console: Console, followers: Sequence[Follower], metrics: Path, close_s: float
    ) -> None:
        """
        Args:
            followers: are told of each record, and read it from `metrics`.
            metrics: metrics.jsonl.
            close_s: time that all followers together have to end.
        """
        self.console = console
        self.followers = followers
        self.num_failures = 0
        """Of the console; a follower counts its own."""
        self._metrics = metrics
        self._close_s = close_s

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Around a loop that runs: the file has the records that it goes on from."""
        records = read_metrics(self._metrics) if self._metrics.exists() else []
        keep = place_of(records[-1], records[-1]["step"]) if records else None
        for follower in self.followers:
            follower.begin(keep)
        with self._forgiving(partial(self.console.shown, records)):
            yield

    def write(self, record: Record) -> None:
        """A step's record, or an evaluation's, which is in metrics.jsonl already."""
        for follower in self.followers:
            follower.write(record)
        try:
            self.console.write(record)
        except Exception as error:  # noqa: BLE001  (a sink never stops training)
            self._console_failed(error)

    def watch(self, title: str, /) -> AbstractContextManager[object]:
        """Show that something long goes on."""
        return self._forgiving(partial(self.console.watch, title))

    @contextmanager
    def _forgiving(self, enter: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
        """Around something that goes on also where the console cannot show it."""
        console = ExitStack()
        try:
            console.enter_context(enter())
        except Exception as error:  # noqa: BLE001  (a sink never stops training)
            self._console_failed(error)
        try:
            yield
        except BaseException as error:
            self._leave(console, error)
            raise
        self._leave(console, None)

    def _leave(self, console: ExitStack, error: BaseException | None) -> None:
        try:
            if error is None:
                console.close()
            else:
                console.__exit__(type(error), error, error.__traceback__)
        except Exception as failed:  # noqa: BLE001  (a sink never stops training)
            if failed is not error:
                self._console_failed(failed)

    def _console_failed(self, error: Exception) -> None:
        self.num_failures += 1
        if self.num_failures == 1:
            logger.warning("the console shows no step: %r; training goes on", error, exc_info=error)

    async def close(self, *, failed: bool = False, limit_s: float = math.inf) -> None:
        """Let followers take what they have not yet, and end; what they lack is logged.

        `limit_s` is for all together, where it is less than the config says.
        """
        if not self.followers:
            return
        for follower in self.followers:
            follower.end(failed=failed)
        until = time.monotonic() + min(limit_s, self._close_s)

        def join() -> None:
            for follower in self.followers:
                follower.join(until - time.monotonic())

        with doing("waits for its sinks"):
            await run_aside(join, name="sinks")

    async def __aenter__(self) -> RunSinks:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        at_once = error is not None and not isinstance(error, Exception)  # cancelled
        failed = error is not None and not isinstance(error, StopAskedError)
        await self.close(failed=failed, limit_s=AT_ONCE_S if at_once else math.inf)


def open_sinks(
    config: SinksConfig,
    *,
    folder: Path,
    title: str,
    num_steps: int,
    settings: Mapping[str, Any] | None = None,
    logs: Path | None = None,
    stream: TextIO | None = None,
) -> RunSinks:
    """Those that the config names; nothing of them is opened before the first attempt.

    Args:
        folder: of the run: its metrics.jsonl is what is sent.
        title: of the run, for those who show several.
        num_steps: of the whole run.
        settings: its config, for those who keep it.
        logs: its logs; None: `folder`/logs.
        stream: of the console; None is standard output.

    Raises:
        ValueError: a package is missing, or what it needs.
    """
    check_sinks(config)
    logs = folder / "logs" if logs is None else logs
    backends: list[Backend] = []
    if config.tensorboard.enable:
        backends.append(TensorBoard(folder / TENSORBOARD))
    if config.wandb.enable:
        finish_s = FINISH_SHARE * config.close_s
        backends.append(
            Wandb(config.wandb, folder=folder, title=title, settings=settings or {}, finish_s=finish_s)
        )
    if config.trackio.enable:
        backends.append(Trackio(config.trackio, title=title, settings=settings or {}))
    metrics = folder / METRICS
    return RunSinks(
        console=make_console(config.console, num_steps=num_steps, logs=logs, title=title, stream=stream),
        followers=[
            Follower(b, metrics=metrics, sent=logs / SENT / f"{b.name}.json", write_s=config.write_s)
            for b in backends
        ],
        metrics=metrics,
        close_s=config.close_s,
    )


def make_console(
    config: ConsoleConfig, *, num_steps: int, logs: Path, title: str, stream: TextIO | None = None
) -> Console:
    """A live table where `stream` (None: standard output) is a terminal that can show one."""
    if config.style == "off":
        return NoConsole()
    if config.style == "auto" and is_terminal(stream):
        return LiveConsole(
            title=title, num_steps=num_steps, num_rows=config.num_rows, logs=logs, stream=stream
        )
    return ConsoleSink(stream=stream)
