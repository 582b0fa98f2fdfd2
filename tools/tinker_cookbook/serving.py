"""The server that the recipes run against, in a process of its own: a user's, with one tiny base model."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.tinker.http.server import TinkerServer
from rl.tinker.local.backend import LocalBackend
from rl.tinker.local.base import Base
from tools.tinker_cookbook.model import WarmStart, base_folder
from tools.tinker_cookbook.processes import ProcessError, running, wait_until

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "outputs" / "tinker_cookbook"
API_KEY = "tml-" + "local-cookbook-run"
"""Any one does: the server has none configured and listens on loopback only."""
START_S = 180.0
ANSWER_S = 30.0


def cookbook() -> TinkerServer.Config:
    """The warm-started model, named by its folder: that is what the recipes open a tokenizer from."""
    folder = str(base_folder(CACHE, WarmStart()))
    return TinkerServer.Config(
        description="a tiny Qwen3 that adds up, for the cookbook's recipes",
        backend=LocalBackend.Config(bases=(Base.Config(name=folder, folder=folder),)),
        port=0,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    url: str

    def checkpoints(self) -> list[str]:
        """The `tinker://` paths of all that are there."""
        request = urllib.request.Request(
            f"{self.url}/api/v1/checkpoints?limit=1000", headers={"X-API-Key": API_KEY}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            content: dict[str, Any] = json.load(answer)
        return [checkpoint["tinker_path"] for checkpoint in content["checkpoints"]]


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """A server on a free port, with its storage and log in `folder`.

    Raises:
        ProcessError: it does not start.
    """
    log = folder / "server.log"
    argv = [
        sys.executable, "-m", "rl.tinker.server", "--module", "tools.tinker_cookbook.serving",
        "--config", "cookbook", "--storage_folder", str(folder / "storage"),
    ]  # fmt: skip
    with running(argv, log=log, cwd=ROOT, environment={"PYTHONPATH": str(ROOT)}) as process:
        wait_until(
            lambda: _served_at(log) is not None,
            process=process,
            what="the server's start",
            deadline_s=START_S,
            log=log,
        )
        url = _served_at(log)
        assert url is not None
        yield Server(url=url)
        if process.poll() is not None:
            raise ProcessError(f"the server ended by itself with status {process.returncode}: {log}")


def _served_at(log: Path) -> str | None:
    found = re.search(r"^serving the Tinker API at (\S+)$", log.read_text(errors="replace"), re.MULTILINE)
    return found[1] if found else None
