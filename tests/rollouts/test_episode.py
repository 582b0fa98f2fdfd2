"""Episodes of one and several turns, and their limits."""

import asyncio
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rl.rollouts.environment import EnvironmentFailedError, Environments
from rl.rollouts.episode import EpisodeLimits, Episodes
from rl.types import Message, Observation, Problem, Rollout, SamplingParams
from rl.utils.errors import RunError
from tests.support.conversations import (
    Counting,
    Factory,
    ScriptedGenerator,
    TwinRenderer,
    TwinTokenizer,
)
from tests.support.virtual_time import run_in_virtual_time

SAMPLING = SamplingParams(max_tokens=16, num_samples=2, seed=7)
PROBLEMS = [Problem(id=f"ask/{name}", question=name, answer="") for name in ("one", "two")]


def echo(prompt: str, sampling: SamplingParams, sample: int) -> str:
    """Reply to the last message of a prompt, different for each sample."""
    return f"re {re.findall('<u>([^<]*)', prompt)[-1]} {'ab'[sample]}"


def make_episodes(
    factory: Factory | None = None,
    *,
    generator: ScriptedGenerator | None = None,
    max_tokens: int = 200,
    **limits: Any,
) -> Episodes:
    timeout_s = limits.get("step_timeout_s", 60.0)
    return Episodes(
        generator=generator or ScriptedGenerator(reply=echo),
        renderer=TwinRenderer(),
        environments=Environments(make=factory or Factory(), step_timeout_s=timeout_s),
        limits=EpisodeLimits(**limits),
        max_tokens=max_tokens,
    )


def run(factory: Factory | None = None, **settings: Any) -> list[list[Rollout]]:
    episodes = make_episodes(factory, **settings)
    return run_in_virtual_time(episodes.run(PROBLEMS, sampling=SAMPLING))[0]


def one(episodes: Episodes) -> tuple[Rollout, Any]:
    """Return the rollout of one problem, and the generator."""
    sampling = SamplingParams(max_tokens=16, seed=7)
    ((rollout,),) = run_in_virtual_time(episodes.run(PROBLEMS[:1], sampling=sampling))[0]
    return rollout, episodes.generator


# Token-in token-out


def test_each_prompt_extends_the_previous_one_with_the_sampled_completion():
    rollout, generator = one(make_episodes())
    renderer, encode = TwinRenderer(), TwinTokenizer().encode
    first, second, third = (prompt for prompt, _ in generator.asked)
    assert first == encode("<u>one<a>")
    assert second == first + generator.made[0].token_ids.tolist() + encode("</a><u>more 1<a>")
    assert third == second + generator.made[1].token_ids.tolist() + encode("</a><u>more 2<a>")
    assert [turn.completion for turn in rollout.turns] == generator.made
    parts = [a for t in rollout.turns for a in (t.prompt_ids, t.completion.token_ids)]
    assert np.concatenate(parts).tolist() == third + generator.made[2].token_ids.tolist()
    assert rollout.text == "re more 2 a"
    assert [m.content for m in rollout.messages] == [
        "one", "re one a", "more 1", "re more 1 a", "more 2", "re more 2 a",
    ]  # fmt: skip
    # This tokenizer would not give the same ids back: what was drawn was not encoded again.
    for turn in rollout.turns:
        again = renderer.reply(turn.text).tolist()
        assert again != turn.completion.token_ids.tolist()
        assert renderer.text(np.array(again)) == turn.text


def test_samples_with_equal_first_replies_get_different_seeds():
    def by_seed(prompt: str, sampling: SamplingParams, sample: int) -> str:
        return f"x{sampling.seed}" if "more" in prompt else "same"

    groups = run(generator=ScriptedGenerator(reply=by_seed))
    assert {r.turns[0].text for group in groups for r in group} == {"same"}
    later = [turn.text for group in groups for r in group for turn in r.turns[1:]]
    assert len(later) == len(set(later)) == 2 * 2 * 2


# Limits


def test_max_turns_ends_the_episode():
    rollout, generator = one(make_episodes(Factory(turns=9), max_turns=2))
    assert (rollout.end, len(rollout.turns), len(generator.asked)) == ("turns", 2, 2)
    assert (
        rollout.turns[-1].observation.messages[0].content == "more 2"
    )  # it was answered, but not continued
    rollout, _ = one(make_episodes(Factory(turns=1), max_turns=2))
    assert (rollout.end, len(rollout.turns)) == ("done", 2)


