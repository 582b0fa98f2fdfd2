"""HTTP server for the part of the Kubernetes API that creates, reads and deletes custom resources."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Cluster(ThreadingHTTPServer):
    """Fake cluster: `resources` by path, and `requests` as (method, path)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.resources: dict[str, Any] = {}
        self.requests: list[tuple[str, str]] = []

    def kubeconfig(self, folder: Path) -> Path:
        """Write a kubeconfig for this server and return its path."""
        path = folder / "kubeconfig"
        server = f"http://127.0.0.1:{self.server_address[1]}"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": server}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "users": [{"name": "test", "user": {}}],
        }
        path.write_text(json.dumps(config))
        return path


class _Handler(BaseHTTPRequestHandler):
    server: Cluster

    def do_GET(self) -> None:
        self._answer(self.server.resources.get(self.path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.resources[f"{self.path}/{body['metadata']['name']}"] = body
        self._answer(body)

    def do_DELETE(self) -> None:
        self._answer(self.server.resources.pop(self.path, None))

    def _answer(self, body: Any) -> None:
        self.server.requests.append((self.command, self.path))
        found = body is not None
        text = json.dumps(body if found else {"kind": "Status", "code": 404}).encode()
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def cluster() -> Iterator[Cluster]:
    with Cluster() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
