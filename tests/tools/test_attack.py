"""`make attack`: what it finds of a planted hole, and its shortest form on a server of its own."""

import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import httpx
import pytest

from rl.tinker.service.sessions import Sessions
from rl.tinker.service.storage import Storage
from tests.support.fake_tinker import KEYS, ME, YOU, service_test
from tools.attack.bodies import LISTS, Attacker, Call, Ids

ROOT = Path(__file__).parents[2]
OF_CHECKPOINTS = {
    "load",
    "load_new",
    "sample_saved",
    "weights_info",
    "run",
    "checkpoints",
    "delete",
    "set_ttl",
    "/oai/api/v1/chat/completions",
    "/oai/api/v1/responses",
    "/anthropic/api/v1/messages",
    "/anthropic/api/v1/messages/count_tokens",
}
"""Calls that reach a checkpoint or its run."""
LAST = ("delete", "finish")
"""Calls that leave nothing to reach."""


async def ids_of(client):
    """Return what a key has after a step, with both kinds of checkpoints."""
    model = await client.trained()
    return Ids(
        session_id=model.partition(":")[0],
        sampler_id=client.base_sampler(number=5),
        model_id=model,
        request_id=f"{model}:3",
        checkpoint=await client.saved(model, 3, "own"),
        sampler_checkpoint=await client.saved_sampler(model, 4, "own"),
    )


async def ask(client, call):
    headers = {"x-api-key": call.key, "content-type": call.content_type}
    transport = httpx.ASGITransport(client.app, raise_app_exceptions=False)
    # The paths of other APIs are whole ones.
    path = call.path if call.path.startswith("/") else f"/api/v1/{call.path}"
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        return await http.request(call.method, path, content=call.body, headers=headers)


async def reached_by(client, attacker):
    """Return the names of the attacker's calls that succeed."""
    calls = attacker.foreign_calls()
    names = sorted(calls, key=lambda name: (name in LAST, name))
    reached = set()
    for name in names:
        answer = await ask(client, calls[name])
        # The fake model has no tokenizer, which conversations miss only behind the owner's check.
        if answer.is_success or (name.startswith("/") and answer.status_code != 404):
            reached.add(name)
    return reached


@service_test(virtual=False)
async def test_attack_reaches_nothing_of_another_key_unless_a_check_of_the_owner_is_missing(client):
    foreign, own = await ids_of(client.of(YOU)), await ids_of(client)
    attacker = Attacker(key=KEYS[ME], own=own, foreign=foreign, seed=0)
    lists = [Call(path=path, method="GET", key=KEYS[ME]) for path in LISTS]
    assert await reached_by(client, attacker) == set()
    assert not any([attacker.is_foreign((await ask(client, call)).content) for call in lists])

    def every_run(storage, owner):
        return [
            record for run in storage._list_runs() if (record := storage._read_run(run)) is not None
        ]

    with mock.patch.object(Storage, "list_runs", every_run):
        assert all([attacker.is_foreign((await ask(client, call)).content) for call in lists])
    with mock.patch.object(
        Storage,
        "find_run",
        lambda storage, model_id, owner: storage._read_run(storage._get_folder(model_id)),
    ):
        assert await reached_by(client, attacker) == OF_CHECKPOINTS
    with mock.patch.object(
        Sessions, "_find", lambda self, any_id, owner: self._sessions[any_id.partition(":")[0]]
    ):
        assert (
            await reached_by(client, attacker) == attacker.foreign_calls().keys() - OF_CHECKPOINTS
        )


@pytest.mark.slow
def test_attack_makes_its_requests_and_ends_with_what_it_found(tmp_path):
    command = [
        sys.executable,
        "-m",
        "tools.attack",
        "--requests",
        "300",
        "--folder",
        str(tmp_path / "attack"),
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    *table, last = done.stdout.splitlines()
    found = json.loads(last)
    assert done.returncode == 0, done.stdout + done.stderr
    assert table[0].split()[:3] == ["calls", "number", "2xx"]
    assert found["requests"] == 300
    assert found["samples_of_the_other_key"] > 0
    wrong = ("answered_5xx", "reached_of_another_key", "told_of_another_key", "tracebacks")
    assert [found[name] for name in wrong] == [0, 0, 0, 0]
