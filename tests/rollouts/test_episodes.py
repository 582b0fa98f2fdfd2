"""Episodes over a scripted sampler, in virtual time: token-in token-out, limits, failures, order."""

import asyncio
import contextlib
import logging
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rl.errors import RunError
from rl.rollouts.episodes import Episodes
from rl.rollouts.samples import policy_sample
from rl.rollouts.settings import EpisodeLimits
from rl.types import Message, Observation, Problem, Rollout, SamplingParams
from tests.support.conversations import Counting, Factory, ScriptedSampler, TwinRenderer, TwinTokenizer
from tests.support.virtual_time import run_in_virtual_time

SAMPLING = SamplingParams(max_tokens=16, num_samples=2, seed=7)
PROBLEMS = [Problem(id=f"ask/{name}", question=name, answer="") for name in ("one", "two")]


def echo(prompt: str, sampling: SamplingParams, sample: int) -> str:
    """Of a prompt's last message; differs by sample."""
    return f"re {re.findall('<u>([^<]*)', prompt)[-1]} {'ab'[sample]}"


def make_episodes(
    factory: Factory | None = None,
    *,
    sampler: ScriptedSampler | None = None,
    renderer: TwinRenderer | None = None,
    max_tokens: int = 200,
    **limits: Any,
) -> Episodes:
    return Episodes(
        sampler=sampler or ScriptedSampler(reply=echo),
        renderer=renderer or TwinRenderer(),
        environment=factory or Factory(),
        limits=EpisodeLimits(**limits),
        max_tokens=max_tokens,
    )


def run(
    factory: Factory | None = None,
    *,
    sampler: ScriptedSampler | None = None,
    sampling: SamplingParams = SAMPLING,
    max_tokens: int = 200,
    problems: list[Problem] = PROBLEMS,
    **limits: Any,
) -> tuple[list[list[Rollout]], Episodes]:
    episodes = make_episodes(factory, sampler=sampler, max_tokens=max_tokens, **limits)
    return run_in_virtual_time(episodes.run(problems, sampling=sampling, session="s"))[0], episodes


def ids(rollout: Rollout, *, turns: int) -> list[int]:
    """All tokens of its first turns."""
    parts = [a for t in rollout.turns[:turns] for a in (t.prompt_ids, t.completion.token_ids)]
    return np.concatenate(parts).tolist()


def one(**settings: Any) -> tuple[Rollout, ScriptedSampler]:
    sampler = settings.pop("sampler", None) or ScriptedSampler(reply=echo)
    sampling = SamplingParams(max_tokens=16, seed=7)
    given: dict[str, Any] = {"sampling": sampling, "problems": PROBLEMS[:1]}
    ((rollout,),), _ = run(sampler=sampler, **given | settings)
    return rollout, sampler


# Token-in token-out


def test_each_prompt_is_the_one_before_with_the_completion_as_it_was_drawn_and_what_was_said():
    rollout, sampler = one()
    renderer, encode = TwinRenderer(), TwinTokenizer().encode
    first, second, third = (prompt for prompt, _, _ in sampler.asked)
    assert first == encode("<u>one<a>")
    assert second == first + sampler.made[0].token_ids.tolist() + encode("</a><u>more 1<a>")
    assert third == second + sampler.made[1].token_ids.tolist() + encode("</a><u>more 2<a>")
    assert len(rollout.turns) == 3
    assert ids(rollout, turns=3) == third + sampler.made[2].token_ids.tolist()
    assert rollout.text == "re more 2 a"
    assert [m.content for m in rollout.messages] == [
        "one", "re one a", "more 1", "re more 1 a", "more 2", "re more 2 a",
    ]  # fmt: skip
    # This tokenizer would not give the same ids back: what was drawn was not encoded again.
    for turn in rollout.turns:
        again = renderer.reply(turn.text).tolist()
        assert again != turn.completion.token_ids.tolist()
        assert renderer.text(np.array(again)) == turn.text


