"""Server process on a free port, and the unmodified official client to call it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tinker

from tests.support.runs import restore_ctrl_c

ROOT = Path(__file__).parents[2]
END_TIMEOUT_S = 30.0
RESULT_TIMEOUT_S = 60.0
"""Time limit for one result."""


class ServerProcess:
    def __init__(
        self, process: subprocess.Popen[str], *, url: str, log: Path, storage: Path
    ) -> None:
        self.process = process
        self.url = url
        self.storage = storage
        self._log = log
        self._clients: list[tinker.ServiceClient] = []

    @property
    def log(self) -> str:
        """Return the server's stderr so far."""
        return self._log.read_text()

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and return the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(END_TIMEOUT_S)

    def client(self, key: str = "tml-test") -> tinker.ServiceClient:
        self._clients.append(tinker.ServiceClient(base_url=self.url, api_key=key))
        return self._clients[-1]

    def close_clients(self) -> None:
        """Close the clients, which would otherwise go on sending heartbeats and log errors."""
        for client in self._clients:
            if self.process.poll() is None:
                with contextlib.suppress(
                    tinker.TinkerError, TimeoutError
                ):  # its session may be gone
                    client.close("success").result(END_TIMEOUT_S)
            elif client._session_holder is not None:
                client._session_holder.close()  # `close` would retry for minutes


@contextmanager
def server_process(storage: Path, *options: str) -> Iterator[ServerProcess]:
    """Start a server with the config `tiny` and options; kill it at the end of the block if it
    still runs.
    """
    # The client reads this variable when it is created.
    os.environ["TINKER_TELEMETRY"] = "0"
    log = storage.with_name(f"{storage.name}.log")
    with log.open("a") as stderr:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "rl.tinker.server",
                *("--port", "0", "--storage_folder", str(storage)),
                *options,
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            preexec_fn=restore_ctrl_c,
        )
    try:
        server = ServerProcess(process, url=_url(process, log), log=log, storage=storage)
        try:
            yield server
        finally:
            server.close_clients()
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(END_TIMEOUT_S)
        assert process.stdout is not None
        process.stdout.close()


def _url(process: subprocess.Popen[str], log: Path) -> str:
    """Return the address that the server prints once it is ready; a server that ends prints
    none.
    """
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.fullmatch(r"serving the Tinker API at (http://\S+)\n", line)
    assert found is not None, f"{line!r}\n{log.read_text()}"
    return found[1]
