"""What a user can get wrong is refused before anything starts, and nothing is left behind."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from configs.sum_digits import tiny
from rl.config.entry import main
from rl.config.registry import resolve
from rl.config.serialize import write_json
from rl.distributed.process_group import World
from rl.folder_lock import having
from rl.models.qwen3 import model_registry
from rl.models.starting_point import write_random_model
from rl.observability.run_folder import RunFolder, read_status
from rl.training.checkpoint_files import MANIFEST, STATE, sum_of_file
from rl.training.engine import TrainingEngine
from rl.types import LoopPosition
from tests.training.parts import write_assets

FAULTY = ("--module", "tests.support.faulty_configs")


@pytest.fixture
def refused(tmp_path, capsys):
    """Starts a run that must be refused: exit status 2, and no run's folder."""
    dump_folder = tmp_path / "outputs"

    def start(*options: str) -> str:
        status: object
        try:
            status = main(
                ["--dump_folder", str(dump_folder), "--name", "run", *options],
                default_module="sum_digits",
                default_config="tiny",
                prog="test",
            )
        except SystemExit as error:
            status = error.code
        assert status == 2
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
        (("--trainer.optimizer.lr", "fast"), "--trainer.optimizer.lr: 'fast' is not of type float"),
        (("--loop.sampling.temperature", "0"), "temperature=0.0 cannot be trained on"),
        (("--trainer.parallelism.tensor_parallel_degree", "3"), "tensor_parallel_degree=3"),
        (("--trainer.num_procs", "0"), "num_procs=0"),
        (("--trainer.parallelism.pipeline_parallel_degree", "2"), "pipeline_parallel_degree=2: must be 1"),
        (("--trainer.parallelism.expert_parallel_degree", "2"), "a dense model has no experts"),
        (("--trainer.parallelism.context_parallel_degree", "2"), "context_parallel_degree=2"),
        (("--generator.max_model_len", "4096"), "max_model_len=4096"),
        (("--generator.max_model_len", "40"), "the context leaves room for 8"),
        (("--loop.episode.max_tokens", "40"), "the context leaves room for 8"),
        (("--loop.episode.max_turns", "0"), "max_turns=0 is less than 1"),
        (("--loop.evaluation.num_samples", "-1"), "num_samples=-1 is less than 0"),
        (("--loop.kl_reward.coef", "-1"), "coef=-1.0: must be a finite number of at least 0"),
        (("--loop.sampling.temperature", "0.005"), "temperature=0.005"),
        (("--loop.max_logprob_diff", "nan"), "max_logprob_diff=nan"),
        (("--warmup.lr", "-1"), "lr=-1.0"),
        (("--loop.advantage.eps", "nan"), "eps=nan: must be at least 0 and finite"),
        (("--reward.time_limit_s", "inf"), "time_limit_s=inf: must be above 0 and at most 86400 (a day)"),
        (("--seed", "100000000000000000000"), "seed=100000000000000000000: must be at least 0 and below"),
        (("--trainer.training.seed", "-1"), "seed=-1: must be at least 0"),
        (("--generator.seed", "4294967296"), "generator.seed=4294967296: must be at least 0 and below"),
        (("--name", "starting_points"), "name='starting_points' is the folder of the starting points"),
        (("--task.num_integers", "3"), "more than loop.sampling.max_tokens=32"),
        (("--hf_assets_path", "/no/such/folder"), "/no/such/folder does not exist"),
        (("--task.num_integers", "9"), "num_integers=9"),
        (
            ("--trainer.checkpoint.keep_latest_k", "1"),
            "trainer.checkpoint: keep_latest_k=1: if that",
        ),
        (("--loop.max_sample_tokens", "1"), "max_sample_tokens=1: must be at least 2"),
        (("--loop.max_sample_tokens", "16"), "loop.max_sample_tokens=16: must be from 25, as the shortest"),
        (("--loop.max_sample_tokens", "128"), "to 127, as generator.max_model_len=128 is a limit already"),
        (
            ("--config", "tiny_tp2", "--batch_invariant", "True"),
            "error: trainer.parallelism.loss_parallel=True: must be False",
        ),
        (("--trainer.checkpoint.load_step", "5"), "load_step=5: there is no checkpoint to load"),
        (
            ("--trainer.checkpoint.initial_load_path", "/no/such"),
            "path=/no/such: there is no such folder",
        ),
        (("--trainer.checkpoint.folder", "here"), "folder='here': must be 'checkpoints'"),
        (("--trainer.checkpoint.async_mode", "async_with_pinned_mem"), "page-locked memory needs a GPU"),
        (
            ("--trainer.lr_scheduler.decay", "linear", "--trainer.lr_scheduler.total_steps", "40"),
            "trainer.lr_scheduler.total_steps=40 with decay='linear': must be 80, the optimizer steps of",
        ),
        ((*FAULTY, "--config", "nan_reward"), "reward 'broken' is nan"),
    ],
)
def test_bad_options_are_refused_by_name_value_and_what_is_valid(refused, options, says):
    assert says in refused(*options)