def test_a_training_sample_has_the_samplers_ids_logprobs_and_versions_on_every_turn_and_no_other_is_trained():
    rollout, sampler = one()
    sample = policy_sample(
        rollout, advantages_C=np.arange(1, 1 + rollout.num_completion_tokens), temperature=1
    )
    last_prompt, _, _ = sampler.asked[-1]
    assert sample.token_ids.tolist() == last_prompt + sampler.made[-1].token_ids.tolist()
    at = 0
    of_model = np.zeros(len(sample.token_ids), dtype=bool)
    for turn, made in zip(rollout.turns, sampler.made, strict=True):
        at += len(turn.prompt_ids)
        place = slice(at, at + len(made.token_ids))
        of_model[place] = True
        assert sample.token_ids[place].tolist() == made.token_ids.tolist()
        assert sample.generator_logprobs[place].tolist() == made.logprobs.tolist()
        assert sample.policy_versions[place].tolist() == made.policy_versions.tolist()
        at += len(made.token_ids)
    assert sample.mask.tolist() == of_model.tolist()
    assert sorted(set(sample.policy_versions[of_model].tolist())) == [1, 2, 3]
    assert np.isnan(sample.generator_logprobs[~of_model]).all()
    assert set(sample.policy_versions[~of_model].tolist()) == {-1}


def test_environments_are_told_the_text_and_the_completion_and_the_rollout_what_they_answered():
    factory = Factory(reward=0.25, turns=1)
    rollout, sampler = one(factory=factory)
    (environment,) = factory.made
    assert [reply.text for reply in environment.replies] == ["re one a", "re more 1 a"]
    assert [reply.completion for reply in environment.replies] == sampler.made
    assert [turn.observation.reward for turn in rollout.turns] == [0.25, 0.25]
    assert [turn.messages[0].content for turn in rollout.turns] == ["one", "more 1"]


def test_a_reply_that_was_cut_off_is_continued_behind_what_there_is():
    rollout, sampler = one(sampling=SamplingParams(max_tokens=4, seed=7), factory=Factory(turns=1))
    assert [c.finish_reason for c in sampler.made] == ["length", "length"]
    said = TwinTokenizer().encode("!</a><u>more 1<a>")
    assert rollout.turns[1].prompt_ids.tolist() == said
    assert sampler.asked[1][0] == [*TwinTokenizer().encode("<u>one<a>"), *sampler.made[0].token_ids, *said]


# Calls of the sampler


def test_first_turns_are_one_call_and_all_calls_are_of_one_session():
    sampler = ScriptedSampler(reply=echo)
    groups, episodes = run(sampler=sampler)
    assert [[r.sample for r in group] for group in groups] == [[0, 1], [0, 1]]
    assert [[r.prompt.problem.id for r in group] for group in groups] == [["ask/one"] * 2, ["ask/two"] * 2]
    assert {session for _, _, session in sampler.asked} == {"s"}
    assert [s.num_samples for _, s, _ in sampler.asked] == [2, 2] + [1] * 8
    assert [s.seed for _, s, _ in sampler.asked[:2]] == [7, 7]
    assert episodes.num_generated_tokens == sum(len(c.token_ids) for c in sampler.made)
    assert episodes.num_generated_tokens == sum(r.num_completion_tokens for group in groups for r in group)


def by_seed(prompt: str, sampling: SamplingParams, sample: int) -> str:
    return f"x{sampling.seed}" if "more" in prompt else "same"


def test_samples_with_equal_first_replies_go_on_with_seeds_of_their_own():
    sampling = SamplingParams(max_tokens=64, num_samples=3, seed=7)
    (group,), _ = run(sampler=ScriptedSampler(reply=by_seed), sampling=sampling, problems=PROBLEMS[:1])
    assert {r.turns[0].text for r in group} == {"same"}
    later = [turn.text for r in group for turn in r.turns[1:]]
    assert len(set(later)) == 6


def test_episodes_of_several_problems_of_one_call_do_not_share_seeds():
    sampler = ScriptedSampler(reply=by_seed)
    run(sampler=sampler, sampling=SamplingParams(max_tokens=64, num_samples=2, seed=7))
    later = [s.seed for _, s, _ in sampler.asked if s.num_samples == 1]
    assert len(later) == len(set(later)) == 2 * 2 * 2