@pytest.mark.parametrize(
    ("limit", "asked", "num_turns", "num_tokens"),
    [
        (
            42,
            [16],
            1,
            25,
        ),  # an opening of 9 tokens, a reply of 16, and 17 messages that leave no room
        (43, [16, 1], 2, 43),
    ],
)
@pytest.mark.parametrize("of", ["context", "episode"])
def test_turns_are_limited_to_the_remaining_tokens(limit, asked, num_turns, num_tokens, of):
    generator = ScriptedGenerator(
        reply=lambda prompt, sampling, sample: "abcdefghijklmnopqrstuvwxyz"
    )
    episodes = make_episodes(generator=generator, max_tokens=limit if of == "context" else 500)
    if of == "episode":
        episodes.limits.max_tokens = limit
    rollout, _ = one(episodes)
    assert [s.max_tokens for _, s in generator.asked] == asked
    assert (rollout.end, len(rollout.turns), rollout.num_tokens) == (
        "tokens",
        num_turns,
        num_tokens,
    )


def test_prompt_without_room_for_a_reply_is_refused_and_every_environment_closed():
    factory = Factory()
    with pytest.raises(
        ValueError, match=r"prompt of problem 'ask/one' has 9 tokens; .* room for 8"
    ):
        run(factory, max_tokens=24)
    assert factory.closed == [1] * 4


def test_no_turn_begins_after_the_time_limit():
    rollout, generator = one(make_episodes(Factory(turns=9, seconds=2.0), timeout_s=5.0))
    # Replies at 2, 4 and 6 s.
    assert (rollout.end, len(rollout.turns), len(generator.asked)) == ("time", 3, 3)
    assert rollout.failure is None


# Failures


@dataclass(kw_only=True)
class Broken(Counting):
    """Environment that breaks in one turn of one problem."""

    at: int = 2
    of: str = "one"
    how: str = "raise"

    async def step(self, reply):
        observation = await super().step(reply)
        if (self.num_steps, self.problem.question) != (self.at, self.of):
            return observation
        if self.how == "hang":
            await asyncio.sleep(1e6)
        raise {
            "raise": KeyError("board"),
            "timeout": TimeoutError(),
            "run": RunError("no sandbox is left"),
        }[self.how]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raise", r"the environment raised KeyError\('board'\)"),
        ("timeout", r"the environment raised TimeoutError\(\)"),
        ("hang", r"the environment took longer than step_timeout_s=3"),
    ],
)
def test_environment_that_breaks_is_a_failed_rollout(how, says):
    factory = Factory(Broken, how=how)
    failed, whole = run(factory, step_timeout_s=3.0)
    for rollout, letter in zip(failed, "ab", strict=True):
        assert (rollout.end, len(rollout.turns)) == ("failed", 2)
        where = rf" in turn 2 of problem 'ask/one', reply 're more 1 [{letter}a]'$"
        assert rollout.failure is not None
        assert re.match(says + where, rollout.failure)
        assert rollout.turns[-1].observation == Observation()
    assert [(r.end, r.failure, len(r.turns)) for r in whole] == [("done", None, 3)] * 2
    assert factory.closed == [1] * 4


class Few(Factory):
    """Factory that fails at its fourth environment."""

    def __call__(self, problem):
        if len(self.made) == 3:
            raise KeyError("board")
        return super().__call__(problem)


class Random(Counting):
    def opening(self):
        return (Message(role="user", content=f"draw {id(self)}"),)


class Gone(ScriptedGenerator):
    async def generate(self, prompts, **settings):
        if len(self.asked) == 3:
            raise RunError("generator_1 is gone")
        return await super().generate(prompts, **settings)


