"""Server on the loopback that speaks JSON, for fakes of services: a subclass says what it
answers.
"""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class JsonServer(ThreadingHTTPServer):
    """Server that runs within a `with` block."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def answer(self, method: str, path: str, body: bytes, headers: Message) -> tuple[int, Any]:
        """Return status and body; a text is sent as HTML, anything else as JSON."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: JsonServer

    def handle(self) -> None:
        with suppress(ConnectionError):  # the client has gone
            super().handle()

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""

    def _respond(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, answer = self.server.answer(self.command, self.path, body, self.headers)
        is_text = isinstance(answer, str)
        data = (answer if is_text else json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html" if is_text else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("retry-after-ms", "1")
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_DELETE = _respond
