import math
from pathlib import Path

import pytest

from rl.config.cli import parse_cli
from rl.config.serialize import write_json
from tests.config import example_configs
from tests.config.example_configs import ClipLoss, Optimizer, Precision, Run, SgdOptimizer, Warmup

MODULE = "tests.config.example_configs"


def parse(*argv, config="tiny"):
    return parse_cli(argv, default_module=MODULE, default_config=config).config


def error_of(capsys, *argv, config="tiny"):
    with pytest.raises(SystemExit) as stopped:
        parse(*argv, config=config)
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_no_options_give_the_registry_config_as_it_is():
    run = parse_cli([], default_module=MODULE, default_config="large")
    assert (run.module, run.function) == (MODULE, "large")
    assert run.config == example_configs.large()


def test_module_and_config_choose_the_function():
    run = parse_cli(["--module", MODULE, "--config=large"], default_module="nowhere", default_config="tiny")
    assert run.config.trainer.sequence_length == 1024


def test_variant_edits_what_another_function_returns_without_touching_it():
    assert example_configs.large().trainer.optimizer.lr == 3e-4
    assert example_configs.tiny().trainer.optimizer.lr == 1e-3


def test_unannotated_function_is_a_registry_function():
    assert parse(config="unannotated").name == "unannotated"


@pytest.mark.parametrize(
    ("argv", "read", "expected"),
    [
        (["--trainer.optimizer.lr", "3e-4"], lambda c: c.trainer.optimizer.lr, 3e-4),
        (["--trainer.optimizer.lr=3e-4"], lambda c: c.trainer.optimizer.lr, 3e-4),
        (["--trainer.optimizer.max_norm", "inf"], lambda c: c.trainer.optimizer.max_norm, math.inf),
        (["--trainer.optimizer.max-norm", "2"], lambda c: c.trainer.optimizer.max_norm, 2.0),
        (["--trainer.optimizer.weight_decay", "0.1"], lambda c: c.trainer.optimizer.weight_decay, 0.1),
        (["--trainer.optimizer.weight_decay", "None"], lambda c: c.trainer.optimizer.weight_decay, None),
        (["--trainer.optimizer.betas", "0.8", "0.9"], lambda c: c.trainer.optimizer.betas, (0.8, 0.9)),
        (["--trainer.optimizer.kind", "foreach"], lambda c: c.trainer.optimizer.kind, "foreach"),
        (["--stop_token_ids", "3", "-4"], lambda c: c.stop_token_ids, (3, -4)),
        (["--stop_token_ids"], lambda c: c.stop_token_ids, ()),
        (["--name", "-dash"], lambda c: c.name, "-dash"),
        (["--dump_folder", "/x/y"], lambda c: c.dump_folder, Path("/x/y")),
        (["--trainer.precision", "HALF"], lambda c: c.trainer.precision, Precision.HALF),
        (["--trainer.loss.clip_high", "0.3"], lambda c: c.trainer.loss, ClipLoss(clip_high=0.3)),
        (["--overwrite"], lambda c: c.overwrite, True),
        (["--overwrite", "True"], lambda c: c.overwrite, True),
        (["--overwrite", "false"], lambda c: c.overwrite, False),
        (["--overwrite", "--no-overwrite"], lambda c: c.overwrite, False),
        (["--trainer.compile_model", "--trainer.no_compile_model"], lambda c: c.trainer.compile_model, False),
        (["--trainer.compile_model", "--no-trainer.compile-model"], lambda c: c.trainer.compile_model, False),
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


def test_element_of_a_sequence_of_configs_is_set_by_its_index():
    config = parse("--schedule.1.num_steps", "9", config="large")
    assert config.schedule == (Warmup.Config(num_steps=1), Warmup.Config(num_steps=9))


def test_element_of_a_sequence_of_several_kinds_is_set_by_its_index():
    config = parse("--stages.1.lr", "0.5", config="large")
    assert config.stages == (Warmup.Config(num_steps=7), Optimizer.Config(lr=0.5))


@pytest.mark.parametrize("option", ["--stages", "--stages.0.num_steps"])
def test_sequence_of_components_that_is_empty_is_filled_by_a_registry_function_alone(capsys, option):
    said = error_of(capsys, option, "1")
    assert "stages" in said
    assert "is empty in this config; a registry function can turn it on" in said


def test_field_added_by_a_subclass_in_a_nested_place_is_an_option():
    config = parse("--trainer.optimizer.momentum", "0.5", config="with_momentum")
    assert config.trainer.optimizer == SgdOptimizer.Config(lr=1e-2, momentum=0.5)
    assert type(config.trainer.optimizer.build()) is SgdOptimizer


def test_hidden_code_survives_overrides():
    config = parse("--overwrite")
    assert config.transform is example_configs.plus_one
    assert config.spec.make is dict


def test_unknown_key_names_the_nearest(capsys):
    for typo in ("--trainer.optimzer.lr", "--trainer.optimizer.lrr", "--lr"):
        assert error_of(capsys, typo, "1").endswith("did you mean --trainer.optimizer.lr\n")
    assert "did you mean --trainer.optimizer.weight_decay" in error_of(capsys, "--weight_decay", "1")
    assert "did you mean --trainer.sequence_length" in error_of(capsys, "--sequence_lenght", "1")
    assert "did you mean --warmup.num_steps or --schedule.0.num_steps or --schedule.1.num_steps" in error_of(
        capsys, "--num_steps", "1", config="large"
    )
    assert "--zzzzzz: no such option; --help lists all" in error_of(capsys, "--zzzzzz", "1")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--trainer.optimizer.lr", "abc"], "--trainer.optimizer.lr: 'abc' is not of type float"),
        (["--trainer.optimizer.weight_decay", "x"], "'x' is not of type float | None"),
        (["--trainer.optimizer.betas", "0.9"], "'0.9' is not of type tuple[float, float]"),
        (["--trainer.optimizer.kind", "slow"], "'slow' is not of type 'fused' | 'foreach'"),
        (["--trainer.sequence_length", "1e5"], "'1e5' is not of type int"),
        (["--trainer.sequence_length"], "'nothing' is not of type int"),
        (["--trainer.sequence_length", "1", "2"], "'1 2' is not of type int"),
        (["--overwrite", "yes"], "--overwrite: 'Yes' is not of type bool"),
        (["--trainer.precision", "QUARTER"], "'QUARTER' is not of type Precision"),
        (["stray"], "'stray' belongs to no option"),
    ],
)
def test_wrong_type_names_field_value_and_type(capsys, argv, message):
    assert message in error_of(capsys, *argv)


