"""The machine and packages of a run."""

from importlib import metadata

from rl.observability.environment import describe_environment, read_environment, write_environment


def test_machine_is_described_from_proc(tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU: 3 GHz\nmodel name\t: other\n")
    (tmp_path / "meminfo").write_text("MemTotal:       25165824 kB\nMemFree:  1 kB\n")
    for number in range(2):
        gpu = tmp_path / "driver/nvidia/gpus" / f"0000:0{number}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(f"Model: \t\t Some GPU {number}\nIRQ:   \t\t 16\n")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SOME_API_KEY", "secret")
    told = describe_environment(proc=tmp_path)
    assert told["cpu"] == "Some CPU: 3 GHz"
    assert told["memory_gib"] == 24
    assert told["gpus"] == ["Some GPU 0", "Some GPU 1"]
    assert told["packages"]["torch"] == metadata.version("torch")
    assert told["variables"]["NCCL_DEBUG"] == "INFO"
    assert "SOME_API_KEY" not in told["variables"]
    assert not {"cpu", "memory_gib"} & set(describe_environment(proc=tmp_path / "nothing"))


def test_environment_is_read_back(tmp_path, caplog):
    write_environment(tmp_path / "environment.json")
    assert read_environment(tmp_path / "environment.json") == describe_environment()
    (tmp_path / "cut.json").write_text('{"host": "a')
    assert read_environment(tmp_path / "cut.json") == {}
    write_environment(tmp_path / "gone" / "environment.json")
    assert "environment.json was not written: No such file" in caplog.text
    assert read_environment(tmp_path / "gone" / "environment.json") == {}