def test_an_incomplete_assets_folder_is_refused_by_the_missing_file(refused, assets):
    (assets / "tokenizer.json").rename(assets / "hidden")
    try:
        assert "tokenizer.json" in refused("--hf_assets_path", str(assets))
    finally:
        (assets / "hidden").rename(assets / "tokenizer.json")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON: Expecting property name"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json holds list, not an object"),
        ("tokenizer_config.json", '{"eos_token": 5}', "tokenizer_config.json has a value that transformers"),
        ("tokenizer.json", "{", "tokenizer.json is malformed: EOF while parsing"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id='x' is not a token id"),
        (
            "generation_config.json",
            '{"eos_token_id": 99999}',
            "eos_token_id has 99999; the model has vocab_s",
        ),
    ],
)
def test_a_malformed_tokenizer_is_refused_by_its_file_and_what_is_wrong(refused, assets, name, content, says):
    original = (assets / name).read_text()
    try:
        (assets / name).write_text(content)
        told = refused("--hf_assets_path", str(assets))
        assert told.startswith("error: ")
        assert f"{assets}" in told
        assert says in told
        assert "Traceback" not in told
    finally:
        (assets / name).write_text(original)


@pytest.fixture(scope="module")
def checkpoints(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with steps 2 and 3 of the tiny model."""
    engine = TrainingEngine(
        config=tiny().trainer, model_spec=model_registry("tiny"), hf_assets_path=str(assets), world=World()
    )
    folder = tmp_path_factory.mktemp("checkpoints")
    for step in (2, 3):
        position = LoopPosition(step=step, num_problems=8 * step)
        engine.save_checkpoint(str(folder / f"step-{step}"), position=position)
    return folder


def test_a_checkpoint_that_cannot_be_loaded_is_refused(refused, checkpoints, tmp_path):
    load = ("--trainer.checkpoint.initial_load_path", str(checkpoints))
    says = refused(*load, "--trainer.checkpoint.load_step", "4")
    assert f"load_step=4: {checkpoints} has no such step, it has 2, 3" in says
    going_on = ("--trainer.checkpoint.initial_load_model_only", "False", "--loop.num_steps", "3")
    assert "loop.num_steps=3: " in (says := refused(*load, *going_on))
    assert "step-3 has done 3 steps already; give more to continue" in says
    other = write_assets(tmp_path / "other")
    says = refused(*load, "--hf_assets_path", other)
    assert "model.embed_tokens.weight has shape [320, 128], the model needs [320, 36]" in says
    says = refused(*load, "--config", "tiny_moe")
    assert "tensor model.layers.0.feed_forward.router.weight is missing, the model needs it of shape" in says
    assert "another architecture, a dense model, and this run's is a mixture of experts" in says
    says = refused(*load, *going_on[:2], "--trainer.optimizer.name", "Muon")
    assert "it was made with Adam or AdamW, this run has Muon" in says
    assert "'nothing' names nothing" in refused(*load, "--trainer.checkpoint.exclude_from_loading", "nothing")
    tensors = checkpoints / "step-3" / "__0_0.distcp"
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-1])
    try:
        assert f"{tensors} is truncated: it has {len(whole) - 1} bytes, {len(whole)} were written" in refused(
            *load
        )
    finally:
        tensors.write_bytes(whole)


def test_a_reference_policy_whose_weights_are_gone_is_refused(refused, checkpoints, assets):
    load = ["--trainer.checkpoint.initial_load_path", str(checkpoints)]
    load += ["--trainer.checkpoint.initial_load_model_only", "False", "--trainer.reference.enable", "True"]
    weights = assets / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    try:
        assert f"{weights}" in refused(*load)  # of the run that saved, which this one did not start from
    finally:
        weights.write_bytes(whole)
    elsewhere = assets.rename(assets.with_name("elsewhere"))
    try:
        says = refused(*load)
    finally:
        elsewhere.rename(assets)
    assert f"reference.enable=True: the run of {checkpoints / 'step-3'} started from {assets}, whose" in says
    assert "which is not there; put it back, or start from it with initial_load_model_only" in says


def test_a_run_does_not_clear_what_it_is_to_load(checkpoints, tmp_path, capsys):
    with RunFolder.create(tmp_path, "good") as folder:
        shutil.copytree(checkpoints / "step-3", folder.checkpoints / "step-3")
        folder.mark_finished()
    options = ["--dump_folder", str(tmp_path), "--name", "good", "--overwrite"]
    options += ["--trainer.checkpoint.initial_load_path", str(folder.checkpoints)]
    assert main(options, default_module="sum_digits", default_config="tiny", prog="test") == 2
    told = capsys.readouterr().err
    assert (
        f"trainer.checkpoint.initial_load_path='{folder.checkpoints}' lies in the folder of the run" in told
    )
    assert (folder.checkpoints / "step-3" / "__0_0.distcp").is_file()
    assert read_status(folder.path) == "finished"


def test_a_checkpoint_of_another_architecture_is_refused(refused, assets):
    path = assets / "config.json"
    original = path.read_text()
    try:
        path.write_text(
            json.dumps(json.loads(original) | {"model_type": "llama", "architectures": ["Llama"]})
        )
        assert "llama" in refused("--hf_assets_path", str(assets)).lower()
        path.write_text(json.dumps(json.loads(original) | {"num_hidden_layers": 4}))
        assert "layers.3" in refused("--hf_assets_path", str(assets))
    finally:
        path.write_text(original)


def test_a_folder_of_another_size_is_refused_by_a_config_that_names_one(refused, assets):
    says = refused("--config", "qwen3_0_6b", "--hf_assets_path", str(assets))
    assert "embed_tokens" in says
    assert "1024" in says
    assert "128" in says


def test_a_dump_folder_that_is_a_file_is_refused(refused, tmp_path):
    (tmp_path / "outputs").write_text("")
    assert "is not a folder" in refused()


def test_a_refused_run_leaves_an_earlier_one_of_its_name_as_it_was(tmp_path, capsys):
    with RunFolder.create(tmp_path, "good") as folder:
        folder.metrics.write_text("{}")
        folder.mark_finished()
    options = [
        "--dump_folder",
        str(tmp_path),
        "--name",
        "good",
        "--overwrite",
        "--generator.max_model_len",
        "40",
    ]
    assert main(options, default_module="sum_digits", default_config="tiny", prog="test") == 2
    assert folder.metrics.read_text() == "{}"
    assert read_status(folder.path) == "finished"


def test_a_run_that_would_replace_what_it_starts_from_is_refused(tmp_path, capsys):
    with RunFolder.create(tmp_path, "good") as folder:
        weights = write_random_model(folder.checkpoints / "hf", spec=model_registry("tiny"), seed=0)
        folder.mark_finished()
    before = {file.name: file.read_bytes() for file in weights.iterdir()}
    options = [
        "--dump_folder",
        str(tmp_path),
        "--name",
        "good",
        "--overwrite",
        "--hf_assets_path",
        str(weights),
    ]
    assert main(options, default_module="sum_digits", default_config="tiny", prog="test") == 2
    assert f"hf_assets_path='{weights}' lies in the folder of the run" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in weights.iterdir()} == before
    assert read_status(folder.path) == "finished"


def resume(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> str:
    """A run that must be refused, and leave its folder as it is."""
    before = {
        path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"
    }
    argv = ["--resume", str(folder), *options]
    status = main(argv, default_module="sum_digits", default_config="tiny", prog="test")
    assert status == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    after = {path: path.read_bytes() for path in before if path.exists()}
    assert after == before
    return told


@pytest.fixture
def ended(checkpoints: Path, tmp_path: Path) -> RunFolder:
    """The folder of a run that ended after three steps, with its process."""
    with RunFolder.create(tmp_path / "outputs", "ended") as folder:
        write_json(resolve("tests.support.faulty_configs", "short"), folder.config_json)
        folder.checkpoints.rmdir()
        shutil.copytree(checkpoints, folder.checkpoints)
        folder.mark_finished()
    return folder


def test_a_finished_run_goes_on_only_for_more_steps_and_from_a_checkpoint(ended, capsys):
    says = resume(capsys, ended.path)
    assert f"{ended.path} holds a finished run of 3 steps: raise loop.num_steps=3 to go on with it" in says
    says = resume(capsys, ended.path, "--loop.num_steps", "2")
    assert "loop.num_steps=2: " in says
    assert "step-3 has done 3 steps already; must be at least as many" in says
    shutil.rmtree(ended.checkpoints)
    says = resume(capsys, ended.path, "--loop.num_steps", "5")
    assert f"{ended.path} holds a finished run and no checkpoint that it could go on from" in says


def test_a_run_that_goes_on_in_another_process_is_not_resumed(ended, capsys):
    with RunFolder.resume(ended.path):
        says = resume(capsys, ended.path, "--loop.num_steps", "5")
    assert f"{ended.path} is in use by process" in says
    assert "only a run that has ended can be resumed" in says


def test_a_run_is_not_resumed_with_a_tokenizer_that_has_changed_unless_that_is_meant(ended, capsys):
    for folder in ended.checkpoints.glob("step-*"):
        state = json.loads((folder / STATE).read_text())
        state["tokenizer"] = {"folder": "/models/before", "parts": {"tokenizer.json": "0" * 64}}
        (folder / STATE).write_text(json.dumps(state))
        manifest = json.loads((folder / MANIFEST).read_text())
        manifest["files"][STATE] = dataclasses.asdict(sum_of_file(folder / STATE))
        (folder / MANIFEST).write_text(json.dumps(manifest))
    more = ("--loop.num_steps", "5")
    says = resume(capsys, ended.path, *more)
    assert "step-3 was made with the tokenizer of /models/before, this run has that of" in says
    assert "add tokenizer to checkpoint.exclude_from_loading" in says
    meant = ("--trainer.checkpoint.exclude_from_loading", "tokenizer")
    # Refused for the next reason, and no longer for this one.
    says = resume(capsys, ended.path, *more, *meant, "--trainer.optimizer.name", "Muon")
    assert "it was made with Adam or AdamW, this run has Muon" in says


def test_a_run_is_not_resumed_with_a_model_that_its_checkpoint_is_not_of(ended, capsys):
    more = ("--loop.num_steps", "5", "--trainer.optimizer.name", "Muon")
    assert "it was made with Adam or AdamW, this run has Muon" in resume(capsys, ended.path, *more)
    assert read_status(ended.path) == "finished"


def test_a_finished_run_whose_last_checkpoint_is_damaged_is_refused_and_stays_as_it_is(ended, capsys):
    ended.metrics.write_text('{"step": 3, "reward/mean": 0.5}\n')
    state = ended.checkpoints / "step-3" / STATE
    state.write_text(state.read_text().replace("3", "4", 1))
    says = resume(capsys, ended.path)
    assert f"{ended.path} holds a finished run of 3 steps: raise loop.num_steps=3 to go on with it" in says
    assert (ended.checkpoints / "step-3").is_dir()


def test_a_folder_of_checkpoints_in_which_another_run_saves_is_refused_before_anything_is_replaced(
    tmp_path, capsys
):
    shared = tmp_path / "shared"
    with RunFolder.create(tmp_path, "good") as folder:
        folder.metrics.write_text("{}")
        folder.mark_finished()
    options = ["--dump_folder", str(tmp_path), "--name", "good", "--overwrite", "True"]
    options += ["--trainer.checkpoint.folder", str(shared)]
    with having(shared, as_what="x", otherwise="x"):
        assert main(options, default_module="sum_digits", default_config="tiny", prog="test") == 2
    told = capsys.readouterr().err
    assert f"{shared} is in use by process" in told
    assert "choose another trainer.checkpoint.folder, or trainer.checkpoint.load_only" in told
    assert folder.metrics.read_text() == "{}"
    assert read_status(folder.path) == "finished"
