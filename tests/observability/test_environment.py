"""The machine and packages of a run."""

import socket
from importlib import metadata

from rl.observability.machine import describe_environment, write_environment
from rl.reporting.data import read_environment


def test_machine_is_described_without_secrets(tmp_path, monkeypatch):
    for number in range(2):
        gpu = tmp_path / f"0000:0{number}:00.0"
        gpu.mkdir()
        (gpu / "information").write_text(f"Model: \t\t Some GPU {number}\nIRQ:   \t\t 16\n")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SOME_API_KEY", "secret")
    told = describe_environment(gpus=tmp_path)
    assert told["host"] == socket.gethostname()
    assert told["memory_gib"] > 0
    assert told["gpus"] == ["Some GPU 0", "Some GPU 1"]
    assert told["packages"]["torch"] == metadata.version("torch")
    assert told["variables"]["NCCL_DEBUG"] == "INFO"
    assert "SOME_API_KEY" not in told["variables"]


def test_environment_is_read_back(tmp_path, caplog):
    write_environment(tmp_path / "environment.json")
    assert read_environment(tmp_path / "environment.json") == describe_environment()
    (tmp_path / "cut.json").write_text('{"host": "a')
    assert read_environment(tmp_path / "cut.json") == {}
    write_environment(tmp_path / "gone" / "environment.json")
    assert "environment.json was not written: No such file" in caplog.text
