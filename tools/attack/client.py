"""HTTP client of the attack, which counts what becomes of its calls."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tools.attack.bodies import PROTOBUF, Call

CALL_S = 120.0
"""Time for a call, and for all repetitions of one that has to succeed."""


@dataclass(kw_only=True, slots=True)
class Tally:
    """Answers of the server to one kind of call."""

    statuses: Counter[int | str] = field(default_factory=Counter)
    """Calls by status; "closed" where the connection ended without an answer."""
    longest_s: float = 0.0
    num_told: int = 0
    """Answers that name what another key has."""

    def count(self, first: str) -> int:
        """Return the number of calls whose status begins so: "2", "4", "5", "c" for closed."""
        number = 0
        for status, calls in self.statuses.items():
            if f"{status}".startswith(first):
                number += calls
        return number

    def format_row(self, name: str) -> str:
        total, closed = self.statuses.total(), self.count("c")
        by_status = f"{self.count('2'):9}{self.count('4'):9}{self.count('5'):6}{closed:8}"
        return f"{name:26}{total:9}{by_status}{self.longest_s:11.2f}"


class Client:
    """HTTP client that counts its answers by kind."""

    def __init__(self, http: aiohttp.ClientSession, tallies: defaultdict[str, Tally]) -> None:
        self._http, self.tallies = http, tallies

    async def call(self, kind: str, call: Call) -> tuple[int | str, bytes]:
        """Return status and body; without an answer the status is "closed"."""
        headers = {"Content-Type": call.content_type} | dict(call.headers or {})
        if call.key is not None:
            headers["X-API-Key"] = call.key
        began = time.monotonic()
        status: int | str
        try:
            async with self._http.request(
                call.method, call.path, data=call.body, headers=headers
            ) as answer:
                status, content = answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError, ConnectionError):
            status, content = "closed", b""
        tally = self.tallies[kind]
        tally.statuses[status] += 1
        tally.longest_s = max(tally.longest_s, time.monotonic() - began)
        return status, content

    async def call_and_wait(self, path: str, body: Any, *, key: str, kind: str) -> bytes:
        """Make a call that has to succeed, repeated as the official client does.

        Return its result, or its answer if it has none.
        """
        is_json = isinstance(body, dict)
        call = Call(
            path=path,
            body=json.dumps(body).encode() if is_json else body.SerializeToString(),
            content_type="application/json" if is_json else PROTOBUF,
            key=key,
        )
        content = await self._repeat(kind, call)
        request_id = json.loads(content).get("request_id")
        if request_id is None:
            return content
        asked = json.dumps({"request_id": request_id}).encode()
        return await self._repeat(kind, Call(path="retrieve_future", body=asked, key=key))

    async def _repeat(self, kind: str, call: Call) -> bytes:
        async with asyncio.timeout(CALL_S):
            while True:
                status, content = await self.call(kind, call)
                if status == 200:
                    return content
                # The server refuses for a while, or has no result yet: the official client repeats.
                if status not in (408, 429, "closed"):
                    raise RuntimeError(f"{call.path}: {status} {content[:300]!r}")
                await asyncio.sleep(0.05)
