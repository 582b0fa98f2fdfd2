"""Agents of `benchmarks.agents` that ask once, in a module as small as those of users.

Each episode is a fork of the process that has imported it: a fork of a process with PyTorch in its
memory takes three times as long.
"""

from __future__ import annotations

import http.client
import json
import os
from typing import Any


def ask(problem: Any) -> None:
    """Ask once."""
    _request(problem, is_streamed=False)


def ask_streamed(problem: Any) -> None:
    """Ask once, and read the reply as a stream."""
    _request(problem, is_streamed=True)


def _request(problem: Any, *, is_streamed: bool) -> None:
    host, _, place = os.environ["OPENAI_BASE_URL"].removeprefix("http://").partition("/")
    body = {
        "model": "any",
        "messages": [{"role": "user", "content": problem.question}],
        "stream": is_streamed,
    }
    connection = http.client.HTTPConnection(host, timeout=600)
    connection.request("POST", f"/{place}/chat/completions", json.dumps(body))
    answer = connection.getresponse()
    content = answer.read()
    if answer.status != 200:
        raise RuntimeError(content.decode())
