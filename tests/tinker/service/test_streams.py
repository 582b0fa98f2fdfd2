"""Order, repetitions and gaps of one model's requests, in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl.tinker.errors import BusyError, GoneError, InvalidRequestError
from rl.tinker.messages import ForwardBackwardOutput, OptimStepOutput
from rl.tinker.service.limits import Limits
from rl.tinker.service.responses import Failure
from tests.support.fake_tinker_backend import (
    failure_of,
    forward_backward,
    new_model,
    optim_step,
    result_of,
    running_service,
)
from tests.support.virtual_time import now_s, run_in_virtual_time


def test_chunks_that_come_in_any_order_run_in_the_order_of_their_seq_ids(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, backend):
            model = new_model(service)
            requests = [optim_step(service, model, 4)]
            requests += [forward_backward(service, model, seq_id, seq_id) for seq_id in (3, 2, 1)]
            step, *_ = [await result_of(service, request) for request in requests]
            return step, backend.calls[:5]

    (step, calls), _ = run_in_virtual_time(main())

    assert isinstance(step, OptimStepOutput)
    assert step.metrics["weight"] == -(1 + 2 + 3)
    assert calls == [
        "create_model 0",
        *(f"forward_backward 0 [{i}]" for i in (1, 2, 3)),
        "optim_step 0",
    ]


def test_a_repeated_request_is_the_same_one_and_done_once(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, backend):
            model = new_model(service)
            first = forward_backward(service, model, 1, 5)
            assert forward_backward(service, model, 1, 7) == first  # waits
            await result_of(service, first)
            assert forward_backward(service, model, 1, 7) == first  # is done
            result = await result_of(service, first)
            assert isinstance(result, ForwardBackwardOutput)
            assert result.metrics["loss:sum"] == 5
            return backend.names()

    names, _ = run_in_virtual_time(main())
    assert names.count("forward_backward") == 1


def test_a_repetition_whose_result_is_no_longer_kept_is_not_done_again(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path, limits=Limits(result_kept_s=5)) as (service, backend):
            model = new_model(service)
            first = forward_backward(service, model, 1, 5)
            await result_of(service, first)
            await asyncio.sleep(6)
            assert forward_backward(service, model, 1, 5) == first
            with pytest.raises(GoneError):
                await result_of(service, first)
            await result_of(service, optim_step(service, model, 2))
            return backend.names("delete_model")

    names, _ = run_in_virtual_time(main())
    assert names == ["create_model", "forward_backward", "optim_step"]


def test_what_waits_behind_a_gap_fails_when_its_time_is_over_and_later_requests_run(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path, limits=Limits(gap_timeout_s=30)) as (service, backend):
            model = new_model(service)
            before = forward_backward(service, model, 1, 100)
            await result_of(service, before)
            started_s = now_s()
            await asyncio.sleep(7)
            behind = [forward_backward(service, model, 3, 3), optim_step(service, model, 5)]
            failures = [await service.retrieve(request, owner="local", wait_s=60) for request in behind]
            failed_s = now_s() - started_s
            late = await failure_of(service, forward_backward(service, model, 2, 2))
            after = [forward_backward(service, model, 6, 6), optim_step(service, model, 7)]
            step = [await result_of(service, request) for request in after][1]
            return failures, failed_s, late, step, backend.names("delete_model")

    (failures, failed_s, late, step, names), _ = run_in_virtual_time(main())

    assert failed_s == pytest.approx(7 + 30)
    for failure in failures:
        assert isinstance(failure, Failure)
        assert failure.category == "user"
        assert "seq_id 2, 4 of" in failure.error
        assert "did not come within 30 s" in failure.error
    assert "seq_id 2 came too late" in late.error
    assert isinstance(step, OptimStepOutput)
    assert step.metrics["weight"] == -6  # neither the 100 before the gap nor the 3 behind it
    assert names == ["create_model", "forward_backward", "drop_gradient", "forward_backward", "optim_step"]


def test_a_gap_that_closes_in_time_loses_nothing(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path, limits=Limits(gap_timeout_s=30)) as (service, _):
            model = new_model(service)
            behind = forward_backward(service, model, 2, 2)
            await asyncio.sleep(29)
            forward_backward(service, model, 1, 1)
            step = optim_step(service, model, 4)
            await asyncio.sleep(29)  # the next gap has a time of its own
            forward_backward(service, model, 3, 3)
            return await result_of(service, behind), await result_of(service, step)

    (behind, step), _ = run_in_virtual_time(main())
    assert behind.metrics["loss:sum"] == 2
    assert step.metrics["weight"] == -6


def test_time_in_which_an_earlier_request_runs_is_no_gap(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path, limits=Limits(gap_timeout_s=30)) as (service, backend):
            gate = backend.hold("forward_backward")
            model = new_model(service)
            forward_backward(service, model, 1, 1)
            behind = forward_backward(service, model, 3, 3)
            await asyncio.sleep(100)
            gate.set()
            await asyncio.sleep(29)
            forward_backward(service, model, 2, 2)
            return await result_of(service, behind)

    behind, _ = run_in_virtual_time(main())
    assert behind.metrics["loss:sum"] == 3


def test_a_request_that_fails_does_not_stop_later_ones(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, backend):
            model = new_model(service)
            backend.fail("forward_backward", InvalidRequestError("data[0]: no"))
            backend.fail("forward_backward", RuntimeError("/secret/path exploded"))
            requests = [forward_backward(service, model, seq_id, seq_id) for seq_id in (1, 2, 3)]
            return [await result_of(service, request) for request in requests]

    (first, second, third), _ = run_in_virtual_time(main())
    assert first == Failure(error="data[0]: no", category="user")
    assert second.category == "server"
    assert "secret" not in second.error
    assert third.metrics["loss:sum"] == 3


def test_a_refused_request_takes_its_turn_so_that_later_ones_need_not_wait_for_it(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, _backend):
            model = new_model(service)
            with pytest.raises(InvalidRequestError, match=r"data\[0\].tokens has -1"):
                forward_backward(service, model, 1, -1)
            forward = await result_of(service, forward_backward(service, model, 2, 3))
            repeated = await failure_of(service, forward_backward(service, model, 1, -1))
            return forward, repeated, now_s()

    (forward, repeated, time_s), _ = run_in_virtual_time(main())
    assert forward.metrics["loss:sum"] == 3
    assert "data[0].tokens has -1" in repeated.error
    assert time_s == 0


def test_models_run_at_once_and_each_in_its_order(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, backend):
            gate = backend.hold("forward_backward")
            session_id = service.sessions.create(owner="local")
            models = [new_model(service, session_id=session_id, number=n) for n in range(3)]
            requests = [forward_backward(service, model, seq, seq) for seq in (2, 1) for model in models]
            await asyncio.sleep(1)
            gate.set()
            for request in requests:
                await result_of(service, request)
            return backend.most_at_once, backend.calls

    (most, calls), _ = run_in_virtual_time(main())
    assert most == 3
    for n in range(3):
        own = [call for call in calls if call.startswith(f"forward_backward {n}")]
        assert own == [f"forward_backward {n} [1]", f"forward_backward {n} [2]"]


def test_a_model_full_of_waiting_requests_still_takes_the_one_they_wait_for(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path, limits=Limits(waiting_per_model=3)) as (service, _):
            model = new_model(service)
            await result_of(service, f"{model}:0")
            behind = [forward_backward(service, model, seq_id, seq_id) for seq_id in (2, 3, 4)]
            with pytest.raises(
                BusyError, match="limit waiting_per_model: with this request it would be 4, above 3"
            ):
                forward_backward(service, model, 5, 5)
            first = forward_backward(service, model, 1, 1)
            sums = [(await result_of(service, request)).metrics["loss:sum"] for request in (first, *behind)]
            again = await result_of(service, forward_backward(service, model, 5, 5))
            return sums, again

    (sums, again), _ = run_in_virtual_time(main())
    assert sums == [1, 2, 3, 4]
    assert again.metrics["loss:sum"] == 5


def test_a_request_shows_the_weights_that_the_steps_before_it_made(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, _):
            model = new_model(service)
            forward_backward(service, model, 1, 2, 3)
            optim_step(service, model, 2, learning_rate=0.5)
            last = forward_backward(service, model, 3, 7, 7)
            return await result_of(service, last)

    last, _ = run_in_virtual_time(main())
    np.testing.assert_array_equal(last.logprobs[0], np.full(2, -2.5, dtype=np.float32))


@pytest.mark.parametrize("seq_id", [0, -1, 2**63, True])
def test_seq_ids_count_from_1(tmp_path: Path, seq_id: int) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, _):
            model = new_model(service)
            with pytest.raises(InvalidRequestError, match=f"seq_id is {seq_id}; it is a whole number from 1"):
                forward_backward(service, model, seq_id, 1)

    run_in_virtual_time(main())
