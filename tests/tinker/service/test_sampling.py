"""Sampling sessions of base models, snapshots and saved weights, and when their weights are forgotten."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl.tinker.errors import GoneError, InvalidRequestError, NotFoundError
from rl.tinker.service.limits import Limits
from rl.tinker.service.service import Service
from tests.support.fake_tinker_backend import (
    failure_of,
    forward_backward,
    new_model,
    optim_step,
    prompt,
    result_of,
    running_service,
    settled,
)
from tests.support.virtual_time import run_in_virtual_time


async def sampled_token(service: Service, sampling_id: str, seq_id: int = 0) -> int:
    request = service.sampling.sample(sampling_id, seq_id, prompt(1), owner="local").request_id
    return int((await result_of(service, request)).sequences[0].tokens[0])


def snapshot(service: Service, model: str, seq_id: int, number: int) -> str:
    return service.training.save_sampler(
        model, seq_id, None, sampling_session_seq_id=number, owner="local"
    ).request_id


async def saved(service: Service, model: str, seq_id: int, name: str) -> str:
    request = service.training.save_sampler(model, seq_id, name, owner="local").request_id
    return (await result_of(service, request)).path


def test_a_snapshot_keeps_the_weights_of_its_place_in_the_stream(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, _):
            model = new_model(service)
            requests = [snapshot(service, model, 1, 0)]
            for step in (1, 2):
                forward_backward(service, model, 3 * step - 1, 5)
                optim_step(service, model, 3 * step)
                requests.append(snapshot(service, model, 3 * step + 1, step))
            ids = [(await result_of(service, request)).sampling_session_id for request in requests]
            base = service.sampling.create(model.partition(":")[0], 9, base_model="tiny", owner="local")
            return ids, [await sampled_token(service, one) for one in (*ids, base)], model

    (ids, tokens, model), _ = run_in_virtual_time(main())
    assert ids == [f"{model.partition(':')[0]}:sample:{n}" for n in range(3)]
    assert tokens == [0, -5, -10, 0]


def test_the_same_sample_is_done_once_and_has_an_id_for_each_sequence(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, backend):
            session_id = service.sessions.create(owner="local")
            sampling_id = service.sampling.create(session_id, 3, base_model="tiny", owner="local")
            assert service.sampling.create(session_id, 3, base_model="tiny", owner="local") == sampling_id
            first = service.sampling.sample(sampling_id, 7, prompt(1, num_samples=3), owner="local")
            again = service.sampling.sample(sampling_id, 7, prompt(2, num_samples=3), owner="local")
            result = await result_of(service, first.request_id)
            return first, again, result, backend.names()

    (first, again, result, names), _ = run_in_virtual_time(main())
    assert again == first
    assert len(set(first.sample_sequence_ids)) == len(result.sequences) == 3
    assert names == ["open_sampler", "sample"]


def test_a_repetition_too_has_no_more_ids_than_a_request_may_have(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_service(tmp_path, limits=Limits(samples_per_request=3)) as (service, _):
            session_id = service.sessions.create(owner="local")
            sampling_id = service.sampling.create(session_id, 0, base_model="tiny", owner="local")
            service.sampling.sample(sampling_id, 0, prompt(1, num_samples=3), owner="local")
            with pytest.raises(InvalidRequestError, match="num_samples is 4; it is 1 to 3"):
                service.sampling.sample(sampling_id, 0, prompt(1, num_samples=4), owner="local")

    asyncio.run(main())


def test_saved_weights_open_with_the_first_sample_and_are_shared(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, backend):
            model = new_model(service)
            forward_backward(service, model, 1, 4)
            optim_step(service, model, 2)
            path = await saved(service, model, 3, "step-1")
            ids = []
            for owner_session in range(2):
                session_id = service.sessions.create(owner="local")
                ids.append(service.sampling.create(session_id, owner_session, model_path=path, owner="local"))
            assert "open_sampler" not in backend.names()
            tokens = await asyncio.gather(*(sampled_token(service, one) for one in ids))
            infos = [service.sampling.info(one, owner="local") for one in ids]

            service.sessions.finish(ids[0].partition(":")[0], owner="local")
            await settled()
            num_open = [len(backend.samplers)]
            service.sessions.finish(ids[1].partition(":")[0], owner="local")
            await settled()
            return path, tokens, infos, backend.names(), [*num_open, len(backend.samplers)]

    path, tokens, infos, names, num_open = asyncio.run(main())
    assert tokens == [-4, -4]
    assert [(info.model_path, info.base_model) for info in infos] == [(path, "tiny")] * 2
    assert names.count("open_sampler") == 1
    assert num_open == [1, 0]


def test_the_oldest_snapshot_closes_for_one_too_many_once_its_samples_have_ended(
    tmp_path: Path,
) -> None:
    async def main() -> Any:
        async with running_service(tmp_path, limits=Limits(samplers_per_model=2)) as (service, backend):
            gate = backend.hold("sample")
            model, other = new_model(service), new_model(service)
            ids = [(await result_of(service, snapshot(service, model, 1, 0))).sampling_session_id]
            await result_of(service, snapshot(service, other, 1, 1))
            under_way = service.sampling.sample(ids[0], 0, prompt(1), owner="local").request_id
            later = [snapshot(service, model, number, number) for number in (2, 3)]
            ids += [(await result_of(service, request)).sampling_session_id for request in later]
            await asyncio.sleep(1)
            with pytest.raises(GoneError, match="limit samplers_per_model"):
                service.sampling.sample(ids[0], 1, prompt(1), owner="local")
            assert ids[0] in backend.samplers
            gate.set()
            await result_of(service, under_way)
            await asyncio.sleep(1)
            tokens = [await sampled_token(service, one) for one in ids[1:]]
            return ids, tokens, set(backend.samplers)

    (ids, tokens, samplers), _ = run_in_virtual_time(main())
    assert tokens == [0, 0]
    assert ids[0] not in samplers
    assert len(samplers) == 3  # two of the model and the other model's one


def test_where_the_backend_has_no_room_the_models_oldest_unused_snapshot_goes(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, backend):
            backend.most_samplers = 3
            model, other = new_model(service), new_model(service)
            await result_of(service, snapshot(service, other, 1, 9))
            ids = [
                (await result_of(service, snapshot(service, model, number, number))).sampling_session_id
                for number in (1, 2)
            ]
            gate = backend.hold("sample")
            under_way = service.sampling.sample(ids[0], 0, prompt(1), owner="local").request_id
            await result_of(service, snapshot(service, model, 3, 3))
            with pytest.raises(GoneError, match="no room for a newer snapshot of its model"):
                service.sampling.sample(ids[1], 0, prompt(1), owner="local")
            gate.set()
            await result_of(service, under_way)
            newest = new_model(service)
            refused = await failure_of(service, snapshot(service, newest, 1, 4))
            return refused, set(backend.samplers), ids

    (refused, samplers, ids), _ = run_in_virtual_time(main())
    assert "there are 3 snapshots" in refused.error
    assert ids[0] in samplers
    assert ids[1] not in samplers
    assert len(samplers) == 3


def test_saved_weights_used_longest_ago_close_for_others_and_open_again(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path, limits=Limits(saved_samplers=1)) as (service, backend):
            model = new_model(service)
            paths = [await saved(service, model, seq_id, f"s{seq_id}") for seq_id in (1, 2)]
            session_id = model.partition(":")[0]
            ids = [
                service.sampling.create(session_id, n, model_path=path, owner="local")
                for n, path in enumerate(paths)
            ]
            num_open = []
            for seq_id, one in enumerate((ids[0], ids[1], ids[0])):
                await sampled_token(service, one, seq_id)
                await settled()
                num_open.append(len(backend.samplers))
            return num_open, backend.names()

    num_open, names = asyncio.run(main())
    assert num_open == [1, 1, 1]
    assert names.count("open_sampler") == 3
    assert names.count("close_sampler") >= 2


def test_weights_that_were_replaced_before_the_first_sample_are_gone_for_it(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, _):
            model = new_model(service)
            path = await saved(service, model, 1, "same")
            session_id = model.partition(":")[0]
            old = service.sampling.create(session_id, 0, model_path=path, owner="local")
            forward_backward(service, model, 2, 3)
            optim_step(service, model, 3)
            assert await saved(service, model, 4, "same") == path
            new = service.sampling.create(session_id, 1, model_path=path, owner="local")
            request = service.sampling.sample(old, 0, prompt(1), owner="local").request_id
            return await failure_of(service, request), await sampled_token(service, new)

    failure, token = asyncio.run(main())
    assert failure.category == "user"
    assert "was deleted or replaced" in failure.error
    assert token == -3


def test_weights_that_could_not_be_opened_are_tried_again(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, backend):
            session_id = service.sessions.create(owner="local")
            one = service.sampling.create(session_id, 0, base_model="tiny", owner="local")
            backend.fail("open_sampler", RuntimeError("no memory"))
            first = service.sampling.sample(one, 0, prompt(1), owner="local").request_id
            return await failure_of(service, first), await sampled_token(service, one, 1)

    (failure, token), _ = run_in_virtual_time(main())
    assert failure.category == "server"
    assert token == 0


def test_what_cannot_be_sampled_from_is_refused_at_once(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, _):
            model = new_model(service)
            session_id = model.partition(":")[0]
            state = service.training.save_state(model, 1, "state", owner="local").request_id
            state_path = (await result_of(service, state)).path
            sampler_path = await saved(service, model, 2, "sampler")
            stranger = service.sessions.create(owner="you")

            def create(session: str = session_id, owner: str = "local", **what: str | None) -> str:
                return service.sampling.create(session, 5, owner=owner, **what)

            with pytest.raises(InvalidRequestError, match="both are missing"):
                create()
            with pytest.raises(
                InvalidRequestError, match="base_model is 'huge'; offered are 'tiny', 'fixed'"
            ):
                create(base_model="huge")
            with pytest.raises(InvalidRequestError, match="weights for training"):
                create(model_path=state_path)
            with pytest.raises(InvalidRequestError, match="base_model is 'fixed', but"):
                create(model_path=sampler_path, base_model="fixed")
            for path in (f"{sampler_path}x", sampler_path.replace("sampler_weights", "weights") + "/.."):
                with pytest.raises((NotFoundError, InvalidRequestError)):
                    create(model_path=path)
            with pytest.raises(NotFoundError, match="there is no checkpoint"):
                create(stranger, "you", model_path=sampler_path)
            one = create(base_model="tiny")
            with pytest.raises(InvalidRequestError, match="temperature is -1"):
                service.sampling.sample(one, 0, prompt(1, temperature=-1), owner="local")
            with pytest.raises(InvalidRequestError, match="num_samples is 0"):
                service.sampling.sample(one, 0, prompt(1, num_samples=0), owner="local")
            with pytest.raises(NotFoundError):
                service.sampling.sample(one[:-1] + "6", 0, prompt(1), owner="local")

    asyncio.run(main())


def test_the_likeliest_tokens_of_a_prompt_count_as_tokens_together(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_service(tmp_path, limits=Limits(tokens_per_request=8)) as (service, _):
            session_id = service.sessions.create(owner="local")
            one = service.sampling.create(session_id, 0, base_model="tiny", owner="local")
            asked = [replace(prompt(1, 2, 3, 4), topk_prompt_logprobs=k) for k in (2, 3)]
            service.sampling.sample(one, 0, asked[0], owner="local")
            with pytest.raises(InvalidRequestError, match="topk_prompt_logprobs is 3, which makes 12 tokens"):
                service.sampling.sample(one, 1, asked[1], owner="local")

    asyncio.run(main())


def test_an_unloaded_models_snapshots_can_still_be_sampled_from(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, backend):
            model = new_model(service)
            one = (await result_of(service, snapshot(service, model, 1, 0))).sampling_session_id
            unload = service.training.unload(model, owner="local")
            assert service.training.unload(model, owner="local") == unload
            assert (await result_of(service, unload.request_id)).model_id == model
            with pytest.raises(GoneError, match="it was unloaded"):
                forward_backward(service, model, 2, 2)
            return await sampled_token(service, one), backend.weights

    (token, weights), _ = run_in_virtual_time(main())
    assert token == 0
    assert weights == {}
