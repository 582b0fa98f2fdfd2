"""Lifecycle of a server process: refused configs, signals, kill -9 and restart."""

import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import tinker

from rl.config.cli import main
from rl.ledger.check import check_run
from tests.support.tinker_data import TEXTS, done, forward, learn, lora, text_datum
from tests.support.tinker_server import server_process

pytestmark = pytest.mark.medium
DATA = [text_datum(text) for text in TEXTS]
KEY, OTHER = "tml-" + "k" * 20, "tml-" + "o" * 20


def post(server, path, key, **body):
    return httpx.post(
        f"{server.url}/api/v1/{path}", json=body, headers={"x-api-key": key}, timeout=60
    )


def refused(argv, capsys):
    """Return the error that the entry point prints for refused options, called in this process."""
    try:
        status: object = main(argv, default_module="tinker", default_config="tiny", prog="server")
    except SystemExit as exit_:
        status = exit_.code
    printed = capsys.readouterr()
    assert status == 2, argv
    assert printed.err.startswith("error: ")
    assert printed.out == ""
    return printed.err


def keys_file(folder):
    keys = folder / "keys"
    keys.touch(mode=0o600)
    keys.write_text(f"{KEY}\n{OTHER}\n")
    return "--keys_file", str(keys)


def test_invalid_configs_are_refused_before_anything_starts(tmp_path, capsys):
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        cases = {
            ("--host", "0.0.0.0"): "API keys are needed",
            ("--keys_file", "none"): "keys_file='none': ",
            ("--port", port): f"port={port}: cannot listen there: Address already in use",
            ("--port", "65536"): "port=65536: must be at least 0 and at most 65535",
            (
                "--port",
                "0",
                "--storage_folder",
                str(tmp_path / "file"),
            ): "cannot be the storage folder",
            ("--limits.poll_s", "60"): "poll_s=60.0: must be at most 40",
            ("--limits.models", "0"): "models=0: must be above 0",
        }
        for options, said in cases.items():
            assert said in refused(
                ["--storage_folder", str(tmp_path / "storage"), *options], capsys
            )


def test_killed_server_finds_its_checkpoints_again_and_reports_the_rest_as_gone(tmp_path, capsys):
    storage, options = tmp_path / "storage", keys_file(tmp_path)
    with server_process(storage, *options) as server:
        client = server.client(KEY)
        model = lora(client)
        learn(model, DATA, steps=2)
        saved = done(model.save_state("kept")).path
        expected = forward(model, DATA)
        second = refused(["--port", "0", "--storage_folder", str(storage)], capsys)
        in_flight = post(
            server, "optim_step", KEY, model_id=model.model_id, seq_id=1000, adam_params={}
        )
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
        assert "is in use by process" in second

    with server_process(storage, *options) as server:
        lost = post(server, "retrieve_future", KEY, request_id=in_flight.json()["request_id"])
        step = post(server, "optim_step", KEY, model_id=model.model_id, seq_id=1, adam_params={})
        resumed = done(server.client(KEY).create_training_client_from_state_with_optimizer(saved))
        logprobs = forward(resumed, DATA)
        stranger = tinker.RestClient(base_url=server.url, api_key=OTHER)

        assert [lost.status_code, step.status_code] == [410, 410]
        assert "ended with the server process" in lost.json()["detail"]
        learn(resumed, DATA, steps=1)
        for one, other in zip(logprobs, expected, strict=True):
            assert one.tolist() == other.tolist()
        ledgers = [check_run(storage / one.model_id.replace(":", ".")) for one in (model, resumed)]
        assert [(one.violation, one.num_steps) for one in ledgers] == [(None, 2), (None, 1)]
        assert ledgers[1].origins == [f"goes on after step 2 of {model.model_id}"]
        with pytest.raises(tinker.NotFoundError):
            done(stranger.get_training_run(model.model_id))
        with pytest.raises(tinker.AuthenticationError):
            server.client("tml-unknown-key-of-nobody").create_lora_training_client("tiny")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_a_server_with_work_and_polls_in_progress(tmp_path, number):
    with (
        server_process(tmp_path / "storage", *keys_file(tmp_path)) as server,
        ThreadPoolExecutor(1) as thread,
        httpx.Client(timeout=60) as http,
    ):
        model = lora(server.client(KEY))
        # Earlier seq ids never arrive, so the poll lasts until the server ends.
        step = post(
            server, "optim_step", KEY, model_id=model.model_id, seq_id=7, adam_params={}
        ).json()
        sent = threading.Event()

        def trace(event, info):
            if event == "http11.send_request_body.complete":
                sent.set()

        poll = thread.submit(
            http.post,
            f"{server.url}/api/v1/retrieve_future",
            json={"request_id": step["request_id"]},
            headers={"x-api-key": KEY},
            extensions={"trace": trace},
        )
        assert sent.wait(60)
        # The server has read the poll before it answers a later request.
        assert post(server, "retrieve_future", KEY, request_id="unknown").status_code == 404
        status = server.end(number)
        answer = poll.result(30)

    assert status == 0
    assert answer.status_code in (408, 410)
    assert server.log == ""
