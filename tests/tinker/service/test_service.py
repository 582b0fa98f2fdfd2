"""Starting and closing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rl.tinker.errors import GoneError
from rl.tinker.service.limits import Limits
from rl.tinker.service.service import Service
from tests.support.fake_tinker_backend import (
    FakeTinkerBackend,
    forward_backward,
    new_model,
    prompt,
    running_service,
)
from tests.support.virtual_time import now_s, run_in_virtual_time


def test_close_wakes_whoever_waits_at_once_and_ends_within_its_time(tmp_path: Path) -> None:
    async def main() -> Any:
        backend = FakeTinkerBackend()
        service = Service(backend=backend, storage_folder=tmp_path, limits=Limits(close_timeout_s=5))
        await service.start()
        backend.hold("forward_backward")
        backend.hold("sample")
        model = new_model(service)
        sampling_id = service.sampling.create(model.partition(":")[0], 0, base_model="tiny", owner="local")
        requests = [
            forward_backward(service, model, 1, 1),  # runs and never ends
            forward_backward(service, model, 3, 3),
            service.sampling.sample(sampling_id, 0, prompt(1), owner="local").request_id,
        ]
        waiting = [
            asyncio.create_task(service.retrieve(request, owner="local", wait_s=1000)) for request in requests
        ]
        await asyncio.sleep(10)
        started_s = now_s()
        closing = [asyncio.create_task(service.close()) for _ in range(2)]
        done, _ = await asyncio.wait(waiting, timeout=0.5)
        woken_s = now_s() - started_s
        await asyncio.gather(*closing)
        await service.close()
        return [task.exception() for task in waiting], len(done), woken_s, now_s() - started_s, backend

    (errors, num_done, woken_s, took_s, backend), _ = run_in_virtual_time(main())
    assert num_done == 3
    assert woken_s == 0
    assert all(isinstance(error, GoneError) for error in errors)
    assert took_s <= 3 * 5
    assert not backend.is_open
    assert backend.is_idle


def test_a_closed_service_takes_nothing_on(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, _):
            model = new_model(service)
        for call in (
            lambda: service.sessions.create(owner="local"),
            lambda: new_model(service, session_id=model.partition(":")[0], number=1),
            lambda: forward_backward(service, model, 1, 1),
        ):
            with pytest.raises(GoneError):
                call()

    run_in_virtual_time(main())
