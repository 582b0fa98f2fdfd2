import asyncio
from itertools import islice

import numpy as np
import pytest

from examples.custom_environment import GuessNumber, tiny
from rl.config.cli import parse_cli
from rl.models.tokenizer import build_byte_tokenizer
from rl.rollouts.demonstrations import demonstrated
from rl.rollouts.grading import ScoredRollout, token_rewards
from rl.rollouts.renderer import make_renderer
from rl.rollouts.tokenizer import open_tokenizer
from rl.rollouts.tried_environments import TriedEnvironments
from rl.types import Problem, Prompt, Reply, Rollout, Turn
from tests.support.scored import COMPLETION

PROBLEM = Problem(id="guess/10-16/12", question="10-16", answer="12", info={"low": 10, "high": 16})
TASK: GuessNumber = GuessNumber.Config().build()


def play(*guesses: str) -> Rollout:
    """The rollout of these replies, as far as the environment lets them be said."""

    async def run() -> Rollout:
        environment = TASK.environment(PROBLEM)
        messages, turns = environment.opening(), []
        for guess in guesses:
            observation = await environment.step(Reply(text=guess, completion=COMPLETION))
            prompt_ids = np.zeros(1, dtype=np.int32)
            turns.append(
                Turn(
                    messages=tuple(messages),
                    prompt_ids=prompt_ids,
                    completion=COMPLETION,
                    text=guess,
                    observation=observation,
                )
            )
            messages = observation.messages
            if not messages:
                break
        await environment.close()
        prompt = Prompt(problem=PROBLEM, token_ids=turns[0].prompt_ids)
        return Rollout(prompt=prompt, sample=0, turns=tuple(turns))

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("guesses", "told", "reward", "is_correct"),
    [
        (["13", "11", "12", "1"], ["10-16", "lower", "higher"], 0.8, True),
        (["12"], ["10-16"], 1.0, True),
        (["10", "11", "13", "12"], ["10-16", "higher", "higher"], -0.3, False),
        (["a", "12"], ["10-16"], -0.1, False),
    ],
    ids=["halved", "at once", "too late", "no number"],
)
def test_guesses_are_answered_and_rewarded(guesses, told, reward, is_correct):
    rollout = play(*guesses)
    assert [m.content for turn in rollout.turns for m in turn.messages] == told
    assert rollout.turns[-1].observation.messages == ()
    score = TASK.rubric(seed=0).score(rollout)
    assert score.reward == pytest.approx(reward)
    assert score.correct == is_correct


def test_a_wrong_guess_is_paid_for_at_its_own_tokens():
    rollout = play("13", "11", "12")
    score = TASK.rubric(seed=0).score(rollout)
    rewards = token_rewards(ScoredRollout(rollout=rollout, score=score), by_turn=True)
    assert rewards.tolist() == pytest.approx([0, -0.1, 0, -0.1, 0, 1.0])  # two tokens a reply


def test_demonstrations_are_what_the_environment_asks_for_and_mostly_from_below(tmp_path):
    build_byte_tokenizer(tmp_path)
    tokenizer, ends = open_tokenizer(tmp_path)
    renderer = make_renderer(tiny().renderer, tokenizer=tokenizer, stop_token_ids=ends, multi_turn=True)
    problems = list(islice(TASK.warmup_problems(seed=0), 400))
    environments = TriedEnvironments(make=TASK.environment)
    for problem in problems[:12]:
        sample = asyncio.run(demonstrated(problem, environments, renderer=renderer))
        text = tokenizer.decode(sample.token_ids[sample.mask]).split("<|im_end|>")
        assert text[:-1] == list(problem.demonstrations)
        assert len(sample.token_ids) <= tiny().generator.max_model_len
    lowest = [p.demonstrations[0] == str(p.info["low"]) for p in problems]
    assert 0.6 < np.mean(lowest) < 0.8
    found = [p.demonstrations[-1] == p.answer for p in problems]
    assert 0.45 < np.mean(found) < 0.75


def test_its_fields_are_options():
    argv = ["--module", "examples.custom_environment", "--config", "tiny", "--task.max_guesses", "4"]
    assert parse_cli(argv, default_module="sum_digits").config.task == GuessNumber.Config(max_guesses=4)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("width", 1, "width=1 is not between 2 and 20"),
        ("max_guesses", 0, "max_guesses=0 is less than 1"),
        ("halving", 1.5, "halving=1.5 is not between 0 and 1"),
    ],
)
def test_settings_out_of_range_are_refused(field, value, says):
    with pytest.raises(ValueError, match=says):
        GuessNumber.Config(**{field: value})
