"""docs/tasks.md: its task in one file runs as it is shown, and its tables are true."""

import asyncio
import importlib
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from rl.config.cli import parse_cli
from rl.config.tree import rebuild
from rl.local import LocalBackend, LocalScorer
from rl.loop import Seams
from rl.models.starting_point import write_random_model
from rl.observability.metrics import read_metrics
from rl.observability.recorder import Recorder, RecorderConfig, read_rollouts
from rl.rollouts.renderer import make_renderer
from rl.rollouts.tokenizer import open_tokenizer
from rl.step_checkpoints import StepCheckpoints
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
"""That a file with a task of one turn stays below."""


@pytest.fixture
def shout(tmp_path, monkeypatch):
    """The folder with the file of the docs, importable."""
    (tmp_path / "shout.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield tmp_path
    sys.modules.pop("shout", None)


def documented_config():
    _, _, module, *options = shlex.split(COMMAND)
    assert module == "rl.train"
    return parse_cli(options, default_module="sum_digits").config


def test_a_task_of_one_turn_is_a_file_of_fewer_than_forty_lines():
    assert FILE.startswith("# shout.py\n")
    assert len(FILE.splitlines()) < NUM_LINES


def test_the_documented_option_reaches_the_task(shout):
    task = documented_config().task.build()
    problems = [*islice(task.train_problems(seed=0), 20), *task.eval_sets()["held_out"]]
    assert {len(p.question) for p in problems} == {6}
    assert {p.question.upper() for p in problems} == {p.answer for p in problems}


@pytest.mark.parametrize(
    ("reply", "reward"), [("ABCDE", 1.0), ("ABCDe", 0.8), ("ABCDEF", 5 / 6), ("abcde", 0.0), ("", 0.0)]
)
def test_its_replies_earn_the_share_of_right_letters(shout, reply, reward):
    task = documented_config().task.build()
    problem = Problem(id="shout/abcde", question="abcde", answer="ABCDE", demonstration="ABCDE")
    score = scored(task, problem, reply)
    assert score.reward == pytest.approx(reward)
    assert score.correct is (reward == 1.0)


def small_model(config):
    """The model of the config, made narrow."""
    sizes = {"dim": 32, "num_layers": 1, "block.feed_forward.hidden_dim": 32}
    return replace(config.model, model=rebuild(config.model.model, sizes))


def test_two_steps_of_the_loop_train_on_it(shout):
    """In this process, from random weights."""
    config = documented_config()
    config.task.num_eval = 4
    loop = rebuild(
        config.loop,
        {"num_steps": 2, "num_prompts": 2, "num_samples": 4, "eval_every": 2, "max_empty_steps": 9},
    )
    spec = small_model(config)
    folder = write_random_model(shout / "model", spec=spec, seed=0)
    tokenizer, ends = open_tokenizer(folder)
    task, sink = config.task.build(), ListSink()
    recorder = Recorder(shout / "rollouts.jsonl", config=RecorderConfig())

    async def run():
        async with LocalBackend(TrainingEngine.Config(), spec=spec, hf_assets_path=str(folder)) as local:
            await loop.build(
                seams=Seams(
                    sampler=local,
                    learner=local,
                    publisher=local,
                    scorer=LocalScorer(rubric=task.rubric(seed=0)),
                ),
                renderer=make_renderer(config.renderer, tokenizer=tokenizer, stop_token_ids=ends),
                task=task,
                max_sequence_tokens=64,
                sinks=[sink],
                checkpoints=StepCheckpoints(
                    learner=local, config=config.trainer.checkpoint, folder=str(shout / "checkpoints")
                ),
                seed=0,
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
        (message,) = turn["messages"]
        assert message["content"].upper() == line["answer"]
        assert 1 <= len(turn["token_ids"]) == len(turn["logprobs"]) <= 8
        assert turn["policy_versions"] == (line["step"] if line["kind"] == "eval" else line["step"] - 1)
        if line["kind"] == "train":
            assert turn["trainer_logprobs"] == pytest.approx(turn["logprobs"], abs=1e-4)
            assert (turn["advantages"], turn["mask"]) == (line["advantage"], 1)
        right = sum(a == b for a, b in zip(turn["reply"], line["answer"], strict=False))
        assert line["reward"] == pytest.approx(right / max(6, len(turn["reply"])))


@pytest.mark.slow
def test_the_documented_command_runs_with_real_actors(tmp_path):
    (tmp_path / "shout.py").write_text(FILE)
    fewer = (
        "--warmup None --loop.num_steps 1 --loop.eval_every 0 --loop.num_prompts 2 --loop.num_samples 2 "
        "--task.num_eval 4 --batch_invariant False --trainer.num_threads 1 --generator.num_threads 1 "
        "--name first --dump_folder outputs"
    )
    done = subprocess.run(
        [sys.executable, *shlex.split(COMMAND)[1:], *fewer.split()],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    (step,) = read_metrics(tmp_path / "outputs" / "first" / "metrics.jsonl")
    assert (step["step"], step["policy_version"]) == (1, 1)
    assert 0.0 <= step["reward/mean"] <= 1.0
    lines = read_rollouts(tmp_path / "outputs" / "first" / "rollouts.jsonl")
    assert [len(line["answer"]) for line in lines] == [6] * 4
    for line in lines:  # both sides of the actors agree about each token
        (turn,) = line["turns"]
        assert turn["trainer_logprobs"] == pytest.approx(turn["logprobs"], abs=1e-4)
    assert {line["problem"].partition("/")[0] for line in lines} == {"shout"}


def test_the_environment_shown_for_several_turns_is_that_of_alphabet_sort():
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


def test_every_task_of_the_table_has_a_module_a_config_and_as_many_turns_as_it_says():
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


def test_other_documents_that_it_points_to_are_there():
    for name in re.findall(r"\]\(([\w./]+)\)", DOC):
        assert (ROOT / "docs" / name).exists(), name
