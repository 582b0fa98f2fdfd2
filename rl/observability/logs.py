"""Python logging of one process: every line says when, how bad, which role and which rank.

A run's folder gets `logs/<role>-<rank>.log`; what is at least as bad as the console level is also
printed. Libraries may fill the file, but only their errors reach the console.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TextIO

from rl.observability.whole_lines import WholeLines

OUR_PACKAGES = ("rl", "actors", "losses", "configs", "__main__")

QUIET_ENVIRONMENT = {
    "VLLM_CONFIGURE_LOGGING": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""For a process that is about to import these libraries: no handlers or bars of their own."""


def setup_logging(
    role: str,
    *,
    rank: int = 0,
    folder: Path | None = None,
    console_level: int | str = logging.WARNING,
    console: TextIO | None = None,
) -> Callable[[], None]:
    """Send this process's log records where they belong, uncaught exceptions included.

    Replaces an earlier set-up of this process. Records below INFO are kept only if `console_level`
    is lower.

    Args:
        role: `controller`, `trainer`, `generator`, `reward`.
        rank: Within the role.
        folder: Where `<role>-<rank>.log` is appended to; None writes no file.
        console_level: Records from this level up are printed too, for example "INFO".
        console: None is the standard error of the moment.

    Returns:
        A function that undoes it.
    """
    _undo_last()
    formatter = _LineFormatter(role, rank=rank)
    printed = _ConsoleHandler(console)
    printed.setLevel(console_level)
    printed.addFilter(_is_for_console)
    handlers: list[logging.Handler] = [printed]
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        handlers.append(_FileHandler(folder / f"{role}-{rank}.log", console=printed))
    root = logging.getLogger()
    level, hook, thread_hook = root.level, sys.excepthook, threading.excepthook
    for handler in handlers:
        handler.setFormatter(formatter)
        root.addHandler(handler)
    root.setLevel(min(logging.INFO, printed.level))
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread

    def undo() -> None:
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(level)
        logging.captureWarnings(False)
        sys.excepthook, threading.excepthook = hook, thread_hook
        _undo.clear()

    _undo.append(undo)
    return undo


_undo: list[Callable[[], None]] = []
"""Of the set-up in force, if there is one."""


def _undo_last() -> None:
    for undo in _undo:
        undo()


class _LineFormatter(logging.Formatter):
    """Puts time, level, role and rank before every line, those of a traceback too."""

    default_msec_format = "%s.%03d"

    def __init__(self, role: str, *, rank: int) -> None:
        super().__init__()
        self.source = f"{role}[{rank}]"

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"{self.formatTime(record)} {record.levelname:<8} {self.source} {record.name}: "
        return "\n".join(prefix + line for line in super().format(record).splitlines() or [""])


class _ConsoleHandler(logging.StreamHandler[TextIO]):
    """Writes to the standard error of the moment, which a progress bar replaces while it is shown."""

    def __init__(self, console: TextIO | None) -> None:
        logging.Handler.__init__(self)
        self._console = console

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return self._console or sys.stderr


class _FileHandler(logging.Handler):
    """Appends to a log file; what the disk does not take is lost, and said once on the console."""

    def __init__(self, path: Path, *, console: logging.Handler) -> None:
        super().__init__()
        self._file = WholeLines(path)
        self._console = console
        self._fails = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._file.append(self.format(record) + "\n")
            self._fails = False
        except OSError as error:
            if not self._fails:
                self._fails = True
                self._warn(error)
        except Exception:  # noqa: BLE001  (a record that cannot be formatted, as any handler of logging does)
            self.handleError(record)

    def close(self) -> None:
        self._file.close()
        super().close()

    def _warn(self, error: OSError) -> None:
        why = error.strerror or str(error)
        text = f"{self._file.path} was not written: {why}; all goes on, and what fits later is written"
        self._console.handle(
            logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, args=None, exc_info=None)
        )


def _is_for_console(record: logging.LogRecord) -> bool:
    """Ours at any level, those of libraries from ERROR up."""
    return record.levelno >= logging.ERROR or record.name.partition(".")[0] in OUR_PACKAGES


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    logging.getLogger(__name__).critical("uncaught exception", exc_info=(kind, error, trace))


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is None or issubclass(args.exc_type, SystemExit):
        return
    name = args.thread.name if args.thread else "a thread"
    logging.getLogger(__name__).critical(
        "uncaught exception in %s", name, exc_info=(args.exc_type, args.exc_value, args.exc_traceback)
    )
