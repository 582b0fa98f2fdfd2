"""Creation and loading of models, and settings of requests."""

import re
from dataclasses import replace
from typing import Any

import pytest
from tinker import types as wire

from rl.tinker.base_model import make_lora_config
from rl.tinker.types import GoneError, InvalidRequestError, NotFoundError
from rl.tinker.wire.datums import check_optim_params
from rl.trainer_types import OptimParams
from tests.support.fake_tinker import BASE, LORA, ME, service_test, settled


@service_test()
async def test_model_is_created_once_with_the_id_that_clients_derive(client):
    session = client.session()
    not_texts: tuple[Any, ...] = (1, [], "\ud800")
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("base_model='huge': must be 'tiny'", {"base_model": "huge"}),
        ("model_seq_id=-1", {"number": -1}),
        *(("user_metadata", {"user_metadata": {"a": value}}) for value in not_texts),
    ]
    for said, fields in wrong:
        with pytest.raises(InvalidRequestError, match=said):
            client.model(session=session, **{"number": 4} | fields)
    model = client.model(session=session, number=4)
    assert client.model(session=session, number=4, rank=0) == model
    assert model == f"{session}:train:4"
    assert (await client.result(f"{model}:0")).model_id == model
    assert client.service.training.find_live_stream(model, ME).settings == LORA
    assert client.backend.names("delete_model") == ["create_model"]


@service_test(virtual=False)
async def test_alias_is_another_name_of_the_base_model(client):
    alias = "Qwen/Qwen3-8B"
    says = "must be 'tiny'; a server started with --alias Qwen/Qwen3-8B takes it too"
    with pytest.raises(InvalidRequestError, match=says):
        client.model(base_model=alias)
    client.backend.base_model = replace(BASE, aliases=(alias,))
    model = client.model(base_model=alias)
    await client.result(f"{model}:0")
    # A checkpoint is of the model itself, so that a server without the alias loads it too.
    assert client.service.training.find_live_stream(model, ME).settings == LORA
    info = await client.service.training.get_info(wire.GetInfoRequest(model_id=model), owner=ME)
    assert (info.model_name, info.model_data.tokenizer_id) == ("tiny", BASE.tokenizer_folder)
    session = model.partition(":")[0]
    client.sample(client.create_sampler(session, 1, base_model=alias))
    path = await client.saved(model, 1, "state")
    loaded = client.load(path, session_id=session, model_seq_id=9, base_model=alias)
    assert (await client.result(loaded)).path == path
    offered = (await client.service.get_capabilities()).supported_models
    assert [model.model_name for model in offered] == ["tiny", alias]


@service_test()
async def test_requests_to_a_model_that_could_not_be_created_fail(client):
    client.backend.fail("create_model", InvalidRequestError("no room for rank 4"))
    model = client.model()
    behind = client.add(model, 1, 1)
    assert (await client.failure(f"{model}:0")).error == "no room for rank 4"
    assert "could not be created" in (await client.failure(behind)).error
    with pytest.raises(GoneError, match="could not be created: no room for rank 4"):
        client.add(model, 2, 2)
    assert client.model(session=model.partition(":")[0]) == model  # the same request
    assert "delete_model" not in client.backend.names()


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        (
            {"rank": 129},
            "lora_config.rank, unless it is 0 to train all parameters=129: must be 1 to 128",
        ),
        ({"rank": -1}, "=-1: must be 1 to 128"),
        ({"rank": 1, "seed": -1}, "lora_config.seed=-1: must be 0 to 9223372036854775807"),
        ({"rank": 1, "seed": 2**63}, "lora_config.seed=9223372036854775808: must be"),
        (
            {"rank": 1, "train_attn": False, "train_mlp": False},
            "nothing would have an adapter; a head that is tied to the embedding never has one",
        ),
    ],
)
def test_invalid_lora_settings_are_named(lora, said):
    with pytest.raises(InvalidRequestError, match=re.escape(said)):
        make_lora_config(wire.LoraConfig(**lora), BASE)
    valid = make_lora_config(wire.LoraConfig(rank=4), BASE)
    assert valid is not None
    assert valid.scale == 32 / 4


@service_test(virtual=False)
async def test_model_from_a_checkpoint_has_its_settings_and_weights(client):
    path = await client.saved(await client.trained(), 3, "state")
    session = client.session()

    def create(number, path, base_model):
        return client.load(path, session_id=session, model_seq_id=number, base_model=base_model)

    loaded = await client.result(create(0, path, "tiny"))
    assert (loaded.path, loaded.model_id) == (path, f"{session}:train:0")
    assert client.service.training.find_live_stream(loaded.model_id, ME).settings == LORA
    assert client.backend.weights[loaded.model_id] == -5
    assert client.backend.calls[-2:] == ["create_model 0", "load_model 0 optimizer=True"]
    client.backend.fail("load_model", RuntimeError("bad file"))
    assert (await client.failure(create(2, path, None))).category == "server"
    await settled()
    assert len(client.backend.weights) == 2
    assert client.backend.names()[-1] == "delete_model"
    for base, wrong, error, said in (
        ("other", path, InvalidRequestError, "base_model='other': must be 'tiny'"),
        (None, f"{path}x", NotFoundError, "there is no checkpoint"),
        (None, "/etc/passwd", InvalidRequestError, "must have the form tinker://"),
        (
            None,
            path.replace("/weights/", "/sampler_weights/"),
            InvalidRequestError,
            "weights to sample from",
        ),
    ):
        with pytest.raises(error, match=said):
            create(1, wrong, base)


@service_test(virtual=False)
async def test_weights_load_into_a_model_of_the_same_settings_in_its_turn(client):
    path = await client.saved(await client.trained(), 3, "state")
    session = client.session()
    model = client.model(session=session, seed=99)
    client.add(model, 1, 50)
    client.step(model, 2)
    client.load(path, model_id=model, seq_id=3, optimizer=False)
    assert await client.weight(client.step(model, 4)) == -5

    full = client.model(session=session, number=1, rank=0)
    with pytest.raises(InvalidRequestError, match="has the weights of a model with"):
        client.load(path, model_id=full, seq_id=1)
    await client.result(client.step(full, 2))


@pytest.mark.parametrize(
    ("field", "value", "bounds"),
    [
        ("learning_rate", float("nan"), "0.0 to 1e+30"),
        ("learning_rate", -1.0, "0.0 to 1e+30"),
        ("eps", 0.0, "1e-30 to 1e+30"),
        ("beta1", 1.0, "at least 0 and below 1"),
        ("grad_clip_norm", float("inf"), "0.0 to 1e+30"),
    ],
)
def test_invalid_setting_of_a_step_is_named(field, value, bounds):
    says = re.escape(f"adam_params.{field}={value}: must be {bounds}")
    with pytest.raises(InvalidRequestError, match=says):
        check_optim_params(wire.AdamParams(**{field: value}))
    assert check_optim_params(wire.AdamParams()).max_norm == float("inf")  # clipped on request only
    given = {"learning_rate": 1e-3, "beta1": 0.8, "beta2": 0.7, "eps": 1e-6, "weight_decay": 0.1}
    assert check_optim_params(wire.AdamParams(**given, grad_clip_norm=0.5)) == OptimParams(
        lr=1e-3, betas=(0.8, 0.7), eps=1e-6, weight_decay=0.1, max_norm=0.5
    )