def test_the_same_run_twice_gives_the_same_and_another_seed_another():
    def texts(seed: int | None) -> list[str]:
        sampling = SamplingParams(max_tokens=64, num_samples=2, seed=seed)
        groups, _ = run(sampler=ScriptedSampler(reply=by_seed), sampling=sampling)
        return [turn.text for group in groups for r in group for turn in r.turns]

    assert texts(7) == texts(7) != texts(8)
    assert set(texts(None)) == {"same", "xNone"}  # without a seed, no turn has one


# Limits


def test_no_more_turns_than_the_limit():
    rollout, sampler = one(factory=Factory(turns=9), max_turns=2)
    assert (rollout.end, len(rollout.turns), len(sampler.asked)) == ("turns", 2, 2)
    assert rollout.turns[-1].observation.messages[0].content == "more 2"  # it was answered, but not continued
    rollout, _ = one(factory=Factory(turns=1), max_turns=2)
    assert (rollout.end, len(rollout.turns)) == ("done", 2)


def test_a_later_turns_most_tokens_are_cut_to_the_room_that_is_left():
    def long(prompt: str, sampling: SamplingParams, sample: int) -> str:
        return "abcdefghijklmnopqrstuvwxyz"

    # 9 + 16, then 16 and what is left of 50.
    rollout, sampler = one(sampler=ScriptedSampler(reply=long), max_tokens=50)
    told = [len(turn.prompt_ids) for turn in rollout.turns]
    assert told == [9, 17]
    assert [s.max_tokens for _, s, _ in sampler.asked] == [16, 50 - 9 - 16 - 17]
    assert (rollout.end, rollout.num_tokens) == ("tokens", 50)


@pytest.mark.parametrize(("limit", "num_turns", "left"), [(42, 1, None), (43, 2, 1), (44, 2, 2)])
def test_a_turn_begins_only_where_a_token_of_it_fits(limit, num_turns, left):
    def long(prompt: str, sampling: SamplingParams, sample: int) -> str:
        return "abcdefghijklmnopqrstuvwxyz"

    rollout, sampler = one(sampler=ScriptedSampler(reply=long), max_tokens=limit)
    assert (rollout.end, len(rollout.turns)) == ("tokens", num_turns)
    if left is not None:
        assert sampler.asked[-1][1].max_tokens == left


def test_the_episodes_own_limit_of_tokens_holds_for_its_first_turn_too():
    def limited(limit: int) -> Rollout:
        episodes = make_episodes(Factory(turns=9), max_tokens=500)
        episodes.limits.max_tokens = limit
        sampling = SamplingParams(max_tokens=16, seed=7)
        return run_in_virtual_time(episodes.run(PROBLEMS[:1], sampling=sampling))[0][0][0]

    rollout = limited(60)
    assert rollout.end == "tokens"
    assert len(rollout.turns) > 1
    assert rollout.num_tokens <= 60
    assert limited(25).num_tokens <= 25
    with pytest.raises(
        ValueError, match=r"problem 'ask/one' has 9 tokens; .* room for 8 .*episode\.max_tokens"
    ):
        limited(24)


def test_no_turn_begins_after_the_episodes_time():
    rollout, sampler = one(factory=Factory(turns=9, seconds=2.0), timeout_s=5.0)
    # Replies at 2, 4 and 6 s.
    assert (rollout.end, len(rollout.turns), len(sampler.asked)) == ("time", 3, 3)
    assert rollout.failure is None


def test_a_prompt_without_room_for_a_reply_is_refused_by_name():
    with pytest.raises(ValueError, match=r"prompt of problem 'ask/one' has 9 tokens; the context .* for 8"):
        run(max_tokens=24)


# Failures


def message(**fields: Any) -> Message:
    """Also one that no type checker would take."""
    return Message(**fields)


