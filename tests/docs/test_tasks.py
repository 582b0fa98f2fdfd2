"""docs/tasks.md: its one-file task runs as shown, and its tables are correct."""

import importlib
import re
import shlex
import sys
from itertools import islice
from pathlib import Path

import pytest

from rl.config.cli import parse_cli
from rl.tasks.alphabet_sort import AlphabetSort
from rl.types import Message, Observation, Problem
from tests.support.tasks import played, scored

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "tasks.md").read_text()
FILE, ENVIRONMENT = re.findall(r"```python\n(.*?)```", DOC, flags=re.DOTALL)
(COMMAND,) = re.findall(r"```\n(python -m rl\.train .*shout.*)\n```", DOC)
NUM_LINES = 40
"""Line limit for the file of a one-turn task."""


@pytest.fixture
def shout(tmp_path, monkeypatch):
    """An importable folder with the file of the docs."""
    (tmp_path / "shout.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield tmp_path
    sys.modules.pop("shout", None)


def documented_config():
    _, _, module, *options = shlex.split(COMMAND)
    assert module == "rl.train"
    return parse_cli(options, default_module="sum_digits").config


def test_task_of_one_turn_has_fewer_than_forty_lines():
    assert FILE.startswith("# shout.py\n")
    assert len(FILE.splitlines()) < NUM_LINES


def test_documented_task_has_its_option_and_pays_the_share_of_right_letters(shout):
    task = documented_config().task.build()
    problems = [*islice(task.train_problems(seed=0), 20), *task.eval_sets()["held_out"]]
    assert {len(p.question) for p in problems} == {6}
    assert {p.question.upper() for p in problems} == {p.answer for p in problems}
    problem = Problem(id="shout/abcde", question="abcde", answer="ABCDE", demonstration="ABCDE")
    rewards = {"ABCDE": 1.0, "ABCDe": 0.8, "ABCDEF": 5 / 6, "abcde": 0.0, "": 0.0}
    scores = {reply: scored(task, problem, reply) for reply in rewards}
    assert {reply: score.reward for reply, score in scores.items()} == pytest.approx(rewards)
    assert [reply for reply, score in scores.items() if score.correct] == ["ABCDE"]


def test_documented_multi_turn_environment_is_that_of_alphabet_sort():
    names = {"Message": Message, "Observation": Observation}
    exec(ENVIRONMENT, names)

    class Shown(AlphabetSort):
        def environment(self, problem):
            return names["SortingTurns"](problem)

    task, shown = (kind(config=AlphabetSort.Config()) for kind in (AlphabetSort, Shown))
    for problem in islice(task.train_problems(seed=0), 20):
        real, documented = (
            played(made, problem, *problem.demonstrations) for made in (task, shown)
        )
        assert real.messages == documented.messages
        assert len(documented.turns) == 3


def test_every_task_of_the_table_has_a_module_a_config_and_the_stated_turns():
    rows = re.findall(r"^\| `(\w+)` \| .* \| (\d) \| .*\|$", DOC, flags=re.MULTILINE)
    assert [module for module, _ in rows] == [
        "sum_digits",
        "reverse_text",
        "alphabet_sort",
        "countdown",
    ]
    for module, num_turns in rows:
        importlib.import_module(f"rl.tasks.{module}")
        config = importlib.import_module(f"configs.{module}").tiny()
        problem = next(config.task.build().train_problems(seed=0))
        assert len(problem.demonstrations) == int(num_turns)
