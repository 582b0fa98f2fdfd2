"""Python logging of one process, with time, level, role and rank on every line.

Records go to `logs/<role>-<rank>.log` in a run's folder, and from the console level up to the
console. Of libraries only errors reach the console.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TextIO

from rl.utils.errors import warn_unwritten
from rl.utils.files import BoundedFile
from rl.utils.printing import replace_controls, truncate

OUR_PACKAGES = ("rl", "actors", "losses", "configs", "__main__")

QUIET_ENVIRONMENT = {
    "VLLM_CONFIGURE_LOGGING": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    # On a GPU vLLM forces progress bars while it compiles: with this delay in seconds they never
    # show.
    "TQDM_DELAY": "86400",
    "FLASHINFER_LOGGING_LEVEL": "error",
    # vLLM binds memory to NUMA nodes on a CPU, and chooses cuBLASLt on a GPU, which both warn.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Environment that keeps libraries from adding log handlers and progress bars, set before their
import.
"""

MAX_RECORD_CHARS = 20_000
"""Longest record; the middle of a longer one is left out. Errors may quote whole replies of a
model.
"""
MAX_LOG_BYTES = 128_000_000
"""Largest size of a process's two log files together; a run that fails without end keeps its latest
records.
"""

_undo: Callable[[], None] | None = None


def setup_logging(
    role: str,
    *,
    rank: int = 0,
    folder: Path | None = None,
    console_level: int | str = logging.WARNING,
    console: TextIO | None = None,
) -> Callable[[], None]:
    """Set up logging in this process, for uncaught exceptions too.

    Returns a function that undoes the set-up. An earlier set-up is replaced. Records below INFO are
    kept only if `console_level` is lower.

    Args:
        folder: folder of `<role>-<rank>.log`; None writes no file.
        console: stream of the printed records; None is the current standard error.
    """
    global _undo
    if _undo is not None:
        _undo()
    formatter = _LineFormatter(role, rank=rank)
    printed = _ConsoleHandler(console)
    printed.setLevel(console_level)
    # Our records, and errors of libraries.
    printed.addFilter(
        lambda r: r.levelno >= logging.ERROR or r.name.partition(".")[0] in OUR_PACKAGES
    )
    handlers: list[logging.Handler] = [printed]
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        handlers.append(_FileHandler(folder / f"{role}-{rank}.log"))
    root = logging.getLogger()
    level, hook, thread_hook = root.level, sys.excepthook, threading.excepthook
    for handler in handlers:
        handler.setFormatter(formatter)
        root.addHandler(handler)
    root.setLevel(min(logging.INFO, printed.level))
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda args: _log_uncaught(
        args.exc_type, args.exc_value, args.exc_traceback
    )

    def undo() -> None:
        global _undo
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(level)
        logging.captureWarnings(False)
        sys.excepthook, threading.excepthook = hook, thread_hook
        _undo = None

    _undo = undo
    return undo


class _LineFormatter(logging.Formatter):
    """Formatter that prefixes every line, also of tracebacks, with time, level, role and rank."""

    default_msec_format = "%s.%03d"

    def __init__(self, role: str, *, rank: int) -> None:
        super().__init__()
        self.source = f"{role}[{rank}]"

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"{self.formatTime(record)} {record.levelname:<8} {self.source} {record.name}: "
        text = truncate(super().format(record), most=MAX_RECORD_CHARS)
        # Replies of a model and names in files are among the records.
        return "\n".join(prefix + replace_controls(line) for line in text.splitlines() or [""])


class _ConsoleHandler(logging.StreamHandler[TextIO]):
    """Handler for the current standard error, which a progress bar may replace."""

    def __init__(self, console: TextIO | None) -> None:
        logging.Handler.__init__(self)
        self._console = console

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return self._console or sys.stderr


class _FileHandler(logging.Handler):
    """Handler that appends to a file.

    Records that the disk refuses are lost, and a warning says so once. The older half of a long log
    is `<role>-<rank>.1.log`.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = BoundedFile(path, max_bytes=MAX_LOG_BYTES)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            with warn_unwritten(self._file.path):
                self._file.append(self.format(record) + "\n")
        except Exception:  # noqa: BLE001
            # A record that cannot be formatted; every logging handler does this.
            self.handleError(record)

    def close(self) -> None:
        self._file.close()
        super().close()


def _log_uncaught(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error or kind(), trace)
    elif error is not None and not issubclass(kind, SystemExit):
        name = threading.current_thread().name
        logging.getLogger(__name__).critical(
            "uncaught exception in %s", name, exc_info=(kind, error, trace)
        )
