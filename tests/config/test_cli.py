import math
from pathlib import Path

import pytest

from rl.config.cli import parse_cli
from rl.config.json import write_json
from tests.config import example_configs
from tests.config.example_configs import ClipLoss, Optimizer, SgdOptimizer, Warmup

MODULE = "tests.config.example_configs"


def run_of(*argv, config="tiny"):
    return parse_cli(argv, default_module=MODULE, default_config=config)


def parse(*argv, config="tiny"):
    return run_of(*argv, config=config).config


def error_of(capsys, *argv, config="tiny"):
    with pytest.raises(SystemExit) as stopped:
        parse(*argv, config=config)
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_module_and_config_choose_the_function():
    argv = ["--module", MODULE, "--config=large"]
    run = parse_cli(argv, default_module="nowhere", default_config="tiny")
    assert run == run_of(config="large")
    assert (run.module, run.function) == (MODULE, "large")
    assert run.config == example_configs.large()


@pytest.mark.parametrize(
    ("argv", "read", "expected"),
    [
        (["--trainer.optimizer.lr", "3e-4"], lambda c: c.trainer.optimizer.lr, 3e-4),
        (["--trainer.optimizer.lr=3e-4"], lambda c: c.trainer.optimizer.lr, 3e-4),
        (["--trainer.optimizer.max_norm", "inf"], lambda c: c.trainer.optimizer.max_norm, math.inf),
        (["--trainer.optimizer.max-norm", "2"], lambda c: c.trainer.optimizer.max_norm, 2.0),
        (["--trainer.optimizer.weight_decay", "0.1"], lambda c: c.trainer.optimizer.weight_decay,
            0.1),
        (["--trainer.optimizer.weight_decay", "None"], lambda c: c.trainer.optimizer.weight_decay,
            None),
        (["--trainer.optimizer.betas", "0.8", "0.9"], lambda c: c.trainer.optimizer.betas,
            (0.8, 0.9)),
        (["--trainer.optimizer.kind", "foreach"], lambda c: c.trainer.optimizer.kind, "foreach"),
        (["--stop_token_ids", "3", "-4"], lambda c: c.stop_token_ids, (3, -4)),
        (["--stop_token_ids"], lambda c: c.stop_token_ids, ()),
        (["--name", "-dash"], lambda c: c.name, "-dash"),
        (["--dump_folder", "/x/y"], lambda c: c.dump_folder, Path("/x/y")),
        (["--trainer.loss.clip_high", "0.3"], lambda c: c.trainer.loss, ClipLoss(clip_high=0.3)),
        (["--overwrite"], lambda c: c.overwrite, True),
        (["--overwrite", "false"], lambda c: c.overwrite, False),
        (["--warmup.num_steps", "7"], lambda c: c.warmup, Warmup.Config(num_steps=7)),
        (["--warmup", "None"], lambda c: c.warmup, None),
        (["--trainer.reference", "None"], lambda c: c.trainer.reference, None),
        (["--warmup.num_steps", "5", "--warmup.num_steps", "6"], lambda c: c.warmup.num_steps, 6),
    ],
)  # fmt: skip
def test_option_sets_exactly_one_leaf_with_its_type(argv, read, expected):
    config = parse(*argv)
    assert read(config) == expected
    assert type(read(config)) is type(expected)


def test_element_of_a_sequence_is_set_by_its_index():
    config = parse("--schedule.1.num_steps", "9", "--stages.1.lr", "0.5", config="large")
    assert config.schedule == (Warmup.Config(num_steps=1), Warmup.Config(num_steps=9))
    assert config.stages == (Warmup.Config(num_steps=7), Optimizer.Config(lr=0.5))


def test_field_added_by_a_subclass_in_a_nested_place_is_an_option():
    config = parse("--trainer.optimizer.momentum", "0.5", config="with_momentum")
    assert config.trainer.optimizer == SgdOptimizer.Config(lr=1e-2, momentum=0.5)
    assert type(config.trainer.optimizer.build()) is SgdOptimizer