@dataclass(kw_only=True)
class Broken(Counting):
    """Goes wrong at a turn of one of the problems."""

    at: int = 2
    of: str = "one"
    how: str = "raise"

    async def step(self, reply):
        observation = await super().step(reply)
        if (self.num_steps, self.problem.question) != (self.at, self.of):
            return observation
        if self.how == "hang":
            await asyncio.sleep(1e6)
        if self.how == "stay":
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1e6)
            await asyncio.sleep(1e6)
        if self.how == "none":
            return None
        raise {
            "raise": KeyError("board"),
            "timeout": TimeoutError(),
            "run": RunError("no sandbox is left"),
            "cancelled": asyncio.CancelledError(),
        }[self.how]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raise", r"the environment raised KeyError\('board'\)"),
        ("timeout", r"the environment raised TimeoutError\(\)"),
        ("cancelled", r"the environment raised RuntimeError\('CancelledError of an environment'\)"),
        ("hang", r"the environment took longer than step_timeout_s=3"),
        ("stay", r"the environment took longer than step_timeout_s=3, and did not end when cancelled"),
        ("none", r"the environment raised TypeError\('`step` returned None, which is no Observation'\)"),
    ],
)
def test_an_environment_that_breaks_is_a_failed_rollout_that_names_turn_problem_and_reply(how, says, caplog):
    factory = Factory(Broken, how=how)
    (failed, whole), _ = run(factory, step_timeout_s=3.0)
    for rollout, letter in zip(failed, "ab", strict=True):
        assert (rollout.end, len(rollout.turns)) == ("failed", 2)
        where = rf" in turn 2 of problem 'ask/one', reply 're more 1 [{letter}a]'$"
        assert rollout.failure is not None
        assert re.match(says + where, rollout.failure)
        assert rollout.turns[-1].observation == Observation()
    assert [(r.end, r.failure, len(r.turns)) for r in whole] == [("done", None, 3)] * 2
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert sorted(record.getMessage() for record in warned) == sorted(str(r.failure) for r in failed)
    assert factory.closed == [1] * 4


@pytest.mark.parametrize(
    ("observation", "says"),
    [
        ({"messages": ("go on",)}, r"TypeError\(\"messages\[0\] is 'go on', which is no Message"),
        ({"messages": "go on"}, r"TypeError\(\"messages is 'go on', which is no sequence"),
        ({"messages": None}, r"TypeError\('messages is None, which is no sequence"),
        (
            {"messages": (message(role="bot", content=""),)},
            r"ValueError\(\"messages\[0\]\.role='bot': must be",
        ),
        ({"messages": (message(role="user", content=3),)}, r"TypeError\('messages\[0\]\.content=3: must be"),
        ({"reward": "good"}, r"TypeError\(\"reward='good': must be a number"),
        ({"reward": None}, r"TypeError\('reward=None: must be a number"),
        ({"reward": float("nan")}, r"ValueError\('reward=nan: must be finite"),
        ({"reward": float("-inf")}, r"ValueError\('reward=-inf: must be finite"),
        ({"metrics": {"moves": "two"}}, r"TypeError\(\"metrics\['moves'\]='two': must be a number"),
        ({"metrics": {"moves": float("nan")}}, r"ValueError\(\"metrics\['moves'\]=nan: must be finite"),
        ({"metrics": {3: 1.0}}, r"TypeError\('metrics has the name 3, which is no string"),
        ({"metrics": [1.0]}, r"TypeError\('metrics=\[1\.0\]: must be numbers by name"),
    ],
)
def test_an_observation_with_a_field_that_cannot_be_used_is_a_failed_rollout_that_names_it(observation, says):
    class Odd(Counting):
        async def step(self, reply):
            whole = await super().step(reply)
            return Observation(**observation) if self.num_steps == 2 else whole

    rollout, _ = one(factory=Factory(Odd))
    assert (rollout.end, len(rollout.turns)) == ("failed", 2)
    assert rollout.failure is not None
    assert re.match(rf"the environment raised {says}.* in turn 2 of problem 'ask/one'", rollout.failure)
    assert rollout.turns[-1].observation == Observation()


def test_numbers_of_numpy_are_numbers():
    class Numpy(Counting):
        async def step(self, reply):
            numbers: dict[str, Any] = {"reward": np.float32(0.5), "metrics": {"moves": np.int64(2)}}
            return Observation(**numbers)

    rollout, _ = one(factory=Factory(Numpy))
    assert (rollout.end, rollout.failure, rollout.turns[0].observation.reward) == ("done", None, 0.5)


