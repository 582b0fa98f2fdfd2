"""Fields of the examples' own classes are options, are checked, and survive the config file."""

import pytest

from examples.custom_converter import TopBlocks
from examples.custom_environment import GuessNumber
from examples.custom_trainer import AnnealedClipTrainer
from rl.config.cli import parse_cli
from rl.config.json import read_json, to_dict, write_json

CONVERTER = ["--module", "examples.custom_converter", "--config", "tiny_top_blocks"]
ENVIRONMENT = ["--module", "examples.custom_environment", "--config", "tiny"]
TOOLS = ["--module", "examples.multi_turn_tools", "--config", "tiny"]
TRAINER = ["--module", "examples.custom_trainer", "--config", "tiny_annealed_clip"]


def parse(argv, *options):
    return parse_cli([*argv, *options], default_module="sum_digits")


@pytest.mark.parametrize(
    ("argv", "option", "field"),
    [
        (CONVERTER, "--trainer.converters.0.max_abs", lambda c: c.trainer.converters[0].max_abs),
        (ENVIRONMENT, "--task.max_guesses", lambda c: c.task.max_guesses),
        (TOOLS, "--task.sandbox.time_limit_s", lambda c: c.task.sandbox.time_limit_s),
        (TRAINER, "--trainer.final_max_norm", lambda c: c.trainer.final_max_norm),
    ],
)
def test_field_is_an_option_and_survives_the_config_file(argv, option, field, tmp_path):
    run = parse(argv, option, "4")
    assert field(run.config) == 4
    assert field(parse(argv).config) != 4
    write_json(run, tmp_path / "config.json")
    assert read_json(tmp_path / "config.json") == run


def test_classes_of_the_examples_are_those_of_the_configs():
    (converter,) = to_dict(parse(CONVERTER).config)["trainer"]["converters"]
    assert converter == {
        "class": "examples.custom_converter.TopBlocks.Config",
        "num_trained_blocks": 2,
        "max_abs": 2.0,
    }
    assert type(parse(CONVERTER).config.trainer.converters[0]) is TopBlocks.Config
    assert type(parse(ENVIRONMENT).config.task) is GuessNumber.Config
    assert type(parse(TRAINER).config.trainer) is AnnealedClipTrainer.Config


@pytest.mark.parametrize(
    ("argv", "option", "value", "message"),
    [
        (
            CONVERTER,
            "converters.0.num_trained_blocks",
            "0",
            "trainer.converters.0: num_trained_blocks=0: must be",
        ),
        (CONVERTER, "converters.0.max_abs", "-1", "trainer.converters.0: max_abs=-1.0: must be above 0"),
        (TRAINER, "anneal_steps", "0", "trainer: anneal_steps=0: must be at least 1"),
        (TRAINER, "final_max_norm", "nan", "trainer: final_max_norm=nan: must be above 0"),
        (TRAINER, "num_procs", "0", "trainer: num_procs=0"),  # the parent's check
    ],
)
def test_invalid_settings_are_refused(argv, option, value, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(argv, f"--trainer.{option}", value)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
