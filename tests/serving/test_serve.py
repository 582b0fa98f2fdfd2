"""A run's folder served in a process of its own, as a user starts it."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from rl import serve
from tests.support.runs import restore_ctrl_c
from tests.support.trained_runs import make_trained_run, set_status

pytestmark = [pytest.mark.medium, pytest.mark.timeout(240)]
ROOT = Path(__file__).parents[2]
HI: Any = [{"role": "user", "content": "Hi"}]
KEY = "a-key-of-sixteen-letters"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_trained_run(tmp_path_factory.mktemp("outputs") / "digits", step=3)


@contextmanager
def serving(run, *options, status=0):
    """Start `rl.serve`; yield its URL and its lines, and end it by Ctrl-C."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rl.serve", str(run), "--port", "0", "--device", "cpu", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=restore_ctrl_c,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        lines = [process.stdout.readline() for _ in range(3)]
        assert "http://" in lines[0], process.stderr.read()
        yield lines[0].split()[-1], lines
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == status
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def chat(client, **fields):
    how = {"model": "digits", "messages": HI, "max_tokens": 8, "temperature": 0} | fields
    return client.chat.completions.create(**how).choices[0].message.content


def test_last_weights_answer_both_clients_under_all_prefixes(run):
    with serving(run) as (url, lines):
        assert lines[0] == f"serving digits (the last weights) at {url}\n"
        assert lines[2].startswith(f"curl {url}/v1/chat/completions -d ")
        texts = set()
        for base in ("/v1", "/oai/api/v1"):
            with openai.OpenAI(base_url=url + base, api_key="any", max_retries=0) as client:
                texts.add(chat(client))
                stream = client.chat.completions.create(
                    model="digits", messages=HI, max_tokens=8, temperature=0, stream=True
                )
                texts.add("".join(chunk.choices[0].delta.content or "" for chunk in stream))
                with pytest.raises(openai.NotFoundError, match="must be digits"):
                    chat(client, model="gpt")
                continued = client.completions.create(model="digits", prompt="1 2", max_tokens=4)
                # Three letters, and no template around them.
                assert continued.usage.prompt_tokens == 3
                # The run's own limit, not that of the model's positions.
                with pytest.raises(openai.BadRequestError, match="too long: 219 tokens > 127 max"):
                    chat(client, messages=[{"role": "user", "content": "x" * 200}])
        for base in ("", "/anthropic/api"):
            with anthropic.Anthropic(base_url=url + base, api_key="any", max_retries=0) as client:
                message = client.messages.create(
                    model="digits", messages=HI, max_tokens=8, extra_body={"temperature": 0}
                )
                texts.add("".join(getattr(block, "text", "") for block in message.content))
        assert len(texts) == 1


def test_checkpoint_of_a_run_that_goes_on_has_the_same_weights(run, tmp_path):
    with serving(run) as (url, _), openai.OpenAI(base_url=f"{url}/v1", api_key="any") as client:
        last = chat(client)
    going = tmp_path / "digits"
    going.symlink_to(run)
    set_status(run, "running")
    try:
        with serving(going) as (url, lines):
            assert "(step 3)" in lines[0]
            with openai.OpenAI(base_url=f"{url}/v1", api_key="any") as client:
                assert chat(client) == last
    finally:
        set_status(run, "finished")


def test_configured_keys_are_needed(run, tmp_path):
    file = tmp_path / "keys"
    file.touch(mode=0o600)
    file.write_text(f"{KEY}\n")
    with serving(run, "--keys_file", str(file)) as (url, lines):
        assert '-H "Authorization: Bearer $KEY"' in lines[2]
        body = {"model": "digits", "messages": HI, "max_tokens": 4}
        for header, status in ((KEY, 200), ("another-key-of-letters", 401), ("", 401)):
            headers = {"x-api-key": header}
            answer = httpx.post(
                f"{url}/v1/messages", json=body, headers=headers, timeout=60, trust_env=False
            )
            assert answer.status_code == status
        assert answer.json()["error"]["type"] == "authentication_error"
        assert httpx.get(f"{url}/health", trust_env=False).json() == {"status": "ok"}


def test_port_in_use_is_named_before_the_model_is_loaded(run, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert serve.main([str(run), "--port", port]) == 2
    said = capsys.readouterr().err
    assert said == (
        f"error: host='127.0.0.1', port={port}: cannot listen there: Address already in use\n"
    )
