"""Creating models, fresh and from checkpoints, and loading into them."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl.tinker.errors import GoneError, InvalidRequestError, NotFoundError
from rl.tinker.messages import AdamParams, LoRASettings, ModelSettings
from rl.tinker.service.responses import CreatedModel, LoadedState
from rl.tinker.service.service import Service
from tests.support.fake_tinker_backend import (
    BASE,
    LORA,
    LOSS,
    datum,
    failure_of,
    forward_backward,
    new_model,
    optim_step,
    result_of,
    running_service,
)
from tests.support.virtual_time import run_in_virtual_time


async def saved_state(service: Service, owner: str = "local") -> str:
    """Of a model whose weight is -5."""
    model = new_model(service, owner=owner)
    forward_backward(service, model, 1, 5, owner=owner)
    optim_step(service, model, 2, owner=owner)
    request = service.training.save_state(model, 3, "state", owner=owner).request_id
    return (await result_of(service, request, owner)).path


def test_a_model_is_created_once_and_has_the_id_that_clients_derive(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, backend):
            session_id = service.sessions.create(owner="local")
            first = service.training.create_model(session_id, 4, LORA, owner="local")
            again = service.training.create_model(session_id, 4, replace(LORA, lora=None), owner="local")
            created = await result_of(service, first.request_id)
            info = service.training.info(first.model_id, owner="local")
            return session_id, first, again, created, info, backend.names("delete_model")

    (session_id, first, again, created, info, names), _ = run_in_virtual_time(main())
    assert first == again
    assert first.model_id == f"{session_id}:train:4"
    assert created == CreatedModel(model_id=first.model_id)
    assert (info.settings, info.base) == (LORA, BASE)
    assert names == ["create_model"]


def test_a_model_that_could_not_be_created_fails_what_follows_and_is_gone(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, backend):
            backend.fail("create_model", InvalidRequestError("no room for rank 4"))
            model = new_model(service)
            behind = forward_backward(service, model, 1, 1)
            failures = [await failure_of(service, request) for request in (f"{model}:0", behind)]
            with pytest.raises(GoneError, match="could not be created: no room for rank 4"):
                forward_backward(service, model, 2, 2)
            assert new_model(service, session_id=model.partition(":")[0]) == model  # the same request
            assert "delete_model" not in backend.names()
            return failures

    (created, behind), _ = run_in_virtual_time(main())
    assert created.error == "no room for rank 4"
    assert "could not be created" in behind.error


def test_settings_that_cannot_be_are_refused_before_anything_starts(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, _backend):
            session_id = service.sessions.create(owner="local")
            for settings, said in (
                (
                    ModelSettings(base_model="huge", lora=None),
                    "base_model is 'huge'; offered are 'tiny', 'fixed'",
                ),
                (
                    ModelSettings(base_model="fixed", lora=None),
                    "base_model is 'fixed', which cannot be trained",
                ),
                (replace(LORA, lora=LoRASettings(rank=65)), "lora.rank is 65"),
            ):
                with pytest.raises(InvalidRequestError, match=re.escape(said)):
                    service.training.create_model(session_id, 0, settings, owner="local")
            service.training.create_model(session_id, 0, LORA, owner="local")  # the number is still free
            with pytest.raises(InvalidRequestError, match="model_seq_id is -1"):
                service.training.create_model(session_id, -1, LORA, owner="local")

    run_in_virtual_time(main())


def test_a_model_from_a_checkpoint_has_its_settings_and_weights(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, backend):
            path = await saved_state(service)
            session_id = service.sessions.create(owner="local")
            training = service.training
            made = training.create_from_state(
                session_id, 0, path, optimizer=True, base_model="tiny", owner="local"
            )
            loaded = await result_of(service, made.request_id)
            info = training.info(made.model_id, owner="local")
            weight = backend.weights[made.model_id]

            with pytest.raises(InvalidRequestError, match="base_model is 'fixed', but"):
                training.create_from_state(
                    session_id, 1, path, optimizer=True, base_model="fixed", owner="local"
                )
            with pytest.raises(NotFoundError):
                training.create_from_state(session_id, 1, f"{path}x", optimizer=True, owner="local")
            with pytest.raises(InvalidRequestError, match="it has the form tinker://"):
                training.create_from_state(session_id, 1, "/etc/passwd", optimizer=True, owner="local")
            return made, path, loaded, info, weight, backend.calls[-2:]

    made, path, loaded, info, weight, calls = asyncio.run(main())
    assert loaded == LoadedState(path=path, model_id=made.model_id)
    assert info.settings == LORA
    assert weight == -5
    assert calls == ["create_model 0", "load_state 0 optimizer=True"]


def test_a_model_whose_weights_cannot_be_loaded_is_deleted(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, backend):
            path = await saved_state(service)
            backend.fail("load_state", RuntimeError("bad file"))
            session_id = service.sessions.create(owner="local")
            made = service.training.create_from_state(session_id, 0, path, optimizer=True, owner="local")
            failure = await failure_of(service, made.request_id)
            return failure, made.model_id in backend.weights, backend.names()[-1]

    failure, is_there, last_call = asyncio.run(main())
    assert failure.category == "server"
    assert not is_there
    assert last_call == "delete_model"


def test_weights_load_into_a_model_of_the_same_settings_in_its_turn(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, _):
            path = await saved_state(service)
            training = service.training
            session_id = service.sessions.create(owner="local")
            reseeded = replace(LORA, lora=LoRASettings(rank=4, seed=99))
            model = training.create_model(session_id, 0, reseeded, owner="local").model_id
            forward_backward(service, model, 1, 50)
            optim_step(service, model, 2)
            training.load_state(model, 3, path, optimizer=False, owner="local")
            weight = (await result_of(service, optim_step(service, model, 4))).metrics["weight"]

            full = training.create_model(session_id, 1, replace(LORA, lora=None), owner="local").model_id
            with pytest.raises(InvalidRequestError, match="is of a model with"):
                training.load_state(full, 1, path, optimizer=False, owner="local")
            await result_of(service, optim_step(service, full, 2))
            return weight

    assert asyncio.run(main()) == -5


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (
            AdamParams(learning_rate=float("nan")),
            "adam_params.learning_rate=nan: must be a finite number",
        ),
        (AdamParams(eps=0.0), "adam_params.eps=0.0: must be a finite number of at least 1e-30"),
        (AdamParams(beta1=1.0), "adam_params.beta1=1.0: must be at least 0 and below 1"),
        (AdamParams(grad_clip_norm=float("inf")), "adam_params.grad_clip_norm=inf"),
        (AdamParams(weight_decay=-0.1), "adam_params.weight_decay=-0.1"),
    ],
)
def test_steps_that_make_no_sense_are_refused(tmp_path: Path, params: AdamParams, said: str) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, _):
            with pytest.raises(InvalidRequestError, match=re.escape(said)):
                service.training.optim_step(new_model(service), 1, params, owner="local")

    run_in_virtual_time(main())


def test_a_save_is_named_or_a_sampling_session_never_both(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, _):
            model = new_model(service)
            for seq_id, (name, number) in enumerate(((None, None), ("a", 0)), 1):
                with pytest.raises(InvalidRequestError, match="one of them is given"):
                    service.training.save_sampler(
                        model, seq_id, name, sampling_session_seq_id=number, owner="local"
                    )
            for seq_id, ttl in enumerate((0, -5, 10**12), 3):
                with pytest.raises(InvalidRequestError, match=f"ttl_seconds is {ttl}"):
                    service.training.save_state(model, seq_id, "a", ttl_seconds=ttl, owner="local")

    run_in_virtual_time(main())


def test_data_are_counted_before_they_are_looked_at(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, _):
            model = new_model(service)
            with pytest.raises(InvalidRequestError, match="data has 0 entries; it has 1 to 16384"):
                service.training.forward_backward(model, 1, [], LOSS, owner="local")
            many = [datum(-1)] * 16_385
            with pytest.raises(InvalidRequestError, match="data has 16385 entries"):
                service.training.forward_backward(model, 2, many, LOSS, owner="local")

    run_in_virtual_time(main())


def test_a_forward_leaves_the_gradient_as_it_is(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, _):
            model = new_model(service)
            forward_backward(service, model, 1, 5)
            service.training.forward_backward(model, 2, [datum(7)], LOSS, backward=False, owner="local")
            return await result_of(service, optim_step(service, model, 3))

    step, _ = run_in_virtual_time(main())
    assert step.metrics["weight"] == -5


def test_no_step_is_made_with_part_of_a_batch(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, backend):
            model = new_model(service)
            later = optim_step(service, model, 4)
            forward_backward(service, model, 1, 5)
            backend.fail("forward_backward", InvalidRequestError("the loss is not finite"))
            forward_backward(service, model, 3, 7)
            with pytest.raises(InvalidRequestError):
                service.training.forward_backward(model, 2, (), LOSS, owner="local")
            missing = await failure_of(service, later)
            whole = forward_backward(service, model, 5, 2), optim_step(service, model, 6)
            return missing, [await result_of(service, request) for request in whole]

    (missing, (_, step)), _ = run_in_virtual_time(main())
    assert missing.category == "user"
    assert "forward_backward with seq_id 1, 2 failed" in missing.error
    assert step.metrics["weight"] == -2
