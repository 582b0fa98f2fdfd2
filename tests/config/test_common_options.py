"""Short names of options, arguments of registry functions, and the help of a training run."""

from typing import Any

import pytest

from configs.sum_digits import tiny
from rl.config.cli import parse_cli
from rl.config.common_options import ALIASES, GROUPS
from rl.config.help import SOURCE_OPTIONS
from rl.config.tree import walk

VALUES: dict[str, Any] = {
    "model": "some/folder",
    "data": ("a.jsonl", "b.jsonl"),
    "reward": ("my_reward:right",),
    "lr": 0.5,
    "steps": 7,
    "group_size": 4,
    "groups": 6,
    "max_tokens": 3,
    "temperature": 0.5,
    "alias": ("Qwen/Qwen3-8B", "another"),
}
"""A value for each short name."""


def choose_config(name):
    """Return a module and a config in which a short name has its option."""
    if name == "alias":
        return {"module": "tinker", "config": "tiny"}
    return {"module": "own", "config": "grpo"}


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    """The files of `VALUES`, in a current folder that has nothing else."""
    monkeypatch.chdir(tmp_path)
    for name in VALUES["data"]:
        (tmp_path / name).write_text('{"question": "1 + 1?", "answer": "2"}\n')


def parse(*argv, module="sum_digits", config="tiny"):
    return parse_cli(argv, default_module=module, default_config=config).config


def error_of(capsys, *argv, module="sum_digits", config="tiny"):
    with pytest.raises(SystemExit) as stopped:
        parse(*argv, module=module, config=config)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def help_of(capsys, *argv, module="sum_digits", config="tiny"):
    with pytest.raises(SystemExit) as stopped:
        parse(*argv, module=module, config=config)
    assert stopped.value.code == 0
    return capsys.readouterr().out


def list_options(text):
    return [line.split(" ")[0].rstrip(",") for line in text.splitlines() if line.startswith("--")]


def write_value(value):
    return list(map(str, value)) if isinstance(value, tuple) else [str(value)]


@pytest.mark.parametrize("name", ALIASES)
def test_short_name_sets_its_option(name):
    value = VALUES[name]
    config = parse(f"--{name}", *write_value(value), **choose_config(name))
    values = {entry.path: entry.value for entry in walk(config)}
    assert values[ALIASES[name]] == value


@pytest.mark.parametrize("name", ALIASES)
def test_short_name_beside_its_option_is_refused(capsys, name):
    value = write_value(VALUES[name])
    argv = [f"--{name}", *value, f"--{ALIASES[name]}", *value]
    says = f"--{name} is short for --{ALIASES[name]}: give one of them"
    assert says in error_of(capsys, *argv, **choose_config(name))


def test_short_name_with_a_dash_is_one_too():
    assert parse("--group-size", "4").loop.group_size == 4


def test_short_name_of_an_option_that_a_config_lacks_is_unknown(capsys):
    assert "--data: no such option" in error_of(capsys, "--data", "a.jsonl")


def test_arguments_of_a_registry_function_choose_the_rest_of_its_config(tmp_path):
    data = tmp_path / "qa.jsonl"
    data.write_text('{"prompt": "1 + 1?", "solution": "2", "level": 3}\n')
    argv = ["--data", str(data), "--reward", "last_number", "--lr", "3e-5"]
    config = parse(*argv, module="own", config="grpo")
    columns = config.task.columns
    assert (columns.question, columns.answer, columns.info) == (
        "prompt", "solution", ("prompt", "solution", "level"),
    )  # fmt: skip
    assert config.task.train_files == (str(data),)
    assert config.trainer.optimizer.lr == 3e-5
    lora = parse(*argv[:4], module="own", config="lora")
    assert lora.trainer.converters
    assert lora.task.reward == ("last_number",)


def test_argument_takes_one_value_where_the_function_takes_one(capsys):
    assert "--model takes one value, not ['a', 'b']" in error_of(
        capsys, "--model", "a", "b", module="own", config="grpo"
    )


