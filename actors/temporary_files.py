"""A folder for a run's temporary files that is removed however the run ends.

Monarch, vLLM and multiprocessing keep sockets in TMPDIR, which stay behind when a process is killed. During a
run TMPDIR is a folder of the controller, /tmp/relay-tmp-ab12cd34, which a guard removes once the controller has
ended.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from actors.guard import Guard

PREFIX = "relay-tmp-"
MAX_PATH = 45
"""Characters of the folder's path: the sockets in it are limited to 107 characters."""
GUARD_NAME = "temporary-files"
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"


@contextmanager
def temporary_files() -> Iterator[None]:
    """Point TMPDIR at a folder that ends with this process, for this process and the processes it starts.

    The folder is made in the current TMPDIR, or in /tmp if that path is too long for sockets.
    """
    # Compiled kernels are for later runs too: their cache is not in the folder.
    cache = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
    folder, _ = _guarded_folder()
    settings = {"TMPDIR": folder, INDUCTOR_CACHE: os.environ.get(INDUCTOR_CACHE, cache)}
    before, python_before = {name: os.environ.get(name) for name in settings}, tempfile.tempdir
    os.environ.update(settings)
    tempfile.tempdir = folder
    try:
        yield
    finally:
        tempfile.tempdir = python_before
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@functools.cache
def _guarded_folder() -> tuple[str, Guard]:
    """Make this process's folder: one for all its runs, as Monarch's client keeps its sockets from run to run."""
    # The cache also keeps the guard: its pipe must stay open until this process ends.
    parent = Path(tempfile.gettempdir())
    if len(str(parent / f"{PREFIX}12345678")) > MAX_PATH:
        parent = Path("/tmp")
    folder = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
    return folder, Guard(functools.partial(shutil.rmtree, folder, ignore_errors=True), name=GUARD_NAME)
