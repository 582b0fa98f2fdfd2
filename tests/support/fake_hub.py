"""Fake of the Hugging Face hub on the loopback: the requests that `huggingface_hub` makes to
download a model.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

COMMITS = {"main": "a" * 40, "v1.0": "b" * 40}
"""Commit of each revision of a model."""


class FakeHub(ThreadingHTTPServer):
    """Server of models by name; each has the files of a folder under the revisions of `COMMITS`."""

    daemon_threads = True

    def __init__(self, models: dict[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models = models
        self.requests: list[str] = []
        """Method and path of every request."""
        self.answers_after_s = 0.0
        self.gated: set[str] = set()
        """Models whose files are refused."""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes | Any]:
        """Return status, headers and body."""
        api, path = path.startswith("/api/models/"), path.removeprefix("/api/models/").strip("/")
        owner, repository, *rest = path.split("/")
        name = f"{owner}/{repository}"
        if name not in self.models:
            return 401, {"X-Error-Code": "RepoNotFound"}, {"error": "Repository not found"}
        if rest == ["refs"]:
            refs = [
                {"name": ref, "ref": ref, "targetCommit": commit} for ref, commit in COMMITS.items()
            ]
            return 200, {}, {"branches": refs[:1], "converts": [], "tags": refs[1:]}
        kind, revision, *file = rest or ["revision", "main"]
        commit = COMMITS.get(revision, revision)
        if commit not in COMMITS.values():
            return 404, {"X-Error-Code": "RevisionNotFound"}, {"error": "Invalid rev id"}
        folder = self.models[name]
        if api and kind == "tree":
            return (
                200,
                {},
                [_entry(path, folder) for path in sorted(folder.rglob("*")) if path.is_file()],
            )
        if api:
            files = [
                path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
            ]
            siblings = [
                {"rfilename": file, "size": (folder / file).stat().st_size} for file in files
            ]
            return 200, {}, {"id": name, "sha": commit, "siblings": siblings}
        if name in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, {"error": "Access is restricted"}
        content = (folder / "/".join(file)).read_bytes()
        return (
            200,
            {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit},
            content,
        )


def _entry(path: Path, folder: Path) -> dict[str, Any]:
    digest = hashlib.sha1(path.read_bytes()).hexdigest()
    name = path.relative_to(folder).as_posix()
    return {"type": "file", "path": name, "size": path.stat().st_size, "oid": digest}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def handle(self) -> None:
        with suppress(ConnectionError):  # the client has gone
            super().handle()

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        time.sleep(self.server.answers_after_s)
        status, headers, body = self.server.answer(path)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_HEAD = do_GET


@contextmanager
def fake_hub(models: dict[str, Path], *, cache: Path) -> Iterator[FakeHub]:
    """Serve models, and let `huggingface_hub` use this server and an own cache."""
    from huggingface_hub import constants

    with FakeHub(models) as hub, pytest.MonkeyPatch.context() as patch:
        url = f"http://127.0.0.1:{hub.server_port}"
        patch.setattr(constants, "ENDPOINT", url)
        patch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        thread = threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
