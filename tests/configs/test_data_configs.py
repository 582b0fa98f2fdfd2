"""Configs of tasks over other people's data: on the command line, as JSON, and in the docs."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from configs import gsm8k, reasoning, verifiers_env
from rl.config.cli import parse_cli
from rl.config.serialize import load_values, to_dict
from rl.data.difficulty import DifficultyFilter
from rl.tasks.dataset import DatasetTask
from rl.tasks.math_problems import MathProblems
from rl.tasks.problem_rows import Columns
from rl.tasks.reasoning_gym_task import ReasoningGym
from rl.tasks.verifiers_task import VerifiersTask

DOCS = Path(__file__).parent.parent.parent / "docs"


def commands(page):
    """The runs that a page shows, as arguments."""
    text = (DOCS / page).read_text().replace("\\\n", " ")
    return [shlex.split(line)[3:] for line in re.findall(r"^ *python -m rl\.train .*$", text, re.MULTILINE)]


@pytest.mark.parametrize("argv", commands("tasks_from_data.md"), ids=lambda argv: argv[1])
def test_commands_of_the_docs_are_understood(argv):
    task = parse_cli(argv, default_module="sum_digits").config.task
    given = dict(zip(argv[::2], argv[1::2], strict=False))
    if "--task.dataset" in given:
        assert (task.dataset, task.settings) == ("countdown", {"min_numbers": 3, "max_numbers": 4})
    elif "--task.taskset" in given:
        assert (task.taskset, task.settings) == ("my-env", {"split": "train"})
        assert task.eval_settings == {"split": "test"}
    elif "--task.train_files" in given:
        assert task.train_files == (given["--task.train_files"],)
    else:
        assert Path(task.train_files[0]).is_file()  # what comes with the project


def test_evaluation_files_are_given_by_name():
    argv = ["--config", "qwen3_0_6b", "--task.eval_files", "easy", "a.jsonl", "hard", "b.parquet"]
    task = parse_cli(argv, default_module="gsm8k").config.task
    assert task.eval_files == {"easy": "a.jsonl", "hard": "b.parquet"}


@pytest.mark.parametrize(
    "config", [gsm8k.tiny, gsm8k.math_qwen3_1_7b, reasoning.tiny, verifiers_env.qwen3_0_6b]
)
def test_configs_are_the_same_after_a_way_through_json(config):
    made = config()
    assert load_values(config(), to_dict(made)) == made


def test_a_difficulty_filter_is_set_by_a_config_function_and_edited_on_the_command_line():
    task = DatasetTask.Config(difficulty=DifficultyFilter(column="rate"))
    values = to_dict(task)
    values["difficulty"]["max"] = 0.5
    assert load_values(task, values).difficulty == DifficultyFilter(column="rate", max=0.5)


@pytest.mark.parametrize(
    ("config", "page", "prefix"),
    [
        (DatasetTask.Config, "data.md", ""),
        (Columns, "data.md", "columns."),
        (MathProblems.Config, "tasks_from_data.md", ""),
        (ReasoningGym.Config, "tasks_from_data.md", ""),
        (VerifiersTask.Config, "tasks_from_data.md", ""),
    ],
)
def test_every_setting_is_in_the_docs(config, page, prefix):
    inherited = (
        {f.name for f in dataclasses.fields(DatasetTask.Config)} if config is MathProblems.Config else set()
    )
    names = {prefix + f.name for f in dataclasses.fields(config)} - inherited - {"columns"}
    text = (DOCS / page).read_text()
    assert sorted(name for name in names if f"`{name}`" not in text) == []
