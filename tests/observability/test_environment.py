"""Where a run ran."""

from importlib import metadata

from rl.observability.environment import describe_environment, read_environment, write_environment


def test_the_machine_is_told_as_its_kernel_has_it(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU: 3 GHz\nmodel name\t: other\n")
    (tmp_path / "meminfo").write_text("MemTotal:       25165824 kB\nMemFree:  1 kB\n")
    for number in range(2):
        gpu = tmp_path / "driver/nvidia/gpus" / f"0000:0{number}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(f"Model: \t\t Some GPU {number}\nIRQ:   \t\t 16\n")
    told = describe_environment(proc=tmp_path, variables={})
    assert told["cpu"] == "Some CPU: 3 GHz"
    assert told["memory_gib"] == 24
    assert told["gpus"] == ["Some GPU 0", "Some GPU 1"]
    assert told["packages"]["torch"] == metadata.version("torch")


def test_what_the_machine_does_not_tell_is_left_out(tmp_path):
    told = describe_environment(proc=tmp_path, variables={})
    assert not {"cpu", "memory_gib"} & set(told)
    assert told["gpus"] == []


def test_no_variable_is_told_but_those_that_hold_no_secrets():
    told = describe_environment(variables={"OMP_NUM_THREADS": "1", "SOME_API_KEY": "secret"})
    assert told["variables"] == {"OMP_NUM_THREADS": "1"}


def test_it_comes_back_as_it_was_written_and_an_older_run_has_none(tmp_path):
    write_environment(tmp_path / "environment.json")
    assert read_environment(tmp_path / "environment.json") == describe_environment()
    assert read_environment(tmp_path / "gone.json") == {}
    (tmp_path / "cut.json").write_text('{"host": "a')
    assert read_environment(tmp_path / "cut.json") == {}


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    write_environment(tmp_path / "gone" / "environment.json")
    assert "environment.json was not written: No such file" in caplog.text
