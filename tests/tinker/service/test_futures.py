"""Results: waiting for them, keeping them, cancelling what makes them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rl.tinker.errors import BusyError, GoneError, InvalidRequestError, NotFoundError
from rl.tinker.service.limits import Limits
from rl.tinker.service.responses import Failure
from tests.support.fake_tinker_backend import (
    failure_of,
    forward_backward,
    new_model,
    prompt,
    result_of,
    running_service,
)
from tests.support.virtual_time import now_s, run_in_virtual_time


def test_retrieve_waits_as_long_as_it_is_told_and_all_who_wait_get_the_result(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, backend):
            gate = backend.hold("forward_backward")
            request = forward_backward(service, new_model(service), 1, 5)
            assert await service.retrieve(request, owner="local", wait_s=0) is None
            assert now_s() == 0
            assert await service.retrieve(request, owner="local", wait_s=20) is None
            assert now_s() == 20
            waiting = [asyncio.create_task(result_of(service, request)) for _ in range(3)]
            await asyncio.sleep(4)
            gate.set()
            results = await asyncio.gather(*waiting)
            return results, now_s()

    (results, time_s), _ = run_in_virtual_time(main())
    assert [result.metrics["loss:sum"] for result in results] == [5, 5, 5]
    assert time_s == 24


def test_a_result_is_kept_for_a_time_after_it_was_first_retrieved(
    tmp_path: Path,
) -> None:
    async def main() -> Any:
        async with running_service(tmp_path, limits=Limits(result_kept_s=60)) as (service, _):
            request = forward_backward(service, new_model(service), 1, 5)
            await asyncio.sleep(1000)
            first = await result_of(service, request)
            await asyncio.sleep(59)
            assert await result_of(service, request) is first
            await asyncio.sleep(2)
            with pytest.raises(GoneError, match="retrieved more than 60 s ago"):
                await result_of(service, request)

    run_in_virtual_time(main())


@pytest.mark.parametrize("limits", [Limits(results=3), Limits(result_bytes=3 * 4)])
def test_beyond_the_limit_results_are_forgotten_first_those_retrieved_then_the_oldest(
    tmp_path: Path, limits: Limits
) -> None:
    async def main() -> Any:
        async with running_service(tmp_path, limits=limits) as (service, _):
            model = new_model(service)
            await result_of(service, f"{model}:0")
            requests = [forward_backward(service, model, seq_id, seq_id) for seq_id in (1, 2, 3)]
            await asyncio.sleep(1)
            await result_of(service, requests[1])
            requests += [forward_backward(service, model, seq_id, seq_id) for seq_id in (4, 5)]
            await asyncio.sleep(1)
            kept = []
            for request in requests:
                try:
                    kept.append((await result_of(service, request)).metrics["loss:sum"])
                except GoneError:
                    kept.append(None)
            return kept

    kept, _ = run_in_virtual_time(main())
    assert kept == [None, None, 3, 4, 5]  # the second was retrieved, the first the oldest


def test_whoever_waits_gets_a_result_that_is_forgotten_at_once(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path, limits=Limits(results=1)) as (service, backend):
            gate = backend.hold("create_model")
            requests = [f"{new_model(service)}:0" for _ in range(3)]
            waiting = [asyncio.create_task(result_of(service, request)) for request in requests]
            await asyncio.sleep(1)
            gate.set()
            return requests, await asyncio.gather(*waiting)

    (requests, results), _ = run_in_virtual_time(main())
    assert [f"{result.model_id}:0" for result in results] == requests


def test_an_owner_has_no_more_waiting_requests_than_the_limit_and_others_do_not_count(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path, limits=Limits(waiting=2)) as (service, backend):
            gate = backend.hold("create_model")
            mine = new_model(service, owner="me")
            forward_backward(service, mine, 1, 1, owner="me")
            with pytest.raises(BusyError, match="limit waiting: with this request it would be 3, above 2"):
                forward_backward(service, mine, 2, 2, owner="me")
            new_model(service, owner="you")
            gate.set()
            await asyncio.sleep(1)
            return await result_of(service, forward_backward(service, mine, 2, 2, owner="me"), "me")

    result, _ = run_in_virtual_time(main())
    assert result.metrics["loss:sum"] == 2


def test_waiting_tensors_are_counted_in_bytes(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path, limits=Limits(waiting_bytes=40)) as (service, backend):
            backend.hold("forward_backward")
            model = new_model(service)
            forward_backward(service, model, 1, *range(8))
            with pytest.raises(
                BusyError, match="limit waiting_bytes: with this request it would be 44, above 40"
            ):
                forward_backward(service, model, 2, *range(3))
            forward_backward(service, model, 2, *range(2))

    run_in_virtual_time(main())


def test_a_request_is_its_owners_alone(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, _):
            request = forward_backward(service, new_model(service, owner="me"), 1, 5, owner="me")
            await result_of(service, request, "me")
            for unknown in (request, f"{request}1", "nonsense", ""):
                with pytest.raises(NotFoundError):
                    await service.retrieve(unknown, owner="you", wait_s=0)
                with pytest.raises(NotFoundError):
                    service.cancel(unknown, owner="you")

    run_in_virtual_time(main())


def test_a_request_of_an_earlier_process_is_gone_and_says_so(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, _):
            request = forward_backward(service, new_model(service), 1, 5)
        async with running_service(tmp_path) as (service, _):
            with pytest.raises(GoneError, match="ended with the process of the server"):
                await service.retrieve(request, owner="local", wait_s=0)
            with pytest.raises(GoneError, match="ended with the process of the server"):
                service.sessions.heartbeat(request.partition(":")[0], owner="local")

    run_in_virtual_time(main())


def test_a_cancelled_sample_ends_its_work_and_fails(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, backend):
            backend.hold("sample")
            session_id = service.sessions.create(owner="local")
            sampling_id = service.sampling.create(session_id, 0, base_model="tiny", owner="local")
            running, unstarted = [
                service.sampling.sample(sampling_id, seq_id, prompt(1), owner="local").request_id
                for seq_id in (0, 1)
            ]
            service.cancel(unstarted, owner="local")
            await asyncio.sleep(1)
            assert sum(backend.num_sampling.values()) == 1
            service.cancel(running, owner="local")
            failures = [await failure_of(service, request) for request in (running, unstarted)]
            await asyncio.sleep(1)
            service.cancel(running, owner="local")  # without effect
            return failures, sum(backend.num_sampling.values())

    (failures, num_sampling), _ = run_in_virtual_time(main())
    assert failures == [Failure(error="it was cancelled", category="user")] * 2
    assert num_sampling == 0


def test_training_cannot_be_cancelled(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, _):
            request = forward_backward(service, new_model(service), 1, 5)
            with pytest.raises(InvalidRequestError, match="only samples can be cancelled"):
                service.cancel(request, owner="local")

    run_in_virtual_time(main())
