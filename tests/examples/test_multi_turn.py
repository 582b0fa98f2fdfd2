"""Examples of episodes of several turns: an environment of one's own, and tools."""

import asyncio
import pickle
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from examples import custom_environment, multi_turn_tools
from examples.custom_environment import GuessNumber
from examples.multi_turn_tools import Arithmetic
from rl.models.files.tokenizer import build_byte_tokenizer, open_tokenizer
from rl.observability.metrics import read_metrics
from rl.rollouts.environment import Environments
from rl.rollouts.renderer import make_renderer
from rl.rollouts.samples import make_sample_of_demonstration
from rl.types import Problem, Reply
from tests.support.scored import COMPLETION, replied
from tests.support.tasks import played

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "example", [custom_environment, multi_turn_tools], ids=lambda e: e.__name__
)
def test_demonstrations_fit_the_tiny_run(example, tmp_path):
    config = example.tiny()
    build_byte_tokenizer(tmp_path)
    tokenizer, ends = open_tokenizer(tmp_path)
    renderer = make_renderer(config.renderer, tokenizer=tokenizer, stop_token_ids=ends)
    renderer.check_multi_turn()
    task = config.task.build()
    environments = Environments(make=task.environment)
    for problem in islice(task.warmup_problems(seed=0), 12):
        sample = asyncio.run(make_sample_of_demonstration(problem, environments, renderer=renderer))
        text = tokenizer.decode(sample.token_ids[sample.mask]).split("<|im_end|>")
        assert text[:-1] == list(problem.demonstrations)
        assert len(sample.token_ids) <= config.generator.max_model_len
        most = config.loop.sampling.max_tokens
        assert all(len(renderer.reply(text)) <= most for text in problem.demonstrations)


# An environment of one's own

RANGE = Problem(id="guess/10-16/12", question="10-16", answer="12", info={"low": 10, "high": 16})
GUESSING: GuessNumber = GuessNumber.Config().build()


@pytest.mark.parametrize(
    ("guesses", "asked", "reward", "is_correct"),
    [
        (["13", "11", "12"], ["10-16", "lower", "higher"], 0.8, True),
        (["12"], ["10-16"], 1.0, True),
        (["10", "11", "13"], ["10-16", "higher", "higher"], -0.3, False),
        (["a"], ["10-16"], -0.1, False),
    ],
    ids=["halved", "at once", "too late", "no number"],
)
def test_guesses_are_answered_and_rewarded(guesses, asked, reward, is_correct):
    rollout = played(GUESSING, RANGE, *guesses)
    assert [m.content for turn in rollout.turns for m in turn.messages] == asked
    assert rollout.turns[-1].observation.messages == ()
    score = GUESSING.rubric(seed=0).score(rollout)
    assert score.reward == pytest.approx(reward)
    assert score.correct == is_correct


def test_demonstrations_mostly_begin_at_the_lowest_and_half_of_them_end_right():
    problems = list(islice(GUESSING.warmup_problems(seed=0), 400))
    lowest = [p.demonstrations[0] == str(p.info["low"]) for p in problems]
    assert 0.6 < np.mean(lowest) < 0.8
    found = [p.demonstrations[-1] == p.answer for p in problems]
    assert 0.45 < np.mean(found) < 0.75


# Tools


@pytest.fixture(scope="module")
def task():
    return Arithmetic.Config(announce=False).build()


def step(environment, text):
    return asyncio.run(environment.step(Reply(text=text, completion=COMPLETION)))


@pytest.mark.parametrize("kind", ["bin", "product"])
def test_demonstrated_call_gets_the_answer_from_its_tool(task, kind):
    problem = next(
        p for p in task.train_problems(seed=0) if p.question.startswith("bin") == (kind == "bin")
    )
    environment = task.environment(problem)
    observation = step(environment, problem.demonstrations[0])
    assert [(m.role, m.content) for m in observation.messages] == [("tool", problem.answer)]
    assert observation.metrics["tools/calls"] == 1
    assert observation.metrics["tools/errors"] == 0
    assert step(environment, problem.demonstrations[1]).messages == ()
    assert [m.content for m in task.environment(problem).opening()] == [problem.question]
    announced = Arithmetic.Config().build().environment(problem).opening()[0].content
    assert '"name": "calculator"' in announced
    assert '"name": "python"' in announced


def test_only_the_right_number_at_the_end_is_rewarded(task):
    replies = (
        "= 1,776",
        "1776",
        "37*48 is 1776",
        "1775",
        "1776 or 1775",
        "",
        "-1776",
        "<think>1776",
    )
    assert task.tools  # made, as in a run; the rubric is pickled without them
    rubric = pickle.loads(pickle.dumps(task.rubric(seed=0)))
    scores = [rubric.score(replied(text, question="37*48", answer="1776")) for text in replies]
    assert [s.reward for s in scores] == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert [s.correct for s in scores] == [True] * 3 + [False] * 5


def test_demonstrations_mostly_guess():
    problems = islice(multi_turn_tools.tiny().task.build().warmup_problems(seed=1), 200)
    guesses = [len(problem.demonstrations) == 1 for problem in problems]
    assert 0.5 < sum(guesses) / 200 < 0.7


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_short_run_with_real_actors_ends_with_its_metrics(tmp_path):
    short = {
        "warmup.num_steps": "2", "loop.num_steps": "1", "loop.groups_per_batch": "2",
        "loop.group_size": "2",
        "loop.eval_every": "1", "task.num_eval": "4",
        "dump_folder": str(tmp_path), "name": "short",
    }  # fmt: skip
    options = [part for name, value in short.items() for part in (f"--{name}", value)]
    command = [
        sys.executable,
        "-m",
        "rl.train",
        "--module",
        "examples.multi_turn_tools",
        "--config",
        "tiny",
    ]
    done = subprocess.run(
        [*command, *options],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = read_metrics(tmp_path / "short" / "metrics.jsonl")
    assert [r["step"] for r in records if "eval/correct" in r] == [0, 1]
    (trained,) = (r for r in records if "reward/mean" in r)
    assert trained["environment/tools/calls"] == 0  # a random model calls no tool
    assert trained["rollout/turns_mean"] == 1