OWN_CONFIGS = """
from __future__ import annotations
from typing import TYPE_CHECKING
from my_decorators import logged
from configs.sum_digits import tiny
Name = str
if TYPE_CHECKING:
    from somewhere import Thing

@logged
def mine(
    model: Name = "0.6B", thing: Thing | None = None, max_tokens: int = 64, size: str = "small"
):
    config = tiny()
    config.description = f"{model} {max_tokens} {size}"
    return config
"""


DECORATORS = """
import functools

def logged(function):
    @functools.wraps(function)
    def call(**arguments):
        return function(**arguments)
    return call
"""


def test_arguments_of_a_users_function_may_mean_something_else(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_configs.py").write_text(OWN_CONFIGS)
    (tmp_path / "my_decorators.py").write_text(DECORATORS)
    own = {"module": "my_configs", "config": "mine"}
    config = parse("--model", "1.7B", "--max_tokens", "9", "--size", "None", **own)
    assert (config.description, config.hf_assets_path) == ("1.7B 9 None", None)
    # The long name is the option, whatever the function makes of its argument.
    config = parse("--hf_assets_path", "x/y", "--loop.sampling.max_tokens", "20", **own)
    assert (config.description, config.hf_assets_path) == ("x/y 20 small", "x/y")
    assert config.loop.sampling.max_tokens == 20
    assert parse("--model", "None", **own).description == "0.6B 64 small"
    assert "error: --max_tokens many: must be int\n" in error_of(
        capsys, "--max_tokens", "many", **own
    )


def test_number_that_a_config_is_sized_by_counts_as_a_change():
    argv = ["--data", "a.jsonl", "--max_tokens", "300"]
    request = parse_cli(argv, default_module="own", default_config="grpo")
    changed = request.config.loop.sampling.max_tokens, request.defaults.loop.sampling.max_tokens
    assert changed == (300, 128)
    assert request.defaults.task == request.config.task


def test_every_common_option_exists_and_every_short_name_is_shown():
    paths = {entry.path for entry in walk(parse(module="own", config="grpo"))}
    common = [path for group in GROUPS.values() for path in group]
    assert len(common) == len(set(common))
    assert set(common) <= paths | set(SOURCE_OPTIONS)
    assert set(ALIASES.values()) - {ALIASES["alias"]} <= set(common)


def test_help_shows_the_common_options_in_groups(capsys):
    text = help_of(capsys, "--help", module="own", config="grpo")
    options = list_options(text)
    assert 15 <= len(options) <= 25
    assert "--model, --hf_assets_path str | None\n" in text
    titles = [line for line in text.splitlines() if line in GROUPS]
    assert titles == list(GROUPS)
    num_options = sum(entry.kind == "leaf" for entry in walk(parse(module="own", config="grpo")))
    assert text.endswith(f"--help-all shows all {num_options} options.\n")


def test_help_leaves_out_what_a_config_does_not_have(capsys):
    text = help_of(capsys, "--help")
    assert "--lr, --trainer.optimizer.lr float" in text
    assert "train_files" not in text


@pytest.mark.parametrize("option", ["--help-all", "--help_all"])
def test_help_all_shows_every_option(capsys, option):
    options = list_options(help_of(capsys, option))
    shown = {f"--{entry.path}" for entry in walk(tiny()) if entry.kind == "leaf"}
    shown = {f"--{find_first_name(option.removeprefix('--'))}" for option in shown}
    assert shown | {f"--{name}" for name in SOURCE_OPTIONS} <= set(options)


def find_first_name(path):
    """Return the name with which an option's line begins."""
    return next((name for name, target in ALIASES.items() if target == path), path)


def test_help_of_a_program_without_common_options_is_whole(capsys):
    text = help_of(capsys, "--help", module="tinker", config="tiny")
    assert "--port int" in text
    assert "--alias, --backend.base.aliases tuple[str, ...]" in text
    assert "--help-all" not in text
