"""Which weights of a run's folder are served, and what is wrong with other folders."""

import json

import pytest

from rl import serve
from rl.serving.run_weights import find_weights, read_settings
from tests.support.trained_runs import set_status

VALUES = {
    "generator": {"max_model_len": 128, "dtype": "float16"},
    "renderer": {"kind": "qwen3", "thinking": False},
    "agents": {"announces_tools": False},
    "trainer": {"checkpoint": {"folder": "checkpoints"}},
}


@pytest.fixture
def run(tmp_path):
    """Folder of a finished run, with steps 20 and 100 and an export."""
    run = tmp_path / "my run"
    for name in ("step-20", "step-100", "hf"):
        (run / "checkpoints" / name).mkdir(parents=True)
    (run / "checkpoints" / "hf" / "model.safetensors").touch()
    write_config(run, VALUES)
    set_status(run, "finished")
    return run


def write_config(run, values):
    content = {"module": "no_such_module", "config": "tiny", "values": values}
    (run / "config.json").write_text(json.dumps(content))


def find(run, **options):
    return find_weights(run, read_settings(run), **options)


def test_settings_are_those_of_the_run_without_its_code(run):
    settings = read_settings(run)
    assert (settings.name, settings.max_model_len, settings.dtype) == ("my run", 128, "bfloat16")
    assert (settings.renderer.kind, settings.renderer.thinking) == ("qwen3", False)
    assert not settings.announces_tools


def test_finished_run_serves_its_last_weights(run):
    weights = find(run)
    assert (weights.folder.name, weights.step, weights.note) == ("hf", None, "")
    assert find(run, step=20).folder.name == "step-20"


def test_run_that_goes_on_serves_its_last_checkpoint_and_says_so(run):
    set_status(run, "running")
    weights = find(run)
    assert (weights.folder.name, weights.step) == ("step-100", 100)
    assert "goes on, or did not finish: serving its last checkpoint, step 100" in weights.note


def test_run_without_an_export_serves_its_last_checkpoint(run):
    (run / "checkpoints" / "hf" / "model.safetensors").unlink()
    assert find(run).step == 100
    assert "has no Hugging Face folder" in find(run).note


def test_checkpoints_may_lie_elsewhere(run, tmp_path):
    (run / "checkpoints").rename(tmp_path / "scratch")
    write_config(run, {"trainer": {"checkpoint": {"folder": str(tmp_path / "scratch")}}})
    assert find(run).folder == tmp_path / "scratch" / "hf"


def refuse(argv, capsys):
    assert serve.main(list(map(str, argv))) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    return printed.err


def test_folders_that_cannot_be_served_are_named_in_a_line(run, tmp_path, capsys):
    assert "there is no such folder" in refuse([tmp_path / "none"], capsys)
    assert "is not the folder of a run: it has no readable config.json" in refuse(
        [tmp_path], capsys
    )
    said = refuse([run, "--step", "21"], capsys)
    assert "--step 21: " in said
    assert "has no such checkpoint; its checkpoints: 20, 100" in said
    write_config(run, {"renderer": {"kind": "other"}})
    assert "renderer: " in refuse([run], capsys)
    write_config(run, {"generator": {"max_model_len": "long"}})
    assert "generator.max_model_len='long': must be above 1" in refuse([run], capsys)
    write_config(run, {"trainer": {"checkpoint": {"folder": "none"}}})
    assert f"has no checkpoint in {run / 'none'}" in refuse([run], capsys)


def test_addresses_that_cannot_be_served_are_named_in_a_line(run, capsys):
    assert "host='0.0.0.0': can be reached from other machines" in refuse(
        [run, "--host", "0.0.0.0"], capsys
    )
    assert "keys_file='none': " in refuse([run, "--keys_file", "none"], capsys)