@pytest.mark.parametrize(
    ("factory", "generator", "error", "message"),
    [
        (
            Few(),
            ScriptedGenerator,
            ValueError,
            r"^the environment of problem 'ask/two' cannot be made",
        ),
        (Factory(Random), ScriptedGenerator, ValueError, "of problem 'ask/one' open differently"),
        (Factory(), Gone, RunError, "generator_1 is gone"),
    ],
)
def test_error_outside_a_step_stops_the_run_and_closes_every_environment(
    factory, generator, error, message
):
    with pytest.raises(error, match=message):
        run(factory, generator=generator(reply=echo))
    assert factory.closed == [1] * len(factory.made)


def test_run_error_cancels_all_episodes():
    class Slower(Broken):
        async def step(self, reply):
            await asyncio.sleep(0.5 * (self.problem.question == "two"))
            return await super().step(reply)

    factory = Factory(Slower, how="run", seconds=1.0)
    generator = ScriptedGenerator(reply=echo)

    async def main() -> tuple[int, float]:
        episodes = make_episodes(factory, generator=generator)
        with pytest.raises(RunError, match="no sandbox is left"):
            await episodes.run(PROBLEMS, sampling=SAMPLING)
        num_asked, at = len(generator.asked), asyncio.get_running_loop().time()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await asyncio.sleep(60)
        return num_asked, at

    (num_asked, at), _ = run_in_virtual_time(main())
    assert at == 2.0  # at once
    assert len(generator.asked) == num_asked == 2 + 4
    # The others had answered once, at 1.5 s, and were about to answer again at 3 s.
    assert [e.num_steps for e in factory.made if e.problem.question == "two"] == [1, 1]
    assert factory.closed == [1] * 4


@pytest.mark.parametrize(
    ("how", "says"),
    [("raise", "raised OSError('pipe')"), ("hang", "took longer than step_timeout_s=3")],
)
def test_error_at_the_close_is_logged_and_the_others_are_closed(how, says, caplog):
    class Stuck(Counting):
        async def close(self) -> None:
            await super().close()
            if self.problem.question == "one":
                if how == "raise":
                    raise OSError("pipe")
                await asyncio.sleep(1e6)

    factory = Factory(Stuck)
    groups = run(factory, step_timeout_s=3.0)
    assert [r.end for group in groups for r in group] == ["done"] * 4
    assert factory.closed == [1] * 4
    assert [m for m in caplog.messages if "could not be closed" in m] == [
        f"an environment could not be closed: {EnvironmentFailedError(f'the environment {says}')!r}"
    ] * 2


# Order


def test_episodes_run_concurrently():
    def seconds(prompt: str) -> float:
        return 5.0 if "two" in prompt and "more 1" in prompt and "more 2" not in prompt else 1.0

    async def main() -> list[list[Rollout]]:
        generator = ScriptedGenerator(reply=echo, seconds=seconds)
        episodes = make_episodes(Factory(seconds=0.5), generator=generator)
        groups = await episodes.run(PROBLEMS, sampling=SAMPLING)
        # Busy while any completion is under way: 1 s, then 5 s with the others' turns among them,
        # then 1 s; but for the half second in which all environments think at once, before the
        # second turn, and the slowest one's before its last.
        assert episodes.generating.total_s() == pytest.approx(1 + 5 + 1)
        return groups

    groups, took_s = run_in_virtual_time(main())
    assert took_s == pytest.approx(1 + 0.5 + 5 + 0.5 + 1 + 0.5)
    assert [[r.prompt.problem.id for r in group] for group in groups] == [
        ["ask/one"] * 2,
        ["ask/two"] * 2,
    ]
    assert [turn.text for turn in groups[1][0].turns] == ["re two a", "re more 1 a", "re more 2 a"]


def test_failure_quotes_an_excerpt_of_a_long_reply():
    class Fails(Counting):
        async def step(self, reply: Any) -> Observation:
            raise ValueError(reply.text)

    generator = ScriptedGenerator(reply=lambda prompt, sampling, sample: "ab" * 50_000)
    episodes = make_episodes(Factory(Fails), generator=generator, max_tokens=200_000)
    problem = Problem(id="x" * 50_000, question="one", answer="")
    sampling = SamplingParams(max_tokens=150_000, seed=7)
    ((rollout,),) = run_in_virtual_time(episodes.run([problem], sampling=sampling))[0]
    assert rollout.failure is not None
    assert rollout.failure.startswith("the environment raised ValueError('abab")
    assert len(rollout.failure) < 6500
