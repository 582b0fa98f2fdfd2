"""docs/tasks.md: its one-file task runs as shown, and its tables are correct."""

import asyncio
import importlib
import re
import shlex
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from rl.config.cli import parse_cli
from rl.config.tree import rebuild
from rl.local import LocalBackend, LocalRewarder
from rl.loop.loop import RolloutSetup
from rl.loop.state import StepCheckpoints
from rl.models.hf import write_random_model
from rl.models.tokenizer import open_tokenizer
from rl.observability.recorder import Recorder, RecorderConfig, read_rollouts
from rl.rollouts.renderer import make_renderer
from rl.tasks.alphabet_sort import AlphabetSort
from rl.training.engine import TrainingEngine
from rl.types import Message, Observation, Problem
from tests.support.fakes import ListSink
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


def test_documented_option_reaches_the_task(shout):
    task = documented_config().task.build()
    problems = [*islice(task.train_problems(seed=0), 20), *task.eval_sets()["held_out"]]
    assert {len(p.question) for p in problems} == {6}
    assert {p.question.upper() for p in problems} == {p.answer for p in problems}


@pytest.mark.parametrize(
    ("reply", "reward"), [("ABCDE", 1.0), ("ABCDe", 0.8), ("ABCDEF", 5 / 6), ("abcde", 0.0), ("", 0.0)]
)
def test_replies_earn_the_share_of_right_letters(shout, reply, reward):
    task = documented_config().task.build()
    problem = Problem(id="shout/abcde", question="abcde", answer="ABCDE", demonstration="ABCDE")
    score = scored(task, problem, reply)
    assert score.reward == pytest.approx(reward)
    assert score.correct is (reward == 1.0)


def small_model(config):
    """Return the config's model, made narrow."""
    sizes = {"dim": 32, "num_layers": 1, "block.feed_forward.hidden_dim": 32}
    return replace(config.model, model=rebuild(config.model.model, sizes))


def test_two_steps_of_the_loop_train_on_the_documented_task(shout):
    """Train in this process, from random weights."""
    config = documented_config()
    config.task.num_eval = 4
    loop = rebuild(
        config.loop,
        {"num_steps": 2, "groups_per_batch": 2, "group_size": 4, "eval_every": 2, "max_empty_steps": 9},
    )
    spec = small_model(config)
    folder = write_random_model(shout / "model", spec=spec, seed=0)
    tokenizer, ends = open_tokenizer(folder)
    task, sink = config.task.build(), ListSink()
    recorder = Recorder(shout / "rollouts.jsonl", config=RecorderConfig())

    async def run():
        async with LocalBackend(TrainingEngine.Config(), spec=spec, hf_assets_path=str(folder)) as local:
            await loop.build(
                trainer=local,
                publisher=local,
                rollouts=RolloutSetup(
                    generator=local,
                    rewarder=LocalRewarder(rubric=task.rubric(seed=0)),
                    renderer=make_renderer(config.renderer, tokenizer=tokenizer, stop_token_ids=ends),
                    task=task,
                    max_sequence_tokens=64,
                    seed=0,
                ),
                sinks=[sink],
                checkpoints=StepCheckpoints(
                    trainer=local, config=config.trainer.checkpoint, folder=str(shout / "checkpoints")
                ),
                recorder=recorder,
            ).run()

    asyncio.run(run())
    said = [(r["step"], r["policy_version"], "eval/answer" in r) for r in sink.records]
    assert said == [(0, 0, True), (1, 1, False), (2, 2, False), (2, 2, True)]
    lines = read_rollouts(recorder.path)
    kinds = [(line["step"], line["kind"]) for line in lines]
    assert kinds == [(0, "eval")] * 4 + [(1, "train")] * 8 + [(2, "train")] * 8 + [(2, "eval")] * 4
    for line in lines:
        (turn,) = line["turns"]
        right = sum(a == b for a, b in zip(turn["reply"], line["answer"], strict=False))
        assert line["reward"] == pytest.approx(right / max(6, len(turn["reply"])))


def test_documented_multi_turn_environment_is_that_of_alphabet_sort():
    names = {"Message": Message, "Observation": Observation}
    exec(ENVIRONMENT, names)

    class Shown(AlphabetSort):
        def environment(self, problem):
            return names["SortingTurns"](problem)

    task, shown = (kind(config=AlphabetSort.Config()) for kind in (AlphabetSort, Shown))
    for problem in islice(task.train_problems(seed=0), 20):
        real, documented = (played(made, problem, *problem.demonstrations) for made in (task, shown))
        assert real.messages == documented.messages
        assert len(documented.turns) == 3


ROWS = re.findall(r"^\| `(\w+)` \| .* \| (\d) \| (?:`make ([\w-]+)`)? *\|$", DOC, flags=re.MULTILINE)


def test_every_task_of_the_table_has_a_module_a_config_and_the_stated_turns():
    assert [module for module, _, _ in ROWS] == ["sum_digits", "reverse_text", "alphabet_sort", "countdown"]
    for module, num_turns, _ in ROWS:
        importlib.import_module(f"rl.tasks.{module}")
        config = importlib.import_module(f"configs.{module}").tiny()
        problem = next(config.task.build().train_problems(seed=0))
        assert len(problem.demonstrations) == int(num_turns)


def test_make_targets_of_the_table_run_the_task():
    makefile = (ROOT / "Makefile").read_text()
    targets = {module: target for module, _, target in ROWS if target}
    assert list(targets) == ["sum_digits", "reverse_text", "alphabet_sort"]
    for module, target in targets.items():
        (recipe,) = re.findall(rf"^{target}: .*\n((?:\t.*\n)+)", makefile, flags=re.MULTILINE)
        assert re.search(rf"-m (rl\.train --module {module} --config tiny|rl\.simple_grpo_{module}) ", recipe)
        assert re.search(rf"^\.PHONY:.* {target} ", makefile, flags=re.MULTILINE)
