"""Fake W&B server on the loopback for starting, resuming, logging and finishing runs."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from email.message import Message
from typing import Any

from tests.support.json_server import JsonServer

HISTORY = "wandb-history.jsonl"


@dataclass(kw_only=True, slots=True)
class PlayedRun:
    is_known: bool = False
    history: list[str] = field(default_factory=list)
    """Lines of JSON by file and line number."""
    exit_code: int | None = None


class PlayedServer(JsonServer):
    def __init__(self) -> None:
        super().__init__()
        self.runs: dict[str, PlayedRun] = {}

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the only run, without W&B's own fields."""
        (run,) = self.runs.values()
        rows = [json.loads(line) for line in run.history]
        return [{k: v for k, v in row.items() if not k.startswith("_")} for row in rows]

    def run(self, name: str) -> PlayedRun:
        return self.runs.setdefault(name, PlayedRun())

    def answer(self, method: str, path: str, body: bytes, headers: Message) -> tuple[int, Any]:
        if path.endswith("/graphql"):
            asked = json.loads(body)
            named = re.search(r"(?:query|mutation)\s+(\w+)", asked.get("query", ""))
            operation = asked.get("operationName") or (named[1] if named else "")
            return 200, {"data": self._data(operation, asked.get("variables") or {})}
        if path.endswith("/file_stream"):
            self._take(path.split("/")[-2], json.loads(body))
        return 200, {"limits": {}}

    def _data(self, operation: str, given: dict[str, Any]) -> dict[str, Any]:
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

    def _take(self, name: str, sent: dict[str, Any]) -> None:
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