def test_value_that_a_config_refuses_is_an_error_with_its_path(capsys):
    assert "trainer.optimizer: lr must be at least 0, got -1.0" in error_of(
        capsys, "--trainer.optimizer.lr", "-1"
    )


def test_parent_checks_the_overridden_values_of_its_children(capsys):
    message = error_of(capsys, "--trainer.sequence_length", "2048")
    assert "error: trainer.sequence_length is 2048, at most 1024 fit" in message


def test_code_is_not_an_option(capsys):
    assert "--spec: holds code" in error_of(capsys, "--spec", "x")
    assert "no such option" in error_of(capsys, "--spec.flavor", "x")


def test_component_itself_is_no_leaf(capsys):
    message = error_of(capsys, "--warmup", "3")
    assert "--warmup: has fields of its own: --warmup.num_steps; --warmup None turns it off" in message


def test_field_of_an_absent_component_says_so(capsys):
    assert "warmup is None in this config" in error_of(
        capsys, "--warmup.num_steps", "3", config="without_warmup"
    )
    assert "warmup: is None in this config" in error_of(capsys, "--warmup", "x", config="without_warmup")


def test_component_cannot_be_turned_off_and_set(capsys):
    message = error_of(capsys, "--warmup", "None", "--warmup.num_steps", "3")
    assert "--warmup None turns off what --warmup.num_steps sets" in message


