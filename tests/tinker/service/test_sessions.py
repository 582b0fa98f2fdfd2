"""What a session holds, and what ends with it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rl.tinker.errors import GoneError, InvalidRequestError, LimitReachedError, NotFoundError
from rl.tinker.service.limits import Limits
from tests.support.fake_tinker_backend import (
    failure_of,
    forward_backward,
    new_model,
    prompt,
    result_of,
    running_service,
)
from tests.support.virtual_time import run_in_virtual_time


def test_a_finished_session_frees_its_models_and_samplers_and_fails_what_waits(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, backend):
            session_id = service.sessions.create(owner="local")
            model = new_model(service, session_id=session_id)
            snapshot = service.training.save_sampler(
                model, 1, None, sampling_session_seq_id=0, owner="local"
            ).request_id
            sampling_id = (await result_of(service, snapshot)).sampling_session_id
            gate = backend.hold("forward_backward")
            backend.hold("sample")
            running = forward_backward(service, model, 2, 2)
            waiting = forward_backward(service, model, 3, 3)
            sample = service.sampling.sample(sampling_id, 0, prompt(1), owner="local").request_id
            await asyncio.sleep(1)

            service.sessions.finish(session_id, owner="local")
            service.sessions.finish(session_id, owner="local")
            failures = [await failure_of(service, request) for request in (waiting, sample)]
            for call in (
                lambda: forward_backward(service, model, 4, 4),
                lambda: service.sessions.heartbeat(session_id, owner="local"),
                lambda: service.sampling.info(sampling_id, owner="local"),
                lambda: new_model(service, session_id=session_id, number=1),
            ):
                with pytest.raises(GoneError):
                    call()
            assert model in backend.weights  # what runs is finished first
            gate.set()
            finished = await result_of(service, running)
            await asyncio.sleep(1)
            return failures, finished, backend.weights, backend.samplers

    (failures, finished, weights, samplers), _ = run_in_virtual_time(main())
    assert all("was finished" in failure.error and failure.category == "user" for failure in failures)
    assert finished.metrics["loss:sum"] == 2
    assert weights == {}
    assert samplers == {}


def test_a_session_that_nobody_is_heard_of_ends_and_any_call_about_it_keeps_it(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path, limits=Limits(session_timeout_s=60)) as (service, backend):
            model = new_model(service)
            session_id = model.partition(":")[0]
            for call in (
                lambda: service.sessions.heartbeat(session_id, owner="local"),
                lambda: service.training.info(model, owner="local"),
                lambda: forward_backward(service, model, 1, 1),
            ):
                await asyncio.sleep(50)
                call()
            await asyncio.sleep(50)
            await service.retrieve(f"{model}:1", owner="local", wait_s=0)
            await asyncio.sleep(50)
            assert service.sessions.list(owner="local").items == (session_id,)
            await asyncio.sleep(11)
            with pytest.raises(GoneError):
                service.sessions.heartbeat(session_id, owner="local")
            await asyncio.sleep(1)
            return service.sessions.list(owner="local").total, backend.weights

    (num_left, weights), _ = run_in_virtual_time(main())
    assert num_left == 0
    assert weights == {}


def test_results_of_an_ended_session_are_kept_no_longer_than_retrieved_ones(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path, limits=Limits(result_kept_s=60)) as (service, backend):
            gate = backend.hold("forward_backward")
            model = new_model(service)
            requests = [f"{model}:0", *(forward_backward(service, model, seq, seq) for seq in (1, 2))]
            await asyncio.sleep(1)
            service.sessions.finish(model.partition(":")[0], owner="local")
            await asyncio.sleep(1)
            gate.set()
            await asyncio.sleep(59 - 1)
            kept = [await service.retrieve(requests[0], owner="local", wait_s=0)]
            await asyncio.sleep(10)
            for request in requests:
                with pytest.raises(GoneError):
                    await service.retrieve(request, owner="local", wait_s=0)
            return kept

    kept, _ = run_in_virtual_time(main())
    assert kept[0].model_id.endswith(":train:0")


def test_sessions_are_their_owners_alone(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, _):
            mine = service.sessions.create(owner="me", tags=["a"], user_metadata={"b": 1}, display_name="run")
            model = new_model(service, session_id=mine, owner="me")
            for call in (
                lambda: service.sessions.heartbeat(mine, owner="you"),
                lambda: service.sessions.finish(mine, owner="you"),
                lambda: service.sessions.info(mine, owner="you"),
                lambda: new_model(service, session_id=mine, number=1, owner="you"),
                lambda: forward_backward(service, model, 1, 1, owner="you"),
                lambda: service.training.info(model, owner="you"),
                lambda: service.training.unload(model, owner="you"),
                lambda: service.sampling.create(mine, 0, base_model="tiny", owner="you"),
            ):
                with pytest.raises(NotFoundError, match="there is no"):
                    call()
            assert service.sessions.list(owner="you").items == ()
            return mine, model, service.sessions.info(mine, owner="me")

    (mine, model, info), _ = run_in_virtual_time(main())
    assert (info.session_id, info.tags, info.user_metadata, info.display_name) == (
        mine,
        ("a",),
        {"b": 1},
        "run",
    )
    assert info.model_ids == (model,)


def test_limits_of_sessions_and_models_name_themselves_and_are_free_again_afterwards(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path, limits=Limits(sessions=2, models=1)) as (service, _backend):
            first = service.sessions.create(owner="me")
            service.sessions.create(owner="me")
            with pytest.raises(LimitReachedError, match="limit sessions: 2"):
                service.sessions.create(owner="me")
            service.sessions.create(owner="you")

            model = new_model(service, session_id=first, owner="me")
            with pytest.raises(LimitReachedError, match="limit models: 1"):
                new_model(service, session_id=first, number=1, owner="me")
            await result_of(service, service.training.unload(model, owner="me").request_id, "me")
            new_model(service, session_id=first, number=1, owner="me")
            service.sessions.finish(first, owner="me")
            service.sessions.create(owner="me")
            await asyncio.sleep(1)

    run_in_virtual_time(main())


def test_lists_are_paged_the_newest_first(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, _):
            ids = [service.sessions.create(owner="me") for _ in range(5)]
            some = service.sessions.list(owner="me", offset=1, limit=2)
            assert (some.items, some.total) == ((ids[3], ids[2]), 5)
            with pytest.raises(InvalidRequestError, match="offset is -1"):
                service.sessions.list(owner="me", offset=-1)

    run_in_virtual_time(main())


@pytest.mark.parametrize("metadata", [{"a": object()}, {"a": float("nan")}, {"a": "x" * 100}])
def test_metadata_are_json_of_limited_size(tmp_path: Path, metadata: dict) -> None:
    async def main() -> Any:
        async with running_service(tmp_path, limits=Limits(metadata_bytes=100)) as (service, _):
            with pytest.raises(InvalidRequestError, match="the metadata"):
                service.sessions.create(owner="me", user_metadata=metadata)

    run_in_virtual_time(main())
