"""`make attack`: what it finds of a planted hole, and its shortest form on a server of its own."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import httpx
import pytest

from rl.models.files.tokenizer import build_byte_tokenizer
from rl.tinker.service.sessions import Sessions
from rl.tinker.service.storage import Storage
from tests.support.fake_tinker import BASE, KEYS, ME, YOU, service_test, settled
from tools.attack.bodies import (
    CHAT,
    COMPLETIONS,
    COUNT,
    LISTS,
    MESSAGES,
    RESPONSES,
    Attacker,
    Call,
    Ids,
)

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
    *(CHAT, RESPONSES, COMPLETIONS, MESSAGES, COUNT),
}
"""Calls that reach a checkpoint or its run."""
LAST = ("delete", "finish")
"""Calls that leave nothing to reach."""


async def ids_of(client):
    """Return what a key has after a step, with both kinds of checkpoints."""
    model = await client.trained()
    session = model.partition(":")[0]
    # Its weight is a token of the tokenizer: that of a trained model is below 0.
    fresh = client.model(session=session, number=1)
    return Ids(
        session_id=session,
        sampler_id=client.base_sampler(number=5),
        model_id=model,
        request_id=f"{model}:3",
        checkpoint=await client.saved(model, 3, "own"),
        sampler_checkpoint=await client.saved_sampler(fresh, 1, "own"),
    )


async def ask(client, call):
    headers = {"x-api-key": call.key, "content-type": call.content_type}
    transport = httpx.ASGITransport(client.app, raise_app_exceptions=False)
    url = httpx.URL("http://127.0.0.1/api/v1/").join(call.path)
    async with httpx.AsyncClient(transport=transport) as http:
        return await http.request(call.method, url, content=call.body, headers=headers)


async def reached_by(client, attacker):
    """Return the names of the attacker's calls that succeed."""
    calls = attacker.foreign_calls()
    names = sorted(calls, key=lambda name: (name in LAST, name))
    return {name for name in names if (await ask(client, calls[name])).is_success}


def offer_tokenizer(client):
    """Give the fake backend a tokenizer, so that it can hold conversations."""
    folder = client.folder.parent / "tokenizer"
    build_byte_tokenizer(folder)
    # The prompt of a conversation with a tool is longer than the fake context.
    base = replace(BASE, tokenizer_folder=str(folder), max_context_length=2000)
    client.backend.base_model = base


@service_test(virtual=False)
async def test_attack_reaches_nothing_of_another_key_unless_a_check_of_the_owner_is_missing(client):
    offer_tokenizer(client)
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
    await settled()


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
