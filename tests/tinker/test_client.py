"""The official client on a server that it starts in this process."""

import asyncio
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import tinker

from rl.tinker import ServiceClient
from rl.tinker.local import make_backend
from tests.support.tinker_data import done, learn, text_datum

pytestmark = [pytest.mark.timeout(120)]
TIMEOUT_S = 60
DATA = [text_datum("a rose is a rose")]


@pytest.mark.medium
def test_client_trains_samples_and_ends_with_its_server_inside_a_running_loop(tmp_path):
    async def notebook():
        service = ServiceClient(backend="tiny", storage_folder=tmp_path / "storage")
        training = await service.create_lora_training_client("tiny", rank=4, seed=1)
        losses = learn(training, DATA, steps=3)
        path = (await training.save_state("kept")).path
        url = service.base_url
        await service.close("success")
        await service.close("success")
        return losses, path, url

    losses, path, url = asyncio.run(notebook())
    assert losses[2] < losses[0]
    assert not any(thread.name == "tinker-server" for thread in threading.enumerate())
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/api/v1/healthz")
    with ServiceClient(backend="tiny", storage_folder=tmp_path / "storage") as service:
        rest = tinker.RestClient(base_url=service.base_url, api_key=service.api_key)
        assert done(rest.get_server_capabilities()).supported_models[0].model_name == "tiny"
        resumed = done(service.create_training_client_from_state_with_optimizer(path))
        assert learn(resumed, DATA, steps=1)[0] < losses[2]


@pytest.mark.medium
def test_interpreter_that_forgets_to_close_still_ends_cleanly_behind_a_dead_proxy(tmp_path):
    dead = {"http_proxy": "http://127.0.0.1:9", "ALL_PROXY": "socks5://127.0.0.1:9"}
    environment = {
        name: value for name, value in os.environ.items() if name.lower() != "no_proxy"
    } | dead
    script = (
        "from rl.tinker import ServiceClient\n"
        f"service = ServiceClient(backend='tiny', storage_folder={str(tmp_path)!r})\n"
        "service.create_lora_training_client('tiny', rank=4).result()\n"
        "print('ready')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout) == (0, "ready\n"), done.stderr
    assert "Traceback" not in done.stderr


def test_unknown_backends_are_refused():
    with pytest.raises(
        ValueError, match="must be a TinkerBackend, its config, or the name of a config"
    ):
        make_backend(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no_such"):
        make_backend("no_such")


def test_closing_thread_does_not_delay_the_end_of_the_interpreter(monkeypatch):
    closing, go_on = threading.Event(), threading.Event()

    def close():
        assert threading.current_thread().daemon
        closing.set()
        go_on.wait(TIMEOUT_S)

    session: Future[None] = Future()
    monkeypatch.setattr(tinker.ServiceClient, "close", lambda *_: session)
    client = ServiceClient.__new__(ServiceClient)
    client._server = cast(Any, SimpleNamespace(close=close))
    closed = client.close("success")
    session.set_result(None)
    assert closing.wait(TIMEOUT_S)
    go_on.set()
    assert closed.result(TIMEOUT_S) is None
