"""One API key cannot starve another one, fill the memory, or keep what it no longer may have.

The limits are checked in virtual time; the sampler in this process with real models. The queues are
in tests/tinker/test_queues.py.
"""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinker.proto import tinker_public_pb2 as pb

from rl.models.generate import PromptLogprobs
from rl.tinker.local import LocalTinkerBackend
from rl.tinker.service.futures import (
    INLINE_BYTES,
    REQUEST_BYTES,
    SMALL_BYTES,
    AcceptedRequest,
    Futures,
    encode_message,
)
from rl.tinker.service.service import Ttl
from rl.tinker.service.sessions import KEPT
from rl.tinker.types import (
    BusyError,
    GoneError,
    InvalidRequestError,
    LimitReachedError,
    Limits,
    NotFoundError,
)
from rl.tinker.wire.datums import find_loss
from tests.support.fake_tinker import BASE, ME, YOU, message, running_service, service_test, settled
from tests.tinker.parts import create, local_backend, request, settings, tokens_of

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[LocalTinkerBackend]:
    backend = local_backend(tmp_path / "base")
    await backend.start()
    yield backend
    await backend.close()


# The sampler in this process


async def test_paused_completions_go_on_with_the_same_tokens(backend, monkeypatch):
    monkeypatch.setattr("rl.local.SLICE_S", 0.0)
    await create(backend, "m", settings())
    base, other = await backend.open(None, None), await backend.publish("m")
    long = request(backend.base_model, [3, 1, 4], num_samples=100, max_tokens=40, stop=(), seed=5)
    alone = tokens_of(await backend.sample(base, long, "me"))
    running = [asyncio.create_task(backend.sample(base, long, "me")) for _ in range(3)]
    short = request(backend.base_model, [1, 5], max_tokens=1)
    num_short = 0
    while not all(task.done() for task in running):
        assert len(tokens_of(await backend.sample(other, short, "you"))) == 1
        num_short += 1
    assert [tokens_of(task.result()) for task in running] == [alone] * 3
    assert num_short > 5


async def test_logprobs_of_many_prompts_do_not_keep_another_key_waiting(backend, monkeypatch):
    none = np.zeros((1, 0), np.float32)
    of_prompt = PromptLogprobs(logprobs=none, top_ids=none, top_logprobs=none)

    def slow(*args: Any, **options: Any) -> PromptLogprobs:
        time.sleep(0.05)
        return of_prompt

    monkeypatch.setattr("rl.models.local_sampler.prompt_logprobs", slow)
    base = await backend.open(None, None)
    prompt = request(backend.base_model, [3, 1, 4], max_tokens=1, prompt_logprobs=True)
    many = [asyncio.create_task(backend.sample(base, prompt, "me")) for _ in range(60)]
    while not any(task.done() for task in many):
        await asyncio.sleep(0.01)
    await backend.sample(base, request(backend.base_model, [1, 5], max_tokens=1), "you")
    assert sum(task.done() for task in many) < 30
    assert all(one.of_prompt is of_prompt for one in await asyncio.gather(*many))


# Memory


@service_test(all_held_bytes=10 * (SMALL_BYTES + 4000))
async def test_results_that_are_dropped_leave_the_memory(client):
    # A service of another test may still be referenced.
    earlier = list_requests()
    model = client.model()
    await client.result(f"{model}:0")
    for seq_id in range(1, 20):
        await client.loss(client.add(model, seq_id, *range(90)))
    assert f"{model}:1" not in client.service._futures
    kept = [one for one in list_requests() if not any(one is other for other in earlier)]
    assert len(kept) == len(client.service._futures._requests)


def list_requests():
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is AcceptedRequest]


@service_test(virtual=False)
async def test_sampling_sessions_do_not_keep_the_metadata_of_their_weights(client):
    saved = client.save_sampler(client.model(), 1, "a", user_metadata={"a": "b"})
    path = (await client.result(saved)).path
    sampler = client.create_sampler(session := client.session(), 0, model_path=path)
    assert client.service.sampling._sources[session][sampler].record.user_metadata is None
    assert await client.token(sampler) == 0


