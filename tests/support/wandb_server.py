"""Fake W&B server on the loopback for starting, resuming, logging and finishing runs."""

from __future__ import annotations

import json
import re
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HISTORY = "wandb-history.jsonl"


@dataclass(kw_only=True, slots=True)
class PlayedRun:
    is_known: bool = False
    history: list[str] = field(default_factory=list)
    """Lines of JSON by file and line number."""
    exit_code: int | None = None


class PlayedServer:
    def __init__(self) -> None:
        self.runs: dict[str, PlayedRun] = {}
        server = self

        class Handler(_Handler):
            played = server

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> PlayedServer:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the only run, without W&B's own fields."""
        (run,) = self.runs.values()
        rows = [json.loads(line) for line in run.history]
        return [{k: v for k, v in row.items() if not k.startswith("_")} for row in rows]

    def run(self, name: str) -> PlayedRun:
        return self.runs.setdefault(name, PlayedRun())

    def answer(self, operation: str, given: dict[str, Any]) -> dict[str, Any]:
        """Answer one GraphQL operation."""
        entity = {"id": "E", "name": "team"}
        if operation == "RunResumeStatus":
            model = {"id": "M", "name": given["project"], "entity": entity}
            return {"model": model | {"bucket": self._bucket(given["name"])}}
        if operation == "UpsertBucket":
            name = given["name"]
            self.run(name).is_known = True
            project = {"id": "P", "name": given["project"], "entity": entity}
            bucket = {"id": f"B-{name}", "name": name, "config": "{}", "project": project}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/file/{name}"} for name in given["files"]]
            return {"createRunFiles": {"runID": "R", "uploadHeaders": [], "files": files}}
        return {}

    def take(self, name: str, sent: dict[str, Any]) -> None:
        """Store a run's file stream."""
        run = self.run(name)
        if history := sent.get("files", {}).get(HISTORY):
            run.history[history["offset"] :] = history["content"]
        if sent.get("complete"):
            run.exit_code = sent.get("exitcode")

    def _bucket(self, name: str) -> dict[str, Any] | None:
        run = self.run(name)
        if not run.is_known:
            return None
        tails = {"historyTail": json.dumps(run.history[-1:]), "eventsTail": "[]"}
        counts = {"historyLineCount": len(run.history), "logLineCount": 0, "eventsLineCount": 0}
        about = {"id": f"B-{name}", "name": name, "summaryMetrics": "{}", "config": "{}", "tags": []}
        return {**about, **counts, **tails, "wandbConfig": '{"t": 1}'}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    played: PlayedServer

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""

    def handle(self) -> None:
        with suppress(ConnectionError):  # the client has gone
            super().handle()

    def do_GET(self) -> None:
        self._send({})

    def do_PUT(self) -> None:
        self._body()
        self._send({})

    def do_POST(self) -> None:
        body = json.loads(self._body() or b"{}")
        if self.path.endswith("/graphql"):
            named = re.search(r"(?:query|mutation)\s+(\w+)", body.get("query", ""))
            operation = body.get("operationName") or (named[1] if named else "")
            self._send({"data": self.played.answer(operation, body.get("variables") or {})})
        else:
            if self.path.endswith("/file_stream"):
                self.played.take(self.path.split("/")[-2], body)
            self._send({"limits": {}})

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def _send(self, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
