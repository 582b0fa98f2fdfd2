"""Runs, checkpoints and sessions as they are listed; what is not there at all."""

import pytest
from tinker.types import (
    CheckpointsListResponse,
    GetServerCapabilitiesResponse,
    TrainingRun,
    WeightsInfoResponse,
)

from rl.tinker.http.auth import Keys
from rl.tinker.http.routes.unsupported import CALLS
from tests.support.tinker_app import BOB, run


async def saved(server, names=("first", "second")):
    """A LoRA model's id, with weights of these names."""
    model_id = await server.model(lora_config={"rank": 4, "train_unembed": False})
    for seq_id, name in enumerate(names, start=1):
        body = {"model_id": model_id, "seq_id": seq_id, "path": name, "user_metadata": {"step": str(seq_id)}}
        await server.result(await server.ok("save_weights", body))
    return model_id


def test_a_run_and_its_checkpoints_are_of_the_clients_types(tmp_path):
    async def scenario(server):
        model_id = await saved(server)
        run_ = TrainingRun.model_validate((await server.get(f"training_runs/{model_id}")).json())
        listed = CheckpointsListResponse.model_validate(
            (await server.get(f"training_runs/{model_id}/checkpoints")).json()
        )
        page = CheckpointsListResponse.model_validate(
            (await server.get("checkpoints?limit=1&offset=1")).json()
        )
        info = WeightsInfoResponse.model_validate(
            await server.ok("weights_info", {"tinker_path": f"tinker://{model_id}/weights/first"})
        )

        assert (run_.training_run_id, run_.base_model, run_.lora_rank) == (model_id, "plain", 4)
        assert run_.last_checkpoint.tinker_path == f"tinker://{model_id}/weights/second"
        assert [item.checkpoint_id for item in listed.checkpoints] == ["weights/second", "weights/first"]
        assert [item.user_metadata for item in listed.checkpoints] == [{"step": "2"}, {"step": "1"}]
        assert [item.checkpoint_id for item in page.checkpoints] == ["weights/first"]
        assert page.cursor.total_count == 2
        assert (info.is_lora, info.lora_rank, info.train_unembed, info.train_mlp) == (True, 4, False, True)

    run(tmp_path, scenario)


def test_a_checkpoint_is_deleted_and_another_keys_is_not(tmp_path):
    async def scenario(server):
        model_id = await saved(server)
        path = f"/api/v1/training_runs/{model_id}/checkpoints/weights/first"
        others = await server.http.delete(path, headers={"x-api-key": BOB})
        own = await server.http.delete(path, headers={"x-api-key": "tml-alice"})
        again = await server.http.delete(path, headers={"x-api-key": "tml-alice"})
        left = (await server.get(f"training_runs/{model_id}/checkpoints")).json()["checkpoints"]

        assert [others.status_code, own.status_code, again.status_code] == [404, 204, 404]
        assert [item["checkpoint_id"] for item in left] == ["weights/second"]

    run(tmp_path, scenario)


def test_a_checkpoint_can_be_given_an_end_and_freed_of_it(tmp_path):
    async def scenario(server):
        model_id = await saved(server, ["only"])
        path = f"/api/v1/training_runs/{model_id}/checkpoints/weights/only/ttl"
        ends = []
        for ttl_seconds in (3600, None):
            key = {"x-api-key": "tml-alice"}
            done = await server.http.put(path, json={"ttl_seconds": ttl_seconds}, headers=key)
            listed = (await server.get(f"training_runs/{model_id}/checkpoints")).json()
            ends.append((done.status_code, listed["checkpoints"][0]["expires_at"] is not None))

        assert ends == [(204, True), (204, False)]

    run(tmp_path, scenario)


def test_names_cannot_leave_the_storage(tmp_path):
    async def scenario(server):
        model_id = await server.model()
        statuses = [
            (await server.post("weights_info", {"tinker_path": path})).status_code
            for path in (
                f"tinker://{model_id}/weights/../../x",
                "tinker://../weights/x",
                "tinker://../../etc/passwd",
                "file:///etc/passwd",
                f"tinker://{model_id}/weights/.",
                f"tinker://{model_id}/weights/a\0b",
            )
        ]
        saves = [
            (await server.post("save_weights", {"model_id": model_id, "seq_id": i, "path": name})).status_code
            for i, name in enumerate(("../x", "a/b", "..", ".", "", "a\0b", "x" * 300), start=1)
        ]

        assert set(statuses) <= {400, 404}
        assert saves == [400] * 7

    run(tmp_path / "storage", scenario)
    assert [path.name for path in tmp_path.iterdir()] == ["storage"]


def test_sessions_are_listed_with_what_they_hold(tmp_path):
    async def scenario(server):
        model_id = await server.model()
        session_id = model_id.split(":")[0]

        assert (await server.get("sessions")).json() == {"sessions": [session_id]}
        assert (await server.get(f"sessions/{session_id}")).json()["training_run_ids"] == [model_id]
        assert (await server.get("sessions", key=BOB)).json() == {"sessions": []}

    run(tmp_path, scenario)


def test_the_client_is_told_what_is_there_and_how_to_cut_its_data(tmp_path):
    async def scenario(server):
        config = await server.ok("client/config", {"sdk_version": "0.38.0"})
        dynamic = await server.ok("client/dynamic_config", {"sdk_version": "0.38.0"})
        models = GetServerCapabilitiesResponse.model_validate(
            (await server.get("get_server_capabilities")).json()
        )

        assert config["fwdbwd_max_chunk_len"] == 7
        assert [name for name, value in config.items() if value is True] == ["parallel_fwdbwd_chunks"]
        assert dynamic["sample_cancel_enabled"]
        assert [model.model_name for model in models.supported_models] == ["plain"]

    run(tmp_path, scenario, chunk_data=7)


@pytest.mark.parametrize(("method", "path"), list(CALLS))
def test_calls_that_are_not_supported_say_so(tmp_path, method, path):
    async def scenario(server):
        url = "/api/v1" + path.format(run_id="r", kind="weights", name="n", session_id="s")
        answer = await server.http.request(method, url, headers={"x-api-key": "tml-a"}, json={})

        assert answer.status_code == 400
        assert (
            answer.json()["detail"] == f"{method} {path}: this server does not support {CALLS[method, path]}"
        )

    run(tmp_path, scenario)


def test_nothing_but_health_and_the_description_is_to_be_had_without_a_key(tmp_path):
    async def scenario(server):
        paths = [
            "/api/v1/healthz",
            "/openapi.json",
            "/api/v1/sessions",
            "/api/v1/client/config",
            "/docs",
            "/",
        ]
        statuses = [(await server.http.get(path)).status_code for path in paths]
        other = await server.get("sessions", key="tml-wrong-key-of-somebody")

        assert statuses == [200, 200, 401, 401, 401, 401]
        assert other.status_code == 401

    run(tmp_path, scenario, keys=Keys(["tml-" + "k" * 20]))


def test_paths_and_methods_that_are_not_there_are_json_errors(tmp_path):
    async def scenario(server):
        answers = [await server.get("nothing"), await server.get("asample")]

        assert [answer.status_code for answer in answers] == [404, 405]
        assert [answer.json()["detail"] for answer in answers] == ["Not Found", "Method Not Allowed"]

    run(tmp_path, scenario)