def test_unknown_module_lists_those_of_configs(capsys):
    message = error_of(capsys, "--module", "no_such_task")
    assert "--module no_such_task: no such module; in configs are: " in message


def test_module_name_that_is_no_name_is_an_error(capsys):
    assert "not a module name" in error_of(capsys, "--module", "../x")


def test_unknown_function_lists_the_functions_that_return_a_config(capsys):
    message = error_of(capsys, "--config", "huge")
    names = message.partition("there are: ")[2].strip().split(", ")
    assert names == ["tiny", "large", "with_momentum", "unannotated", "without_warmup", "wrong_return"]


def test_function_is_asked_for_where_there_is_no_default(capsys):
    assert "there are: tiny, large" in error_of(capsys, config=None)


def test_function_that_returns_something_else_is_an_error(capsys):
    assert "wrong_return() returned a dict" in error_of(capsys, config="wrong_return")


def test_module_that_fails_to_import_something_keeps_its_own_error():
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        parse("--module", "tests.config.example_broken")


def test_help_shows_every_leaf_with_type_default_and_docstring(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse("--help", config="large")
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--trainer.optimizer.lr FLOAT" in text
    assert "Peak learning rate. (default: 0.0003)" in text
    assert "--trainer.loss.clip_high FLOAT" in text
    assert "--schedule.1.num_steps INT" in text
    assert "Supervised start. `--warmup None` turns it off." in text
    assert "--trainer.reference {None}" in text
    assert "A frozen reference; None costs nothing." in text
    assert "--overwrite {True,False}" in text
    assert "--from_json" in text
    assert "--spec" not in text
    assert "--converters" not in text


def test_help_shows_docstrings_of_a_subclass_and_overridden_defaults(capsys):
    with pytest.raises(SystemExit):
        parse("--trainer.optimizer.lr", "0.125", "-h", config="with_momentum")
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Of the running mean of gradients. (default: 0.9)" in text
    assert "(default: 0.125)" in text


def test_run_starts_again_from_its_json_and_options_override_it(tmp_path):
    run = parse_cli(
        ["--trainer.optimizer.lr", "0.25", "--warmup", "None"], default_module=MODULE, default_config="large"
    )
    write_json(run, tmp_path / "config.json")
    again = parse_cli(
        ["--from_json", str(tmp_path / "config.json"), "--trainer.sequence_length", "64"],
        default_module="nowhere",
        default_config="tiny",
    )
    assert (again.module, again.function) == (MODULE, "large")
    run.config.trainer.sequence_length = 64
    assert again.config == run.config
    assert again.config.trainer.optimizer.lr == 0.25
    assert again.config.warmup is None


def test_run_started_again_has_a_name_of_its_own_and_overwrites_nothing_unless_asked(tmp_path):
    path = tmp_path / "config.json"
    first = parse_cli(
        ["--name", "first", "--overwrite", "--dump_folder", "x"], default_module=MODULE, default_config="tiny"
    )
    write_json(first, path)
    again = parse("--from_json", str(path))
    assert (again.name, again.overwrite, again.dump_folder) == (None, False, Path("x"))
    again = parse("--from_json", str(path), "--name", "second", "--overwrite")
    assert (again.name, again.overwrite) == ("second", True)
    # Neither does a name that the registry function sets, which the first run of it has.
    write_json(parse_cli([], default_module=MODULE, default_config="unannotated"), path)
    assert parse("--from_json", str(path)).name is None


def test_json_file_names_its_own_registry_function(capsys, tmp_path):
    write_json(parse_cli([], default_module=MODULE, default_config="tiny"), tmp_path / "config.json")
    message = error_of(capsys, "--from_json", str(tmp_path / "config.json"), "--config", "tiny")
    assert "leave out --module and --config" in message


def test_missing_json_file_is_an_error(capsys):
    assert "/no/such.json: No such file or directory" in error_of(capsys, "--from_json", "/no/such.json")


def test_root_config_is_of_the_registry_functions_type():
    assert type(parse()) is Run.Config


@pytest.fixture
def killed(tmp_path):
    """The folder of a run."""
    folder = tmp_path / "outputs" / "first"
    folder.mkdir(parents=True)
    run = parse_cli(
        ["--name", "first", "--overwrite", "--dump_folder", "x", "--trainer.optimizer.lr", "0.5"],
        default_module=MODULE,
        default_config="large",
    )
    write_json(run, folder / "config.json")
    return folder


def test_a_run_is_resumed_where_it_is_with_its_config_and_options_change_fields(killed):
    run = parse_cli(
        ["--resume", str(killed), "--trainer.sequence_length", "64"],
        default_module="nowhere",
        default_config="tiny",
    )
    assert (run.module, run.function, run.resumes) == (MODULE, "large", killed)
    assert (run.config.name, run.config.dump_folder) == ("first", killed.parent)
    assert run.config.overwrite is False
    assert run.config.trainer.optimizer.lr == 0.5
    assert run.config.trainer.sequence_length == 64
    moved = killed.rename(killed.with_name("second"))
    assert parse("--resume", str(moved)).name == "second"


def test_a_new_run_resumes_nothing():
    assert parse_cli([], default_module=MODULE, default_config="tiny").resumes is None


@pytest.mark.parametrize(
    "beside",
    [
        ("--module", MODULE), ("--config", "tiny"), ("--from_json", "x"), ("--name", "other"),
        ("--dump_folder", "y"), ("--overwrite",), ("--no_overwrite",),
    ],
)  # fmt: skip
def test_what_would_make_it_another_run_is_refused_beside_resume(capsys, killed, beside):
    said = error_of(capsys, "--resume", str(killed), *beside)
    assert f"in its own folder: leave out {beside[0]};" in said


def test_a_folder_that_cannot_be_resumed_is_refused_by_name(capsys, killed, tmp_path):
    assert "--resume /no/such: there is no such folder" in error_of(capsys, "--resume", "/no/such")
    said = error_of(capsys, "--resume", str(tmp_path))
    assert f"--resume {tmp_path}: not the folder of a run: it has no config.json" in said
    (killed / "config.json").write_text('{"module":')
    assert "config.json is not JSON" in error_of(capsys, "--resume", str(killed))


# An explanation


@pytest.mark.parametrize(
    ("argv", "form"),
    [([], None), (["--explain"], "text"), (["--explain", "text"], "text"), (["--explain=json"], "json")],
)
def test_an_explanation_is_asked_for_in_a_form_or_not_at_all(argv, form):
    run = parse_cli(argv, default_module=MODULE, default_config="tiny")
    assert run.explain == form
    assert run.config == example_configs.tiny()


def test_another_form_of_explanation_is_refused(capsys):
    assert error_of(capsys, "--explain", "yaml") == (
        "error: --explain yaml: must be text or json, or nothing\n"
    )


def test_the_fields_that_the_command_line_set_are_known():
    argv = ["--explain", "--trainer.optimizer.lr", "0.1", "--no_trainer.compile_model"]
    run = parse_cli(argv, default_module=MODULE, default_config="tiny")
    assert run.options == ("trainer.optimizer.lr", "trainer.compile_model")
    assert run.file is None


def test_all_faults_are_lines_of_their_own_and_the_same_words_as_a_runs(capsys):
    wrong = {
        "trainer.optimizer.lr": "-1",
        "trainer.nonsense": "2",
        "trainer.sequence_length": "2000",
        "overwrite": "maybe",
    }
    alone = [error_of(capsys, f"--{name}={value}") for name, value in wrong.items()]
    with pytest.raises(SystemExit):
        parse("--explain", *(f"--{name}={value}" for name, value in wrong.items()))
    # What is no value of its option, then what the components say.
    assert capsys.readouterr().err == "".join(alone[place] for place in (1, 3, 0, 2))
