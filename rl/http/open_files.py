"""Open files and connections of server processes; imports no web framework."""

from __future__ import annotations

import resource

OPEN_FILES = 16_384
"""Open files that a server process asks for."""
MAX_CONNECTIONS = 4096
"""Open connections. A client waits for up to 2,000 samples on as many connections."""


def raise_open_files() -> None:
    """Raise this process's soft limit on open files, often 1,024, within its hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < (most := min(OPEN_FILES, hard)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def limit_connections(num_files: int | None = None) -> int:
    """Return the limit on open connections; the other half of the process's files is for
    checkpoints and processes.

    Args:
        num_files: files that the process may open; None: this process.
    """
    if num_files is None:
        num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return min(MAX_CONNECTIONS, num_files // 2)
