import asyncio
from itertools import islice

import numpy as np
import pytest

from examples.custom_environment import GuessNumber, tiny
from rl.models.tokenizer import build_byte_tokenizer, open_tokenizer
from rl.rollouts.environment import Environments
from rl.rollouts.renderer import make_renderer
from rl.rollouts.samples import demonstrated
from rl.types import Problem
from tests.support.tasks import played

PROBLEM = Problem(id="guess/10-16/12", question="10-16", answer="12", info={"low": 10, "high": 16})
TASK: GuessNumber = GuessNumber.Config().build()


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
    rollout = played(TASK, PROBLEM, *guesses)
    assert [m.content for turn in rollout.turns for m in turn.messages] == asked
    assert rollout.turns[-1].observation.messages == ()
    score = TASK.rubric(seed=0).score(rollout)
    assert score.reward == pytest.approx(reward)
    assert score.correct == is_correct


def test_demonstrations_fit_the_environment_and_mostly_begin_at_the_lowest(tmp_path):
    build_byte_tokenizer(tmp_path)
    tokenizer, ends = open_tokenizer(tmp_path)
    renderer = make_renderer(tiny().renderer, tokenizer=tokenizer, stop_token_ids=ends)
    renderer.check_multi_turn()
    problems = list(islice(TASK.warmup_problems(seed=0), 400))
    environments = Environments(make=TASK.environment)
    for problem in problems[:12]:
        sample = asyncio.run(demonstrated(problem, environments, renderer=renderer))
        text = tokenizer.decode(sample.token_ids[sample.mask]).split("<|im_end|>")
        assert text[:-1] == list(problem.demonstrations)
        assert len(sample.token_ids) <= tiny().generator.max_model_len
    lowest = [p.demonstrations[0] == str(p.info["low"]) for p in problems]
    assert 0.6 < np.mean(lowest) < 0.8
    found = [p.demonstrations[-1] == p.answer for p in problems]
    assert 0.45 < np.mean(found) < 0.75
