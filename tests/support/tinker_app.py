"""The HTTP application in this process, around a real service and a plain backend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from rl.tinker.http.app import make_app
from rl.tinker.http.auth import Keys
from rl.tinker.http.codec import MEDIA_TYPE
from rl.tinker.http.context import Context, HttpLimits
from rl.tinker.service.limits import Limits
from rl.tinker.service.service import Service
from tests.support.plain_backend import PlainBackend

ALICE, BOB = "tml-alice", "tml-bob"
DEADLINE_S = 30


@dataclass(kw_only=True)
class Served:
    app: FastAPI
    context: Context
    service: Service
    backend: PlainBackend
    http: httpx.AsyncClient
    """With Alice's key."""

    async def post(self, path: str, body: Any, *, key: str = ALICE, **headers: str) -> httpx.Response:
        return await self.http.post(f"/api/v1/{path}", json=body, headers={"x-api-key": key} | headers)

    async def get(self, path: str, *, key: str = ALICE) -> httpx.Response:
        return await self.http.get(f"/api/v1/{path}", headers={"x-api-key": key})

    async def ok(self, path: str, body: Any) -> Any:
        response = await self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    async def result(self, submitted: Any, **headers: str) -> httpx.Response:
        return await self.post("retrieve_future", {"request_id": submitted["request_id"]}, **headers)

    async def session(self) -> str:
        return (await self.ok("create_session", {"tags": []}))["session_id"]

    async def model(self, **fields: Any) -> str:
        """Of a session of its own, once it is there."""
        body = {"session_id": await self.session(), "model_seq_id": 0, "base_model": "plain"} | fields
        submitted = await self.ok("create_model", body)
        return (await self.result(submitted)).json()["model_id"]

    async def forward_backward(self, message: Any, *, key: str = ALICE) -> httpx.Response:
        return await self.http.post(
            "/api/v1/forward_backward",
            content=message.SerializeToString(),
            headers={"content-type": MEDIA_TYPE, "x-api-key": key},
        )


@asynccontextmanager
async def served(
    folder: Path, *, keys: Keys | None = None, limits: Limits | None = None, **http: Any
) -> AsyncIterator[Served]:
    backend = PlainBackend()
    service = Service(backend=backend, storage_folder=folder, limits=limits)
    context = Context(service=service, limits=replace(HttpLimits(), **http))
    app = make_app(context, keys=keys or Keys(), hosts=None)
    # As a real server does: what the application raises after its answer is not the client's matter.
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    await service.start()
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            yield Served(app=app, context=context, service=service, backend=backend, http=client)
    finally:
        backend.go_on.set()
        await service.close()


def run(folder: Path, scenario: Callable[[Served], Awaitable[None]], **settings: Any) -> None:
    """Serve, run a scenario against it and close, within a deadline; no task may be left."""

    async def once() -> None:
        async with asyncio.timeout(DEADLINE_S):
            async with served(folder, **settings) as server:
                await scenario(server)
            assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(once())
