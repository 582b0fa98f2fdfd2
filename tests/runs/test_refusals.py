"""User errors that are refused before anything starts, without leaving anything behind."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from configs.sum_digits import tiny
from rl.config.cli import main
from rl.config.json import write_json
from rl.config.registry import resolve
from rl.distributed.process_group import World
from rl.models.files.hf import write_random_model
from rl.models.qwen3 import model_registry
from rl.observability.run_folder import RunFolder, read_status
from rl.training.engine import TrainingEngine
from rl.types import LoopPosition
from rl.utils.files import hold_folder_lock
from tests.support.fake_hub import fake_hub
from tests.support.gguf_files import random_tensors, write_gguf


def status_of(*options: str) -> object:
    try:
        return main(options, default_module="sum_digits", default_config="tiny", prog="test")
    except SystemExit as error:
        return error.code


@pytest.fixture
def refused(tmp_path, capsys):
    """Return a function that starts a run, expects exit status 2 and no run folder, and returns
    stderr.
    """
    dump_folder = tmp_path / "outputs"

    def start(*options: str) -> str:
        assert status_of("--dump_folder", str(dump_folder), "--name", "run", *options) == 2
        assert not dump_folder.is_dir()
        return capsys.readouterr().err

    return start


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(
        tmp_path_factory.mktemp("assets") / "model", spec=model_registry("tiny"), seed=0
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--config", "tinny"), "tinny"),
        (("--module", "sum_digit"), "sum_digits"),
        (("--trainer.optimizer.learning_rate", "1"), "--trainer.optimizer.lr"),
        (("--generator.max_model_len", "40"), "the context leaves room for 8"),
        (
            ("--seed", "100000000000000000000"),
            "seed=100000000000000000000: must be at least 0 and below",
        ),
        (
            ("--name", "starting_points"),
            "name='starting_points' is a folder that runs share",
        ),
        (("--task.num_integers", "3"), "more than loop.sampling.max_tokens=32"),
        (("--hf_assets_path", "/no/such/folder"), "/no/such/folder does not exist"),
        (
            ("--hf_assets_path", "org/model"),
            "org/model is no folder here, and it is not downloaded",
        ),
        (
            ("--hf_assets_path", "package:none"),
            "package:none: there is no such package: install it first",
        ),
        (
            ("--hf_assets_path", "/tmp", "--hf_revision", "v1"),
            "hf_revision='v1': must be None, as /tmp is not",
        ),
        (
            ("--trainer.checkpoint.initial_load_path", "/no/such"),
            "path=/no/such: there is no such folder",
        ),
        (
            ("--trainer.lr_scheduler.decay", "linear", "--trainer.lr_scheduler.total_steps", "40"),
            "trainer.lr_scheduler.total_steps=40 with decay='linear': must be 0 or 80, the "
            "optimizer steps of",
        ),
    ],
)
def test_bad_options_are_refused_by_name_value_and_valid_values(refused, options, says):
    assert says in refused(*options)


def test_incomplete_assets_folder_is_refused_by_the_missing_file(refused, assets):
    (assets / "tokenizer.json").rename(assets / "hidden")
    try:
        assert "tokenizer.json" in refused("--hf_assets_path", str(assets))
    finally:
        (assets / "hidden").rename(assets / "tokenizer.json")


GIVEN = "--hf_assets_path {}"
LOADED = "--trainer.checkpoint.initial_load_in_hf True --trainer.checkpoint.initial_load_path {}"


@pytest.mark.parametrize(
    ("change", "options", "says"),
    [
        ({"model_type": "phi3"}, GIVEN, "model_type='phi3' is not supported: must be one of "
                                        "gemma3_text, llama, "),
        ({"model_type": "phi3"}, f"{GIVEN} --any_model_size", "docs/models.md says how to add a "
                                                              "family"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, GIVEN, "rope_type 'dynamic', which is not "
                                                               "supported: must be"),
        ({"rope_parameters": {"rope_theta": 5e5}}, LOADED, "has rope.theta=500000.0, not 10000.0: "
                                                           "choose a folder of"),
        (
            {"rope_parameters": {"rope_theta": 5e5}, "rms_norm_eps": 1e-5}, GIVEN,
            "than qwen3 tiny: config.json has norm_eps=1e-05, not 1e-06; rope.theta=500000.0, not "
            "10000.0: set any_model_size=True",
        ),
    ],
)  # fmt: skip
def test_folder_of_another_model_is_refused_by_its_fields(refused, assets, change, options, says):
    file = assets / "config.json"
    text = file.read_text()
    file.write_text(json.dumps(json.loads(text) | change))
    try:
        told = refused(*f"--any_model_size False {options.format(assets)}".split())
    finally:
        file.write_text(text)
    assert told.startswith(f"error: {assets}: ")
    assert says in told


def test_tokenizer_with_more_tokens_than_the_model_is_refused(refused, tmp_path):
    spec = model_registry("tiny")
    small = replace(spec, model=replace(spec.model, vocab_size=256))
    folder = write_random_model(tmp_path / "small", spec=small, seed=0)
    says = refused("--hf_assets_path", str(folder), "--any_model_size", "True")
    assert (
        "ids must be from 0 to 255: give the tokenizer that the weights were trained with" in says
    )


def test_template_that_rewrites_replies_is_refused_for_several_turns(refused, assets):
    template = assets / "chat_template.jinja"
    text = template.read_text()
    template.write_text(text.replace("message.content", "message.content | trim"))
    try:
        says = refused("--module", "alphabet_sort", "--hf_assets_path", str(assets))
    finally:
        template.write_text(text)
    assert (
        "does not round-trip, which a task of several turns needs: it trims spaces and line ends"
        in says
    )


def test_unknown_revision_is_refused_with_the_valid_ones(refused, assets, tmp_path):
    with fake_hub({"org/model": assets}, cache=tmp_path / "cache"):
        says = refused("--hf_assets_path", "org/model", "--hf_revision", "v9")
    assert (
        says
        == "error: org/model: hf_revision='v9' does not exist: must be main, v1.0 or a commit\n"
    )


def test_gguf_of_another_architecture_is_refused_with_the_known_ones(refused, tmp_path):
    file = write_gguf(tmp_path / "a.gguf", random_tensors(), architecture="phi3")
    says = refused("--hf_assets_path", str(file))
    assert f"{file}: general.architecture='phi3' is not supported: must be one of llama, " in says


@pytest.fixture(scope="module")
def checkpoints(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with steps 2 and 3 of the tiny model."""
    engine = TrainingEngine(
        config=tiny().trainer,
        model_spec=model_registry("tiny"),
        hf_assets_path=str(assets),
        world=World(),
    )
    folder = tmp_path_factory.mktemp("checkpoints")
    for step in (2, 3):
        position = LoopPosition(step=step, num_problems=8 * step)
        engine.save_checkpoint(str(folder / f"step-{step}"), position=position)
    return folder


