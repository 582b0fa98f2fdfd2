import asyncio
import pickle
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from examples.multi_turn_tools import Arithmetic, tiny
from rl.models.tokenizer import build_byte_tokenizer, open_tokenizer
from rl.observability.metrics import read_metrics
from rl.rollouts.environment import Environments
from rl.rollouts.renderer import make_renderer
from rl.rollouts.samples import demonstrated
from rl.types import Reply
from tests.support.scored import COMPLETION, replied

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def task():
    return Arithmetic.Config(announce=False).build()


def step(environment, text):
    return asyncio.run(environment.step(Reply(text=text, completion=COMPLETION)))


@pytest.mark.parametrize("kind", ["bin", "product"])
def test_demonstrated_call_gets_the_answer_from_its_tool(task, kind):
    problem = next(p for p in task.train_problems(seed=0) if p.question.startswith("bin") == (kind == "bin"))
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
    replies = ("= 1,776", "1776", "37*48 is 1776", "1775", "1776 or 1775", "", "about 6771", "<think>1776")
    assert task.tools  # made, as in a run; the rubric is pickled without them
    rubric = pickle.loads(pickle.dumps(task.rubric(seed=0)))
    scores = [rubric.score(replied(text, question="37*48", answer="1776")) for text in replies]
    assert [s.reward for s in scores] == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert [s.correct for s in scores] == [True] * 3 + [False] * 5


def test_demonstrations_fit_the_tiny_run_and_mostly_guess(tmp_path):
    config = tiny()
    build_byte_tokenizer(tmp_path)
    tokenizer, ends = open_tokenizer(tmp_path)
    renderer = make_renderer(config.renderer, tokenizer=tokenizer, stop_token_ids=ends)
    renderer.check_multi_turn()
    task = config.task.build()
    problems = list(islice(task.warmup_problems(seed=0), 12))
    environments = Environments(make=task.environment)
    for problem in problems:
        sample = asyncio.run(demonstrated(problem, environments, renderer=renderer))
        assert len(sample.token_ids) <= config.generator.max_model_len
        for text in problem.demonstrations:
            assert len(renderer.reply(text)) <= config.loop.sampling.max_tokens
    guesses = [len(p.demonstrations) == 1 for p in islice(task.warmup_problems(seed=1), 200)]
    assert 0.5 < sum(guesses) / 200 < 0.7


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_short_run_with_real_actors_ends_with_its_metrics(tmp_path):
    short = {
        "warmup.num_steps": "2", "loop.num_steps": "1", "loop.groups_per_batch": "2", "loop.group_size": "2",
        "loop.eval_every": "1", "task.num_eval": "4",
        "dump_folder": str(tmp_path), "name": "short",
    }  # fmt: skip
    options = [part for name, value in short.items() for part in (f"--{name}", value)]
    command = [sys.executable, "-m", "rl.train", "--module", "examples.multi_turn_tools", "--config", "tiny"]
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