def test_unknown_key_names_the_nearest(capsys):
    for typo in ("--trainer.optimzer.lr", "--trainer.optimizer.lrr"):
        assert "did you mean --trainer.optimizer.lr" in error_of(capsys, typo, "1")
    assert "did you mean --lr\n" in error_of(capsys, "--lrr", "1")
    assert "did you mean --trainer.compile_model" in error_of(capsys, "--compile_mode", "1")
    assert "did you mean --trainer.sequence_length" in error_of(capsys, "--sequence_lenght", "1")
    several = error_of(capsys, "--num_steps", "1", config="large")
    assert "did you mean --warmup.num_steps or " in several
    assert several.count(".num_steps") == 3
    assert "--zzzzzz: no such option; --help lists all" in error_of(capsys, "--zzzzzz", "1")


@pytest.mark.parametrize(
    ("argv", "config", "message"),
    [
        (["--trainer.optimizer.lr", "abc"], "tiny", "--trainer.optimizer.lr: 'abc' is not of type "
                                                    "float"),
        (["--trainer.optimizer.weight_decay", "x"], "tiny", "'x' is not of type float | None"),
        (["--trainer.optimizer.betas", "0.9"], "tiny", "'0.9' is not of type tuple[float, float]"),
        (["--trainer.optimizer.kind", "slow"], "tiny", "'slow' is not of type 'fused' | 'foreach'"),
        (["--trainer.sequence_length", "1e5"], "tiny", "'1e5' is not of type int"),
        (["--trainer.sequence_length"], "tiny", "'nothing' is not of type int"),
        (["--trainer.sequence_length", "1", "2"], "tiny", "'1 2' is not of type int"),
        (["--overwrite", "yes"], "tiny", "--overwrite: 'Yes' is not of type bool"),
        (["stray"], "tiny", "'stray' belongs to no option"),
        (["--trainer.optimizer.lr", "-1"], "tiny", "trainer.optimizer.lr must be at least 0, got "
                                                   "-1.0"),
        # A parent checks the values of its children.
        (["--trainer.sequence_length", "2048"], "tiny", "error: trainer.sequence_length is 2048, "
                                                        "at most 1024"),
        (["--spec", "x"], "tiny", "--spec: holds code"),
        (["--spec.flavor", "x"], "tiny", "no such option"),
        (["--warmup", "3"], "tiny", "has fields of its own: --warmup.num_steps; --warmup None "
                                    "turns it off"),
        (["--warmup.num_steps", "3"], "without_warmup", "warmup is None in this config"),
        (["--warmup", "x"], "without_warmup", "warmup: is None in this config"),
        (["--stages", "1"], "tiny", "is empty in this config; a registry function can turn it on"),
        (["--stages.0.num_steps", "1"], "tiny", "stages is empty in this config"),
        (["--warmup", "None", "--warmup.num_steps", "3"], "tiny",
            "turns off what --warmup.num_steps sets"),
        (["--module", "no_such_task"], "tiny", "--module no_such_task: no such module; in configs "
                                               "are: "),
        (["--module", "../x"], "tiny", "no such module"),
        ([], "huge", "there are: tiny, large, with_momentum, unannotated, without_warmup, "
                     "wrong_return"),
        ([], None, "there are: tiny, large"),
        ([], "wrong_return", "wrong_return() returned a dict"),
        (["--explain", "yaml"], "tiny", "--explain yaml: must be text, full or json, or nothing"),
        (["--from_json", "x", "--config", "tiny"], "tiny", "leave out"),
        (["--from_json", "/no/such.json"], "tiny", "/no/such.json: No such file or directory"),
        (["--resume", "/no/such"], "tiny", "--resume /no/such: not the folder of a run"),
        *((["--resume", "x", *beside], "tiny", f"leave out {beside[0]}") for beside in (
            ("--name", "other"), ("--dump_folder", "y"), ("--overwrite",))),
        *((["--resume", "x", *beside], "tiny", "leave out") for beside in (
            ("--module", MODULE), ("--config", "tiny"), ("--from_json", "x"))),
    ],
)  # fmt: skip
def test_wrong_option_is_an_error_that_says_what_is_valid(capsys, argv, config, message):
    assert message in error_of(capsys, *argv, config=config)