@pytest.mark.parametrize("error", [ValueError("no such role"), TypeError("surrogates")])
def test_messages_that_the_template_refuses_are_a_failed_rollout_that_names_problem_and_turn(error):
    class Refusing(TwinRenderer):
        def continuation(self, messages, *, after):
            if messages[0].content == "more 2":
                raise error
            return super().continuation(messages, after=after)

    factory = Factory()
    episodes = make_episodes(factory, renderer=Refusing())
    (((rollout,),), _) = run_in_virtual_time(
        episodes.run(PROBLEMS[:1], sampling=SamplingParams(max_tokens=16))
    )
    assert (rollout.end, len(rollout.turns)) == ("failed", 2)
    assert rollout.failure == (
        f"the renderer refused the environment's messages ({error!r}) in turn 2 of problem 'ask/one', "
        "reply 're more 1 a'"
    )
    assert factory.closed == [1]


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("opening", "says"),
    [
        (lambda: _raise(KeyError("board")), r"KeyError\('board'\)"),
        (lambda: None, "it is None, which is no sequence of Message"),
        (lambda: "hello", "it is 'hello', which is no sequence of Message"),
        (lambda: ("hello",), r"it\[0\] is 'hello', which is no Message"),
        (lambda: (), "there are no messages in it"),
        (lambda: [message(role="user", content=None)], r"it\[0\]\.content=None: must be a string"),
    ],
)
def test_an_opening_that_cannot_be_used_ends_the_run_by_the_problems_name(opening, says):
    class Odd(Counting):
        def opening(self):
            return opening()

    factory = Factory(Odd)
    with pytest.raises(RunError, match=rf"environment of problem 'ask/one' \(Odd\) does not open.*{says}"):
        run(factory)
    assert factory.closed == [1] * 4


def test_an_error_that_ends_the_run_passes_and_no_other_episode_goes_on():
    class Slower(Broken):
        async def step(self, reply):
            await asyncio.sleep(0.5 * (self.problem.question == "two"))
            return await super().step(reply)

    factory = Factory(Slower, how="run", seconds=1.0)
    sampler = ScriptedSampler(reply=echo)

    async def main() -> tuple[int, float]:
        episodes = make_episodes(factory, sampler=sampler)
        with pytest.raises(RunError, match="no sandbox is left"):
            await episodes.run(PROBLEMS, sampling=SAMPLING)
        num_asked, at = len(sampler.asked), asyncio.get_running_loop().time()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await asyncio.sleep(60)
        return num_asked, at

    (num_asked, at), _ = run_in_virtual_time(main())
    assert at == 2.0  # at once
    assert len(sampler.asked) == num_asked == 2 + 4
    # The others had answered once, at 1.5 s, and were about to answer again at 3 s.
    assert [e.num_steps for e in factory.made if e.problem.question == "two"] == [1, 1]
    assert factory.closed == [1] * 4


def test_an_error_of_the_sampler_in_a_later_turn_ends_them_all():
    class Gone(ScriptedSampler):
        async def generate(self, prompts, **settings):
            if len(self.asked) == 3:
                raise RunError("generator_1 is gone")
            return await super().generate(prompts, **settings)

    factory = Factory()
    with pytest.raises(RunError, match="generator_1 is gone"):
        run(factory, sampler=Gone(reply=echo))
    assert factory.closed == [1] * 4


def test_episodes_that_are_cancelled_are_closed_once():
    factory = Factory(seconds=100.0)

    async def main() -> None:
        episodes = make_episodes(factory)
        task = asyncio.create_task(episodes.run(PROBLEMS, sampling=SAMPLING))
        await asyncio.sleep(1)
        assert factory.closed == [0] * 4
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    _, took_s = run_in_virtual_time(main())
    assert took_s == 1
    assert factory.closed == [1] * 4
    assert all(environment.num_steps == 0 for environment in factory.made)


