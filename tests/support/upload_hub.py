"""Fake of the Hugging Face hub on the loopback: the requests of `HfApi` that upload a model."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest

COMMIT = "c" * 40
TOKEN = "hf_of_a_test"


class UploadHub(ThreadingHTTPServer):
    """Server that keeps the files of each repository in memory."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        """Files of each repository by path."""
        self.private: dict[str, bool] = {}
        self.licenses: dict[str, str] = {}
        """License of each model that others have uploaded."""
        self.tokens: set[str] = set()
        """Values of the header Authorization."""
        self.refuses_with: int | None = None
        """Status with which a new repository is refused."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Return status and JSON of the answer."""
        if (method, path) == ("POST", "/api/repos/create"):
            return self._create(json.loads(body))
        if method == "GET" and (match := re.fullmatch(r"/api/models/([^/]+/[^/]+)", path)):
            return self._describe(match[1])
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/agent-harnesses":  # the library asks which program it is used by
            return 404, {"error": "Not found"}
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main", path)
        assert match is not None, f"{method} {path}"
        name, kind = match.groups()
        if kind == "preupload":
            files = json.loads(body)["files"]
            modes = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files
            ]
            return 200, {"files": modes}
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                value = entry["value"]
                self.files[name][value["path"]] = base64.b64decode(value["content"])
        return 200, {"commitUrl": f"{self.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT}

    def _create(self, wanted: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.refuses_with is not None:
            return self.refuses_with, {"error": "You may not do this"}
        name = f"{wanted['organization']}/{wanted['name']}"
        url = {"url": f"{self.url}/{name}"}
        if name in self.files:
            return 409, url
        self.files[name] = {}
        self.private[name] = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        return 200, url

    def _describe(self, name: str) -> tuple[int, dict[str, Any]]:
        if name in self.licenses:
            return 200, {"id": name, "sha": COMMIT, "cardData": {"license": self.licenses[name]}}
        if name not in self.files:
            return 404, {"error": "Repository not found"}
        return 200, {"id": name, "sha": COMMIT, "private": self.private[name]}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: UploadHub

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""

    def do_GET(self) -> None:
        body = self._read_body()
        self.server.tokens.add(self.headers.get("Authorization", ""))
        status, content = self.server.answer(self.command, urlsplit(self.path).path, body)
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body


@contextmanager
def upload_hub() -> Iterator[UploadHub]:
    """Serve uploads, and let `huggingface_hub` use this server with a token."""
    from huggingface_hub import constants

    with UploadHub() as hub, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setenv("HF_TOKEN", TOKEN)
        thread = threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