@service_test(all_held_bytes=10 * (SMALL_BYTES + 4000))
async def test_errors_repeat_little_of_a_request_and_what_is_kept_is_counted(client):
    model = client.model()
    await client.result(f"{model}:0")
    for seq_id in range(1, 20):
        await settled()  # A waiting request alone has more bytes than the limit.
        huge = message(model, seq_id, 1)
        huge.data[0].loss_fn_inputs["x" * 1_000_000].CopyFrom(
            huge.data[0].loss_fn_inputs["target_tokens"]
        )
        with pytest.raises(InvalidRequestError) as error:
            client.now(
                client.service.training.forward_backward,
                client.service.training.decode(huge.SerializeToString()),
            )
        assert len(str(error.value)) < 2100
        if seq_id > 12:
            assert len((await client.failure(f"{model}:{seq_id}")).error) < 2100
    held = client.service._futures._held[client.owner]
    assert held.result_bytes <= 10 * (SMALL_BYTES + 4000)
    assert sum(len(one.result.body) for one in client.service._futures._requests.values()) < 50_000


@service_test(virtual=False)
async def test_a_result_is_encoded_once_and_a_large_one_in_a_thread(client):
    threads = []

    def make() -> pb.SampleResponse:
        threads.append(threading.current_thread())
        return pb.SampleResponse()

    for num_bytes in (10, INLINE_BYTES):
        await encode_message(make, num_bytes=num_bytes)
    assert [thread is threading.main_thread() for thread in threads] == [True, False]
    request_id = client.sample(client.base_sampler())
    first, again = [await client.service.retrieve(request_id, owner=ME, wait_s=9) for _ in range(2)]
    assert first is again
    assert (await client.retrieved(request_id)).content == first.body


@service_test(all_held_bytes=4 * REQUEST_BYTES, gap_timeout_s=30)
async def test_invalid_requests_count_as_waiting(client):
    model = client.model()
    await client.result(f"{model}:0")
    for seq_id in range(2, 6):
        with pytest.raises(InvalidRequestError):
            client.add(model, seq_id, -1)
    for seq_id in range(6, 50):
        with pytest.raises(BusyError, match="limit all_held_bytes"):
            client.add(model, seq_id, -1)
    assert await client.loss(client.add(model, 1, 5)) == 5  # what others wait for is let in
    assert "token id -1" in (await client.failure(f"{model}:5")).error


@service_test(all_held_bytes=4 * REQUEST_BYTES, gap_timeout_s=30)
async def test_a_request_far_ahead_does_not_let_in_all_those_before_it(client):
    model = client.model()
    await client.result(f"{model}:0")
    client.backend.hold("forward_backward")
    client.add(model, 1000, 5)
    client.add(model, 1, 5)
    await settled()
    client.add(model, 2, 5)
    with pytest.raises(BusyError, match="limit all_held_bytes"):
        client.add(model, 3, 5)


@service_test(all_held_bytes=2**20)
async def test_data_count_with_their_size_once_they_are_dense(client):
    model = client.model()
    await client.result(f"{model}:0")
    sparse = message(model, 2, *range(90))
    wide = pb.Tensor(
        sparse_csr=pb.SparseCsr(crow_indices=bytes(8 * 91), col_indices=b"", values=b""),
        dtype=pb.DTYPE_INT64,
        shape=[90, BASE.vocab_size],
    )
    sparse.data[0].loss_fn_inputs["target_tokens"].CopyFrom(wide)
    client.now(
        client.service.training.forward_backward,
        client.service.training.decode(sparse.SerializeToString()),
    )
    with pytest.raises(BusyError, match="limit all_held_bytes"):
        client.add(model, 3, 3)


@service_test(all_held_bytes=8 * (REQUEST_BYTES + 2 * SMALL_BYTES))
async def test_all_keys_together_hold_a_bounded_number_of_bytes_and_each_has_a_share(client):
    client.backend.hold("sample")
    mine, yours = client.base_sampler(), client.of(YOU).base_sampler()
    client.sample(mine, 0)
    client.of(YOU).sample(yours, 0)
    for seq_id in range(1, 7):
        client.sample(mine, seq_id)
    with pytest.raises(BusyError, match="limit all_held_bytes"):
        client.sample(mine, 7)
    client.of(YOU).sample(yours, 1)


