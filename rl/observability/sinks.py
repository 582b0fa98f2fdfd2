"""Metrics of a run beside metrics.jsonl: the console, TensorBoard, Weights & Biases, trackio and
Prometheus.

    async with open_sinks(SinksConfig(), folder=folder, title="try-1", num_steps=80) as sinks:
        with MetricsWriter(folder / METRICS) as metrics, sinks.show_attempt():
            loop = config.loop.build(sinks=[metrics, sinks], watch=sinks.console.watch, ...)
            await loop.run()

Each package's logger runs in a thread with a bounded queue, so that a logger that fails or hangs
neither stops nor delays training. A resumed run continues the loggers' records by step number; the
records that a logger has lost are in metrics.jsonl.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import queue
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rl.config.configurable import unless
from rl.config.tree import check_bounds
from rl.observability.console import Console, ConsoleConfig, make_console
from rl.observability.loggers import (
    MetricsLogger,
    TensorBoardConfig,
    TensorBoardLogger,
    TrackioConfig,
    TrackioLogger,
    WandbConfig,
    WandbLogger,
    keep_error_hooks,
)
from rl.observability.metrics import Record, read_metrics, reduce_record
from rl.observability.prometheus import (
    PACKAGE,
    PrometheusConfig,
    PrometheusLogger,
    check_port,
)
from rl.observability.run_folder import LOGS, METRICS, TENSORBOARD
from rl.observability.spans import span
from rl.observability.watcher import FindingsWatcher, FindNow
from rl.utils.errors import StopRequestedError, warn_unwritten
from rl.utils.extras import describe_install
from rl.utils.threads import WorkerThread, run_in_thread

RUN_ID = "sinks/run_id"
"""File in a run's logs with the id under which W&B and trackio know the run."""
MAX_QUEUED = 1000
FINISH_SHARE = 0.8
"""Part of `close_s` that W&B may use, so that it can still end in order."""
CANCELLED_CLOSE_S = 2.0
"""Time to close after a second Ctrl-C."""

logger = logging.getLogger(__name__)


# Config


@dataclass(kw_only=True, slots=True)
class SinksConfig:
    """Destinations of a run's metrics beside metrics.jsonl, which is always written."""

    console: ConsoleConfig = field(default_factory=ConsoleConfig)
    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    trackio: TrackioConfig = field(default_factory=TrackioConfig)
    prometheus: PrometheusConfig = field(default_factory=PrometheusConfig)
    close_s: float = field(default=30.0, metadata=unless("enabled", ()))
    """Seconds that the loggers have at the end of the run to write what is left; the rest is
    dropped.
    """

    def __post_init__(self) -> None:
        check_bounds(self, "close_s", above=0, below=math.inf)

    @property
    def enabled(self) -> tuple[str, ...]:
        """Names of the enabled loggers."""
        names = ("tensorboard", "wandb", "trackio", "prometheus")
        return tuple(name for name in names if getattr(self, name).enable)


def check_installed(config: SinksConfig) -> None:
    """Raise a ValueError if a package of an enabled logger is not installed; import nothing."""
    for name in config.enabled:
        package_name, option, off = name, f"{name}.enable=True", "False"
        if name == PrometheusLogger.name:
            package_name, option, off = PACKAGE, f"{name}.port={config.prometheus.port}", "None"
        package = importlib.util.find_spec(package_name)
        # A folder of that name, such as W&B's in the working directory, is a package without a
        # file.
        if package is None or package.origin is None:
            raise ValueError(
                f"sinks.{option}: the package {package_name} is not installed. Install the extra "
                f"`sinks` ({describe_install('sinks')}), or set it to {off}"
            )


def check_sinks(config: SinksConfig) -> None:
    """Raise a ValueError if a package or W&B's key is missing, or a port is in use."""
    check_installed(config)
    if config.prometheus.enable:
        check_port(config.prometheus)
    if config.wandb.enable and config.wandb.mode == "online":
        import wandb

        with keep_error_hooks():
            wandb.setup(wandb.Settings(silent=True))
            has_key = wandb.login(prompt=False, verify=False)
        if not has_key:
            raise ValueError(
                "sinks.wandb.mode='online': there is no key for W&B. Run `wandb login`, set "
                "WANDB_API_KEY, or choose offline"
            )


# Loggers in threads


