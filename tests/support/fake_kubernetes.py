"""HTTP server for the part of the Kubernetes API that creates, reads and deletes custom
resources.
"""

from __future__ import annotations

import json
from email.message import Message
from pathlib import Path
from typing import Any

from tests.support.json_server import JsonServer


class KubernetesServer(JsonServer):
    """Fake cluster: `resources` by path, and `requests` as (method, path)."""

    def __init__(self) -> None:
        super().__init__()
        self.resources: dict[str, Any] = {}
        self.requests: list[tuple[str, str]] = []

    def kubeconfig(self, folder: Path) -> Path:
        """Write a kubeconfig for this server and return its path."""
        path = folder / "kubeconfig"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.url}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "users": [{"name": "test", "user": {}}],
        }
        path.write_text(json.dumps(config))
        return path

    def answer(self, method: str, path: str, body: bytes, headers: Message) -> tuple[int, Any]:
        self.requests.append((method, path))
        if method == "POST":
            resource = json.loads(body)
            self.resources[f"{path}/{resource['metadata']['name']}"] = resource
            return 200, resource
        found = self.resources.get(path)
        if method == "DELETE":
            self.resources.pop(path, None)
        return (404, {"kind": "Status", "code": 404}) if found is None else (200, found)