async def test_refused_keys_leave_no_accounts_that_lower_the_share_of_others():
    futures = Futures(Limits(all_held_bytes=8 * REQUEST_BYTES))
    for number in range(7):
        futures.accept(f"mine:{number}", owner=ME)
    futures.accept("yours:0", owner=YOU)
    for number in range(50):
        with pytest.raises(BusyError, match="limit all_held_bytes"):
            futures.accept("refused", owner=f"stranger {number}", num_bytes=4 * REQUEST_BYTES)
    futures.accept("yours:1", owner=YOU)


@service_test(all_state_bytes=19_500_000)
async def test_state_of_all_keys_is_limited_in_bytes(client):
    client.backend.base_model = replace(BASE, num_parameters=10**6, num_parameters_per_rank=10**4)
    client.model(rank=0)  # 16 MB
    with pytest.raises(LimitReachedError, match="limit all_state_bytes"):
        client.of(YOU).model(rank=0)
    other = client.of(YOU).model(rank=4)  # 0.64 MB, and each snapshot 0.16 MB
    first, *_ = [await client.of(YOU).opened(other, n, n) for n in range(1, 5)]
    client.of(YOU).model(rank=4)
    client.of(YOU).model(rank=4)
    client.of(YOU).model(rank=4)
    last = [await client.of(YOU).opened(other, n, n) for n in range(5, 9)]
    assert await client.of(YOU).token(last[-1]) == 0
    with pytest.raises(GoneError, match="limit all_state_bytes"):
        client.of(YOU).sample(first)


@service_test(all_state_bytes=100_000_000)
async def test_large_models_do_not_close_the_weights_of_a_key_that_has_less(client):
    client.backend.base_model = replace(BASE, num_parameters=10**6, num_parameters_per_rank=10**4)
    you = client.of(YOU)
    model = you.model(rank=4)
    snapshots = [await you.opened(model, n, n) for n in range(1, 5)]
    for _ in range(6):
        client.model(rank=0)  # 16 MB
    with pytest.raises(LimitReachedError, match="limit all_state_bytes"):
        client.model(rank=0)
    assert [await you.token(one) for one in snapshots] == [0] * 4


@service_test(virtual=False)
async def test_training_of_all_parameters_can_be_switched_off(client):
    path = await client.saved(client.model(rank=0), 1, "full")
    client.backend.base_model = replace(BASE, min_lora_rank=2, max_lora_rank=8)
    for make in (
        partial(client.model, rank=0),
        partial(client.model, rank=1),
        partial(client.load, path, session_id=client.session(), model_seq_id=0),
    ):
        with pytest.raises(InvalidRequestError, match=r"lora_config\.rank=\d: must be 2 to 8"):
            make()
    await client.result(f"{client.model(rank=2)}:0")


@service_test()
async def test_a_session_remembers_a_bounded_number_of_samplers_and_failed_models(client):
    session = client.session()
    kept = client.base_sampler(0, session)
    snapshot = await client.opened(client.model(session=session), 1, 1)
    for number in range(2, KEPT + 20):
        client.base_sampler(number, session)
        await client.token(kept, number)
    found = client.service.sessions._sessions[session]
    assert len(client.service.sampling._sources[session]) == KEPT
    with pytest.raises(NotFoundError):
        client.sample(snapshot)
    await settled()
    assert len(client.backend.published) == 1  # the base model's
    for number in range(1, KEPT + 20):
        client.backend.fail("create_model", InvalidRequestError("no"))
        await client.failure(f"{client.model(session=session, number=number)}:0")
        await settled()
    assert len(found.streams) <= KEPT + 2


@service_test()
async def test_sessions_that_were_finished_are_remembered_in_a_bounded_number(client):
    for _ in range(KEPT + 50):
        client.finish(client.session())
    assert len(client.service.sessions._sessions) <= KEPT + 1


@service_test()
async def test_metadata_have_a_limit(client):
    with pytest.raises(InvalidRequestError, match="user_metadata: has 100001 characters"):
        client.model(user_metadata={"a": "b" * 100_000})


async def test_lists_of_many_checkpoints_do_not_stop_the_server(tmp_path, monkeypatch):
    async with running_service(tmp_path) as client:
        await client.saved(await client.trained(), 3, "a")
        storage = client.service._storage
        checkpoints = storage.list_checkpoints

        def slow(*model_ids: str) -> Any:
            time.sleep(0.3)
            return checkpoints(*model_ids)

        monkeypatch.setattr(storage, "list_checkpoints", slow)
        began = time.monotonic()
        lists = [
            asyncio.create_task(client.runs(name))
            for name in ("list_training_runs", "list_checkpoints")
        ]
        await settled()
        assert time.monotonic() - began < 0.3
        runs, found = await asyncio.gather(*lists)
        assert len(runs.training_runs) == len(found.checkpoints) == 1