def test_checkpoint_that_cannot_be_loaded_is_refused(refused, checkpoints):
    load = ("--trainer.checkpoint.initial_load_path", str(checkpoints))
    going_on = ("--trainer.checkpoint.initial_load_model_only", "False", "--loop.num_steps", "3")
    assert "loop.num_steps=3: " in (says := refused(*load, *going_on))
    assert "step-3 has done 3 steps already; give more to continue" in says
    says = refused(*load, "--config", "tiny_moe")
    assert "tensor model.layers.0.feed_forward.router.weight" in says


def test_dump_folder_that_is_a_file_is_refused(refused, tmp_path):
    (tmp_path / "outputs").write_text("")
    assert "cannot be a run's folder: File exists" in refused()


def test_run_does_not_clear_what_it_loads(checkpoints, tmp_path, capsys):
    with RunFolder.create(tmp_path, "good") as folder:
        shutil.copytree(checkpoints / "step-3", folder.checkpoints / "step-3")
        folder.mark_finished()
    before = {path: path.read_bytes() for path in folder.checkpoints.rglob("*") if path.is_file()}
    load = ("--trainer.checkpoint.initial_load_path", str(folder.checkpoints))
    assert status_of("--dump_folder", str(tmp_path), "--name", "good", "--overwrite", *load) == 2
    assert (
        f"initial_load_path='{folder.checkpoints}' lies in the folder of the run"
        in capsys.readouterr().err
    )
    assert {
        path: path.read_bytes() for path in folder.checkpoints.rglob("*") if path.is_file()
    } == before
    assert read_status(folder.path) == "finished"


def resume(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> str:
    """Resume a run, expect a refusal and an unchanged folder; return stderr."""
    before = {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }
    assert status_of("--resume", str(folder), *options) == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    after = {path: path.read_bytes() for path in before if path.exists()}
    assert after == before
    return told


@pytest.fixture
def ended(checkpoints: Path, tmp_path: Path) -> RunFolder:
    """The folder of a run that ended after three steps, and the run's process id."""
    with RunFolder.create(tmp_path / "outputs", "ended") as folder:
        write_json(resolve("tests.support.faulty_configs", "short"), folder.config_json)
        folder.checkpoints.rmdir()
        shutil.copytree(checkpoints, folder.checkpoints)
        folder.mark_finished()
    return folder


def test_finished_run_is_resumed_only_for_more_steps_and_from_a_checkpoint(ended, capsys):
    says = resume(capsys, ended.path)
    assert (
        f"{ended.path} holds a finished run of 3 steps: raise loop.num_steps=3 to go on with it"
        in says
    )
    says = resume(capsys, ended.path, "--loop.num_steps", "2")
    assert "holds a finished run of 3 steps: raise loop.num_steps=2" in says
    shutil.rmtree(ended.checkpoints)
    says = resume(capsys, ended.path, "--loop.num_steps", "5")
    assert f"{ended.path} holds a finished run and no checkpoint that it could go on from" in says


def test_run_that_is_active_in_another_process_is_not_resumed(ended, capsys):
    with RunFolder.resume(ended.path):
        says = resume(capsys, ended.path, "--loop.num_steps", "5")
    assert f"{ended.path} is in use by process" in says
    assert "only a run that has ended can be resumed" in says


def test_checkpoint_folder_in_use_by_another_run_is_refused_before_anything_is_replaced(
    tmp_path, capsys
):
    shared = tmp_path / "shared"
    with RunFolder.create(tmp_path, "good") as folder:
        folder.metrics.write_text("{}")
        folder.mark_finished()
    options = ["--dump_folder", str(tmp_path), "--name", "good", "--overwrite", "True"]
    options += ["--trainer.checkpoint.folder", str(shared)]
    with hold_folder_lock(shared, as_what="x", otherwise="x"):
        assert status_of(*options) == 2
    told = capsys.readouterr().err
    assert f"{shared} is in use by process" in told
    assert "choose another trainer.checkpoint.folder, or trainer.checkpoint.load_only" in told
    assert folder.metrics.read_text() == "{}"
    assert read_status(folder.path) == "finished"