def test_module_that_fails_to_import_something_is_no_missing_module(capsys):
    with pytest.raises(SystemExit):
        parse("--module", "tests.config.example_broken")
    error = capsys.readouterr().err
    assert "ModuleNotFoundError: No module named 'no_such_dependency'" in error
    assert "no such module" not in error


def test_help_shows_every_leaf_with_type_default_and_docstring(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse("--help", config="large")
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for shown in (
        "--trainer.optimizer.lr float Peak learning rate. (default: 0.0003)",
        "--trainer.loss.clip_high float (default: 0.28)",
        "--schedule.1.num_steps int",
        "--warmup None Supervised start. (None turns it off)",
        "--trainer.reference None A frozen reference; None costs nothing. (None in this config)",
        "--overwrite bool",
        "--from_json str",
    ):
        assert shown in text
    assert "--spec" not in text
    assert "--converters" not in text


def test_run_starts_again_from_its_json_and_options_override_it(tmp_path):
    run = run_of("--trainer.optimizer.lr", "0.25", "--warmup", "None", config="large")
    write_json(run, tmp_path / "config.json")
    again = run_of("--from_json", str(tmp_path / "config.json"), "--trainer.sequence_length", "64")
    assert (again.module, again.function) == (MODULE, "large")
    run.config.trainer.sequence_length = 64
    assert again.config == run.config
    assert again.config.transform is example_configs.plus_one  # code comes from the function


def test_from_json_resets_name_and_overwrite(tmp_path):
    path = tmp_path / "config.json"
    write_json(run_of("--name", "first", "--overwrite", "--dump_folder", "x"), path)
    again = parse("--from_json", str(path))
    assert (again.name, again.overwrite, again.dump_folder) == (None, False, Path("x"))
    again = parse("--from_json", str(path), "--name", "second", "--overwrite")
    assert (again.name, again.overwrite) == ("second", True)
    # Neither does a name that the registry function sets, which the first run of it has.
    write_json(run_of(config="unannotated"), path)
    assert parse("--from_json", str(path)).name is None


@pytest.fixture
def killed(tmp_path):
    """The folder of a run."""
    folder = tmp_path / "outputs" / "first"
    folder.mkdir(parents=True)
    options = (
        "--name",
        "first",
        "--overwrite",
        "--dump_folder",
        "x",
        "--trainer.optimizer.lr",
        "0.5",
    )
    write_json(run_of(*options, config="large"), folder / "config.json")
    return folder


def test_resume_uses_the_folder_and_its_config(killed):
    run = run_of("--resume", str(killed), "--trainer.sequence_length", "64")
    assert (run.module, run.function, run.resumes) == (MODULE, "large", killed)
    assert (run.config.name, run.config.dump_folder) == ("first", killed.parent)
    assert run.config.overwrite is False
    assert run.config.trainer.optimizer.lr == 0.5
    assert run.config.trainer.sequence_length == 64
    moved = killed.rename(killed.with_name("second"))
    assert parse("--resume", str(moved)).name == "second"


def test_errors_of_several_options_are_shown_together(capsys):
    wrong = {"trainer.nonsense": "2", "overwrite": "maybe"}
    alone = [error_of(capsys, f"--{name}={value}") for name, value in wrong.items()]
    with pytest.raises(SystemExit):
        parse(*(f"--{name}={value}" for name, value in wrong.items()))
    assert capsys.readouterr().err == "".join(alone)