# What is gone


@pytest.mark.parametrize("how", ["deleted", "expired"])
async def test_a_deleted_or_expired_checkpoint_is_not_sampled_by_a_session_that_has_it_open(
    tmp_path, how
):
    clock = [1000.0]
    async with running_service(tmp_path, wall_time_s=lambda: clock[0]) as client:
        path = await client.saved_sampler(await client.trained(), 3, "s")
        sampler = client.create_sampler(client.session(), 0, model_path=path)
        assert await client.token(sampler, 0) == -5
        run = path.removeprefix("tinker://").partition("/")[0]
        if how == "deleted":
            await client.runs("delete_checkpoint", run, "sampler_weights", "s")
            await settled()
            assert client.backend.published == {}
        else:
            await client.runs("set_ttl", run, "sampler_weights", "s", Ttl(ttl_seconds=10))
            clock[0] += 11
        with pytest.raises(NotFoundError, match="there is no checkpoint"):
            client.sample(sampler, 1)


async def test_diverged_weights_are_not_sampled_and_harm_no_other_request(tmp_path):
    backend = local_backend(tmp_path / "base", tie=False)
    await backend.start()
    await create(backend, "m", settings(rank=0))
    good = await backend.publish("m")
    workers: Any = backend._workers
    weight = workers.models["m"].policy.model.embed_tokens.weight
    with torch.no_grad():
        weight[200] = torch.nan  # beyond the tokens that a publication is probed with
    version = await backend.publish("m")
    for asked in (
        request(backend.base_model, [200, 201]),
        request(backend.base_model, [7, 200], max_tokens=1, prompt_logprobs=True),
    ):
        with pytest.raises(InvalidRequestError, match="the sampler's weights have diverged"):
            await backend.sample(version, asked)
    assert len(tokens_of(await backend.sample(good, request(backend.base_model, [7])))) == 1
    await backend.close()


# Values


@pytest.mark.parametrize(
    "change",
    [
        {"expires_s": "x"},
        {"expires_s": "nan"},
        {"expires_s": 1e308},
        {"created_s": "inf"},
        {"folder": "", "expires_s": 1},
        {"folder": "..", "expires_s": 1},
        {"folder": "../other@" + "0" * 32, "expires_s": 1},
        {"size_bytes": -1},
    ],
    ids=str,
)
async def test_damaged_record_neither_keeps_the_server_from_starting_nor_names_other_folders(
    tmp_path, change
):
    async with running_service(tmp_path) as client:
        model = await client.trained()
        await client.saved(model, 3, "bad")
        path = await client.saved(model, 4, "good")
    file = tmp_path / model.replace(":", ".") / "weights" / "bad.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    async with running_service(tmp_path) as client:
        found = await client.runs("list_checkpoints", offset=0, limit=9)
        assert [one.tinker_path for one in found.checkpoints] == [path]
        (run,) = (await client.runs("list_training_runs")).training_runs
        assert run.training_run_id == model


async def test_a_run_that_names_another_run_shows_none_of_its_checkpoints(tmp_path):
    async with running_service(tmp_path) as client:
        mine, yours = await client.trained(), await client.of(YOU).trained()
        await client.saved(mine, 3, "mine")
        await client.of(YOU).saved(yours, 3, "yours")
    file = tmp_path / yours.replace(":", ".") / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_id": mine}))
    async with running_service(tmp_path) as client:
        found = await client.of(YOU).runs("list_checkpoints", offset=0, limit=9)
        assert found.checkpoints == []


@pytest.mark.parametrize("loss", ["ppo", "cispo", "gspo"])
def test_clip_threshold_that_float32_cannot_hold_is_the_callers_mistake(loss):
    find_loss(loss).build({"clip_high_threshold": 1e30})
    with pytest.raises(
        InvalidRequestError, match=r"clip_high_threshold=1e\+308: must be 1\.0 to 1e\+30"
    ):
        find_loss(loss).build({"clip_high_threshold": 1e308})