class QueuedLogger:
    """Logger in a thread behind a bounded queue, so that it never delays a step.

    After an error the logger is opened again with the next record.
    """

    def __init__(self, metrics_logger: MetricsLogger, *, max_queued: int = MAX_QUEUED) -> None:
        self.name = metrics_logger.name
        self._num_given = self._num_taken = 0
        self._logger = metrics_logger
        self._last_step: int | None = None
        self._is_open = False
        self._has_warned = False
        self._thread = WorkerThread(f"sink-{self.name}", max_queued=max_queued)

    @property
    def num_lost(self) -> int:
        """Number of records that the logger has not taken, or not yet."""
        return self._num_given - self._num_taken

    def begin(self, last_step: int | None) -> None:
        """Start the logger, or let it continue after this step."""
        self._submit(self._open, last_step)

    def write(self, record: Record) -> None:
        """Queue a record; return at once."""
        self._num_given += 1
        self._submit(self._write, reduce_record(record))

    def end(self, *, failed: bool) -> None:
        """Close the logger after the queued records."""
        self._submit(partial(self._logger.close, failed=failed))

    def join(self, timeout_s: float) -> None:
        """Wait for the thread, and log what its logger lacks."""
        has_ended = self._thread.stop(timeout_s=timeout_s)
        if not has_ended or self.num_lost:
            # What its thread reports from now on is no news.
            self._has_warned = True
            state = "has not taken everything" if has_ended else "was not done when the run ended"
            logger.warning(
                "%s %s: it lacks %d records, which are in %s",
                self.name,
                state,
                self.num_lost,
                METRICS,
            )

    def _submit(self, job: Callable[..., None], *args: Any) -> None:
        try:
            self._thread.submit(self._run_job, job, *args)
        except queue.Full:
            self._warn("hangs or is too slow")

    def _run_job(self, job: Callable[..., None], *args: Any) -> None:
        """Run a job in the thread. Nobody waits for its result, so its error is reported here."""
        try:
            job(*args)
        except BaseException as error:  # noqa: BLE001  (a logger never stops training)
            self._is_open = False
            self._warn(f"failed: {type(error).__name__}: {error}")

    def _open(self, last_step: int | None) -> None:
        self._last_step = last_step
        self._logger.open(last_step)
        self._is_open = True

    def _write(self, record: dict[str, float]) -> None:
        # It failed before, or could not be opened.
        if not self._is_open:
            with suppress(Exception):
                self._logger.close(failed=True)
            self._open(self._last_step)

        # W&B takes one row for each of its steps; a step and its evaluation are two rows.
        is_evaluation = any(name.startswith("eval/") for name in record)
        step = int(record.pop("step"))
        self._logger.write(step, record, row=2 * step + is_evaluation)
        self._last_step = step
        self._num_taken += 1

    def _warn(self, text: str) -> None:
        # Once: a server that is down would fail at every step.
        level = logging.INFO if self._has_warned else logging.WARNING
        self._has_warned = True
        logger.log(
            level, "%s %s; training goes on, and %s has all metrics", self.name, text, METRICS
        )


# All sinks of a run


class RunSinks:
    """Sink that hands records to the console and the loggers.

    An async context manager around the run.
    """

    def __init__(
        self, *, console: Console, loggers: Sequence[QueuedLogger], metrics: Path, close_s: float
    ) -> None:
        """`close_s` is the time that all loggers together have to close."""
        self.console = console
        self.loggers = loggers
        self._metrics = metrics
        self._close_s = close_s

    @contextmanager
    def show_attempt(self) -> Iterator[None]:
        """Show a loop that continues after the records of metrics.jsonl."""
        records = read_metrics(self._metrics)
        for each in self.loggers:
            each.begin(int(records[-1]["step"]) if records else None)
        with self.console.show(records):
            yield

    def write(self, record: Record) -> None:
        """Hand on the record of a step or an evaluation."""
        for each in self.loggers:
            each.write(record)
        self.console.write(record)

    async def __aenter__(self) -> RunSinks:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let the loggers take the queued records and close, for at most `close_s`."""
        # Ctrl-C is no failure: W&B would mark the run as failed.
        failed = error is not None and not isinstance(error, StopRequestedError)
        for each in self.loggers:
            each.end(failed=failed)

        # After a second Ctrl-C somebody waits at the terminal.
        is_cancelled = error is not None and not isinstance(error, Exception)
        close_s = min(CANCELLED_CLOSE_S, self._close_s) if is_cancelled else self._close_s
        deadline_s = time.monotonic() + close_s

        def join() -> None:
            for each in self.loggers:
                each.join(deadline_s - time.monotonic())

        if self.loggers:
            with span("waits for its sinks"):
                await run_in_thread(join, name="sinks")


def open_sinks(
    config: SinksConfig,
    *,
    folder: Path,
    title: str,
    num_steps: int,
    settings: Mapping[str, Any] | None = None,
    stream: TextIO | None = None,
    follow: Callable[[], FindNow] | None = None,
) -> RunSinks:
    """Return the sinks that the config enables, which `check_sinks` has checked.

    No logger is opened before the first attempt. Dashboards show the title, and the run's config as
    the settings.

    Args:
        follow: returns the function that finds what looks wrong in the run, for the console; None:
            nobody looks.
    """
    logs, values = folder / LOGS, dict(settings or {})
    loggers: list[MetricsLogger] = []
    if config.tensorboard.enable:
        loggers.append(TensorBoardLogger(folder / TENSORBOARD))
    if config.wandb.enable or config.trackio.enable:
        # A resumed run continues its record there under the same id.
        run_id = _load_run_id(logs)
    if config.wandb.enable:
        run = {"id": run_id, "name": title, "dir": str(folder), "config": values}
        loggers.append(WandbLogger(config.wandb, finish_s=FINISH_SHARE * config.close_s, **run))
    if config.trackio.enable:
        loggers.append(TrackioLogger(config.trackio, title=title, run_id=run_id, settings=values))
    if config.prometheus.enable:
        loggers.append(PrometheusLogger(config.prometheus, title=title))
    console = make_console(
        config.console, num_steps=num_steps, logs=logs, title=title, stream=stream
    )
    if follow is not None and config.console.style != "off":
        # In a thread like the loggers: what it reads and counts must not delay a step.
        loggers.append(FindingsWatcher(follow=follow, show=console.show_findings))
    return RunSinks(
        console=console,
        loggers=[QueuedLogger(each) for each in loggers],
        metrics=folder / METRICS,
        close_s=config.close_s,
    )


def _load_run_id(logs: Path) -> str:
    """Return the id of the run, which is made once; on a full disk, for this process only."""
    file, run_id = logs / RUN_ID, uuid.uuid4().hex
    with warn_unwritten(file):
        if file.exists():
            return file.read_text().strip() or run_id
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(run_id)
    return run_id