def test_environments_are_closed_once_also_where_nothing_went_wrong_or_the_prompt_did_not_fit():
    factory = Factory()
    run(factory)
    assert factory.closed == [1] * 4
    factory = Factory()
    with pytest.raises(ValueError, match="ask/one"):
        run(factory, max_tokens=20)
    assert factory.closed == [1] * 4


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RunError("no fourth board"), "^no fourth board"),
        (KeyError("board"), r"^the environment of problem 'ask/two' cannot be made: KeyError\('board'\)"),
    ],
)
def test_one_that_cannot_be_made_ends_the_run_and_those_made_before_are_closed(error, says):
    class Few(Factory):
        def __call__(self, problem):
            if len(self.made) == 3:
                raise error
            return super().__call__(problem)

    factory = Few()
    with pytest.raises(RunError, match=says):
        run(factory)
    assert factory.closed == [1] * 3


def test_a_task_that_two_await_and_one_ends_with_its_time_fails_the_other_too():
    shared: list[asyncio.Future[None]] = []

    class Shares(Counting):
        async def step(self, reply):
            if not shared:
                shared.append(asyncio.ensure_future(asyncio.sleep(1e6)))
            if self.problem.question == "two" and self.num_steps == 0:
                return await super().step(reply)
            await shared[0]
            raise AssertionError

    sampling = SamplingParams(max_tokens=16)
    ((first,), (second,)), _ = run(Factory(Shares, seconds=1.0), sampling=sampling, step_timeout_s=3.0)
    assert str(first.failure).startswith("the environment took longer than step_timeout_s=3 in turn 1")
    assert str(second.failure).startswith(
        "the environment raised RuntimeError('CancelledError of an environment') in turn 2"
    )


@pytest.mark.parametrize(
    ("how", "says"),
    [("raise", "OSError('pipe')"), ("hang", "TooLongError('took longer than step_timeout_s=3')")],
)
def test_one_that_cannot_be_closed_is_logged_and_the_others_are_closed(how, says, caplog):
    class Stuck(Counting):
        async def close(self) -> None:
            await super().close()
            if self.problem.question == "one":
                if how == "raise":
                    raise OSError("pipe")
                await asyncio.sleep(1e6)

    factory = Factory(Stuck)
    groups, _ = run(factory, step_timeout_s=3.0)
    assert [r.end for group in groups for r in group] == ["done"] * 4
    assert factory.closed == [1] * 4
    assert [m for m in caplog.messages if "could not be closed" in m] == [
        f"an environment could not be closed: {says}"
    ] * 2


def test_environments_of_a_problem_that_open_differently_are_refused():
    class Random(Counting):
        def opening(self):
            made = len(factory.made)
            return (Message(role="user", content=f"draw {id(self)} of {made}"),)

    factory = Factory(Random)
    with pytest.raises(RunError, match=r"environments of problem 'ask/one' open differently"):
        run(factory)
    assert factory.closed == [1] * 4


# Order


def test_all_episodes_run_at_once_and_the_slowest_is_what_it_takes():
    def seconds(prompt: str) -> float:
        return 5.0 if "two" in prompt and "more 1" in prompt and "more 2" not in prompt else 1.0

    async def main() -> list[list[Rollout]]:
        sampler = ScriptedSampler(reply=echo, seconds=seconds)
        episodes = make_episodes(Factory(seconds=0.5), sampler=sampler)
        groups = await episodes.run(PROBLEMS, sampling=SAMPLING)
        # Busy while any completion is under way: 1 s, then 5 s with the others' turns among them, then 1 s;
        # but for the half second in which all environments think at once, before the second turn, and the
        # slowest one's before its last.
        assert episodes.generating.total_s() == pytest.approx(1 + 5 + 1)
        return groups

    groups, took_s = run_in_virtual_time(main())
    assert took_s == pytest.approx(1 + 0.5 + 5 + 0.5 + 1 + 0.5)
    assert [[r.prompt.problem.id for r in group] for group in groups] == [["ask/one"] * 2, ["ask/two"] * 2]
    assert [turn.text for turn in groups[1][0].turns] == ["re two a", "re more 1 a", "re more 2 a"]
