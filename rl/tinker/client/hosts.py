"""Which backends run in this process: clients of the same one share it, and it ends with the last of them."""

from __future__ import annotations

import copy
import importlib
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl.config.configurable import Configurable
from rl.tinker.backend import Backend
from rl.tinker.client.host import Host
from rl.tinker.client.progress import Progress

CONFIGS = "tinker"
"""The registry module whose functions' names are names of backends."""
DEFAULT_STORAGE = Path("outputs/tinker")


@dataclass(kw_only=True, slots=True, eq=False)
class _Running:
    backend: Backend | Configurable.Config | str
    storage_folder: Path
    host: Host
    num_clients: int = field(default=0)

    def is_of(self, backend: Backend | Configurable.Config | str, folder: Path) -> bool:
        if self.storage_folder != folder:
            return False
        if isinstance(backend, str | Configurable.Config):
            return type(self.backend) is type(backend) and self.backend == backend
        return self.backend is backend


_running: list[_Running] = []
_lock = threading.Lock()


def acquire(
    backend: Backend | Configurable.Config | str | None,
    storage_folder: str | Path | None,
    progress: bool | None,
) -> Host:
    """The host of this backend, started if it is not running. `release` it as often.

    `backend` None: the one that is running.

    Raises:
        ValueError: no such backend, or None while not exactly one is running; or it cannot start.
    """
    with _lock:
        found = _find(backend, storage_folder)
        if found is None:
            assert backend is not None
            folder = _folder(storage_folder)
            built = make_backend(backend)
            host = Host(backend=built, storage_folder=folder, progress=Progress(shown=progress))
            # A config is a value: the caller may edit his own afterwards.
            kept = copy.deepcopy(backend) if isinstance(backend, Configurable.Config) else backend
            found = _Running(backend=kept, storage_folder=folder, host=host)
            _running.append(found)
            _close_at_exit()
        found.num_clients += 1
        return found.host


def _find(
    backend: Backend | Configurable.Config | str | None, storage_folder: str | Path | None
) -> _Running | None:
    _running[:] = [running for running in _running if not running.host.is_closed]
    if backend is None:
        if storage_folder is not None:
            raise ValueError(f"storage_folder={str(storage_folder)!r} is given, but no backend that uses it")
        if len(_running) != 1:
            raise ValueError(
                f"backend=None means the one that is running, and {len(_running) or 'none'} are: give the "
                "name of one ('tiny'), its config, or a Backend"
            )
        return _running[0]
    folder = _folder(storage_folder)
    for running in _running:
        if running.is_of(backend, folder):
            return running
        if running.backend is backend and not isinstance(backend, str | Configurable.Config):
            raise ValueError(
                f"storage_folder={str(folder)!r}: this backend is running already, with "
                f"{str(running.storage_folder)!r}"
            )
    return None


def _folder(storage_folder: str | Path | None) -> Path:
    return Path(DEFAULT_STORAGE if storage_folder is None else storage_folder).absolute()


def make_backend(backend: Backend | Configurable.Config | str) -> Backend:
    """Of a backend's config or a server's, or the name of one.

    Raises:
        ValueError: it is none.
        ConfigError: an unknown name; the text lists the others.
    """
    if isinstance(backend, str):
        registry = importlib.import_module("rl.config.registry")
        backend = registry.resolve(CONFIGS, backend).config
    built: Any = backend
    if isinstance(backend, Configurable.Config):
        of_server: Configurable.Config | None = getattr(backend, "backend", None)
        built = (of_server or backend).build()
    missing = [
        name for name in ("base_models", "start", "forward_backward", "sample") if not hasattr(built, name)
    ]
    if missing:
        raise ValueError(
            f"backend={backend!r} has no {', '.join(missing)}: must be a Backend, its config, or the name of "
            "a config"
        )
    return built


def release(host: Host) -> None:
    """One client less; after the last the host is closed, which this waits for."""
    with _lock:
        found = next((running for running in _running if running.host is host), None)
        if found is None:
            return
        found.num_clients -= 1
        if found.num_clients:
            return
        _running.remove(found)
    host.close()


def running_host() -> Host:
    """The one that is running; nothing is to be released.

    Raises:
        ValueError: not exactly one is.
    """
    with _lock:
        found = _find(None, None)
        assert found is not None
        return found.host


def close_all() -> None:
    """At the interpreter's end."""
    with _lock:
        hosts = [running.host for running in _running]
        _running.clear()
    for host in hosts:
        host.close()


def _leave_to_parent() -> None:
    """In a process that was just forked: threads do not come along, and locks are as they were."""
    global _lock
    _lock = threading.Lock()
    for running in _running:
        running.host.leave_to_parent()
    _running.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
_registered = False


def _close_at_exit() -> None:
    """Before the interpreter waits for threads: those of a backend end when it is closed.

    What is registered last is called first, so this comes before thread pools refuse new work.
    """
    global _registered
    if not _registered:
        _registered = True
        threading._register_atexit(close_all)  # type: ignore[attr-defined]
