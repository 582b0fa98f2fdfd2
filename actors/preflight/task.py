"""Checks of a run's task before anything starts; every error names the problem."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import chain, islice

import numpy as np

from rl.agents.task import get_program
from rl.loop.config import LoopConfig
from rl.rollouts.environment import EnvironmentFailedError, Environments
from rl.rollouts.renderer import PromptTooLongError, Renderer, render_prompt
from rl.rollouts.rewards import START_S, RewardProcess, check_sendable
from rl.rollouts.rubric import Rubric
from rl.rollouts.samples import (
    UnfitDemonstrationError,
    make_sample_of_demonstration,
    play_demonstration,
)
from rl.tasks.fingerprint import describe_changes
from rl.tasks.task import Task
from rl.training.checkpoints.config import LoadSource
from rl.training.checkpoints.tensors import PROBLEMS, is_excluded
from rl.types import Completion, Message, Problem, Prompt, Rollout, Score, Turn
from rl.utils.errors import RunError
from rl.utils.printing import truncate
from rl.utils.threads import run_now

logger = logging.getLogger(__name__)

MAX_SHOWN_CHARS = 200
"""Longest excerpt of an example in an error."""
NUM_PROBED_PROBLEMS = 64
"""Training problems whose prompts are rendered before the start; the others when their turn comes.
"""


def check_problems(
    source: LoadSource | None, task: Task, *, seed: int, exclude: Iterable[str]
) -> list[str]:
    """Check that a checkpoint to continue from was saved with this task's problems; return what to
    tell.

    Raises:
        ValueError: the training problems differ; says how, and what accepts them.
    """
    if source is None or source.position is None:
        return []
    saved = source.position.problems
    if saved is None:
        return [
            f"{source.path} does not say with which problems it was saved, so they are not compared"
        ]
    # Other evaluation problems change no gradient, so that only the training problems must agree.
    changes, of_sets = describe_changes(saved, task, seed=seed)
    if changes and not is_excluded(PROBLEMS, exclude):
        raise ValueError(
            f"{source.path} was saved by a run with other training problems: {'; '.join(changes)}. "
            "To go on would repeat some and leave out others: give the run the problems, seed and "
            f"settings that it had, or add {PROBLEMS} to trainer.checkpoint.exclude_from_loading "
            "to go on with these"
        )
    return [f"going on with other problems: {change}" for change in (*changes, *of_sets)]


def check_task(
    task: Task,
    *,
    loop: LoopConfig,
    max_model_len: int,
    time_limit_s: float,
    seed: int,
    environments: Environments,
    renderer: Renderer,
    warms_up: bool = False,
    rewards_in_actors: bool = False,
    start_timeout_s: float = START_S,
) -> Prompt:
    """Try a few problems, and return the prompt of the first: of an evaluation set, if any.

    Prompts must fit, environments must work, and the rubric must give finite numbers. The rubric is
    tried in a process of its own, as in the run; with `rewards_in_actors` it must reach their
    machines. With `loop.max_failed_rewards` above 0, a rubric that fails, or an environment that
    breaks after it has opened, is only a warning.

    Raises:
        ValueError: names the problem or the reward function, and what it did.
    """
    # Evaluation problems first: all of them must fit, while training problems may be left out.
    held_out = _list_held_out_problems(task, needed=loop.eval_every > 0)
    probed = [*held_out, *islice(task.train_problems(seed=seed), NUM_PROBED_PROBLEMS)]
    openings, have_one_turn = run_now(_open_all(probed, environments))

    # A template that rewrites earlier replies does no harm where there is only one reply.
    if loop.episode.max_turns != 1 and (get_program(task) or not all(have_one_turn)):
        renderer.check_multi_turn()
    room = min(max_model_len, loop.episode.max_tokens or max_model_len) - loop.sampling.max_tokens
    may_drop_from = len(held_out) if loop.long_prompts == "drop" else len(probed)
    _check_prompts(probed, openings, renderer=renderer, room=room, may_drop_from=may_drop_from)
    prompt = render_prompt(probed[0], openings[0], renderer=renderer, max_tokens=room)

    example = _play_demonstration(
        prompt, environments, renderer=renderer, may_fail=loop.max_failed_rewards > 0
    )
    _check_rubric(
        task.rubric(seed=seed),
        example or _make_one_turn(prompt, openings[0]),
        is_complete=example is not None or have_one_turn[0],
        loop=loop,
        time_limit_s=time_limit_s,
        in_actors=rewards_in_actors,
        start_timeout_s=start_timeout_s,
    )
    _check_sample_limit(
        openings[len(held_out) :], loop, renderer=renderer, max_model_len=max_model_len
    )
    if warms_up:
        check_demonstrations(
            task.warmup_problems(seed=seed),
            environments=environments,
            renderer=renderer,
            max_tokens=loop.sampling.max_tokens,
            max_model_len=max_model_len,
        )
    return prompt


def _check_prompts(
    problems: Sequence[Problem],
    openings: Sequence[Sequence[Message]],
    *,
    renderer: Renderer,
    room: int,
    may_drop_from: int,
) -> None:
    """Raise ValueError for a prompt that does not render, or is longer than `room` tokens."""
    for place, (problem, messages) in enumerate(zip(problems, openings, strict=True)):
        # A training problem with a long prompt is left out later, but its prompt must render.
        may_drop = place >= may_drop_from
        with suppress(PromptTooLongError) if may_drop else nullcontext():
            render_prompt(problem, messages, renderer=renderer, max_tokens=room)


def _check_sample_limit(
    openings: Sequence[Sequence[Message]],
    loop: LoopConfig,
    *,
    renderer: Renderer,
    max_model_len: int,
) -> None:
    """Raise ValueError for a `loop.max_sample_tokens` that no training sample meets, or every
    one.
    """
    limit = loop.max_sample_tokens
    if limit is None:
        return
    # Below the shortest prompt every sample is left out; above the context none ever is.
    shortest = min(len(renderer.opening(messages)) for messages in openings)
    if not shortest < limit < max_model_len:
        raise ValueError(
            f"loop.max_sample_tokens={limit}: must be from {shortest + 1}, as the shortest prompt "
            f"has {shortest} tokens, to {max_model_len - 1}, as "
            f"generator.max_model_len={max_model_len} is a limit already; or None"
        )


async def _open_all(
    problems: Iterable[Problem], environments: Environments
) -> tuple[list[tuple[Message, ...]], list[bool]]:
    """Open and close an environment of each problem; a ValueError names the problem.

    Returns:
        The opening messages of each, and True for those that declare that they end after one reply.
    """
    openings: list[tuple[Message, ...]] = []
    have_one_turn: list[bool] = []
    # One after the other, so that an error names the problem whose environment it is.
    for problem in problems:
        async with environments.opened([problem]) as ((calls,),):
            have_one_turn.append(getattr(calls.environment, "single_turn", False))
            openings.append(calls.messages)
            try:
                await calls.close()
            except (EnvironmentFailedError, RunError) as error:
                raise ValueError(f"closing problem {problem.id!r}: {error}") from error
    return openings, have_one_turn


def _list_held_out_problems(task: Task, *, needed: bool) -> list[Problem]:
    """Return the problems of all evaluation sets; raise ValueError if problems are `needed` and
    there are none.
    """
    sets = task.eval_sets()
    for name, problems in sets.items():
        if needed and not problems:
            raise ValueError(f"the task has no evaluation problems in its set {name!r}")
    if needed and not sets:
        raise ValueError(
            "the task has no evaluation problems: give it some (a task of files: task.eval_files, "
            "or task.held_out above 0), or set loop.eval_every to 0"
        )
    return list(chain.from_iterable(sets.values()))


def _check_rubric(
    rubric: Rubric,
    example: Rollout,
    *,
    is_complete: bool,
    loop: LoopConfig,
    time_limit_s: float,
    in_actors: bool,
    start_timeout_s: float,
) -> None:
    """Score a group of the example, ended as it is, without words and with other words.

    Raises:
        ValueError: the rubric does not reach a process, or a reward function fails. With
            `loop.max_failed_rewards`, for a judge that may not be up yet, and for an example that
            is not a complete episode, a function that fails is a warning.
    """
    if loop.group_size == 1 and rubric.comparing:
        raise ValueError(
            f"loop.group_size=1: the reward functions {', '.join(rubric.comparing)} compare the "
            "rollouts of a group: raise it to at least 2, or set needs_group=False if they can "
            "grade one alone"
        )

    # Reward functions often fail for an empty reply, or for a form that they do not expect.
    *before, last = example.turns
    size = loop.group_size if rubric.has_group_functions else 1
    groups = []
    for text in (last.text, "", "?"):
        attempt = replace(example, turns=(*before, replace(last, text=text)))
        groups.append([replace(attempt, sample=sample) for sample in range(size)])

    # Pickled to another process as in the run, where a rubric with a lock or a file would fail.
    try:
        check_sendable(rubric, to_actors=in_actors)
        scores = run_now(
            _score_groups(
                rubric, groups, time_limit_s=time_limit_s, start_timeout_s=start_timeout_s
            )
        )
    except (RunError, TimeoutError) as error:
        raise ValueError(f"the task's rubric cannot be used: {error}") from error

    # A judge may not be up yet, and an example that broke off may be worse than any rollout.
    for group, scores_of_group in zip(groups, scores, strict=True):
        failure = scores_of_group[0].failure
        if failure is None:
            continue
        if is_complete and not rubric.has_async_functions and not loop.max_failed_rewards:
            raise ValueError(f"the task's rubric fails: {failure}; {_describe_example(group[0])}")
        logger.warning("the task's rubric fails when it is tried: %s", failure)
        return


def _describe_example(rollout: Rollout) -> str:
    """Return what a reward function was tried on."""
    problem = rollout.prompt.problem
    parts = {"question": problem.question, "answer": problem.answer, "reply": rollout.text}
    shown = ", ".join(
        f"{name} {truncate(text, most=MAX_SHOWN_CHARS)!r}" for name, text in parts.items()
    )
    return f"it was tried on problem {problem.id!r}: {shown}"


async def _score_groups(
    rubric: Rubric,
    groups: Sequence[Sequence[Rollout]],
    *,
    time_limit_s: float,
    start_timeout_s: float,
) -> list[list[Score]]:
    """Score groups as a run does, in a reward process that ends afterwards."""
    process = RewardProcess(
        rubric=rubric, time_limit_s=time_limit_s, start_timeout_s=start_timeout_s
    )
    try:
        await process.start()
        return await process.score(groups)
    finally:
        await process.close()


def _play_demonstration(
    prompt: Prompt, environments: Environments, *, renderer: Renderer, may_fail: bool
) -> Rollout | None:
    """Return the problem's demonstration, played against its environment; None where there is none
    that fits.

    A demonstration that does not fit is an error only of a run that warms up on it
    (`check_demonstrations`).
    """
    if not prompt.problem.demonstrations:
        return None
    # A demonstration is a whole episode, of which a reward function can read every part.
    try:
        played = run_now(play_demonstration(prompt.problem, environments, renderer=renderer))
    except ValueError as error:
        if not (may_fail or isinstance(error, UnfitDemonstrationError)):
            raise
        logger.warning("the rubric is tried on a reply of one turn: %s", error)
        return None
    return replace(played, prompt=prompt)


def check_demonstrations(
    problems: Iterable[Problem],
    *,
    environments: Environments,
    renderer: Renderer,
    max_tokens: int,
    max_model_len: int,
) -> None:
    """Raise ValueError for a demonstration of a warm-up's first problems that no model could
    give.
    """
    for problem in islice(problems, NUM_PROBED_PROBLEMS):
        rollout = run_now(play_demonstration(problem, environments, renderer=renderer))
        longest = max(len(turn.completion.token_ids) for turn in rollout.turns)
        if longest > max_tokens:
            raise ValueError(
                f"the demonstration of problem {problem.id!r} has {longest} tokens in one reply, "
                f"more than loop.sampling.max_tokens={max_tokens}: no reply could be as long; "
                "raise it"
            )
        sample = run_now(make_sample_of_demonstration(problem, environments, renderer=renderer))
        if len(sample.token_ids) > max_model_len:
            raise ValueError(
                f"the demonstration of problem {problem.id!r} has {len(sample.token_ids)} tokens "
                f"with its prompt, more than generator.max_model_len={max_model_len}: raise it"
            )


def _make_one_turn(prompt: Prompt, messages: tuple[Message, ...]) -> Rollout:
    """Return an episode with the reference answer as its only reply."""
    completion = Completion(
        token_ids=np.zeros(1, dtype=np.int32),
        logprobs=np.zeros(1, dtype=np.float32),
        policy_versions=np.zeros(1, dtype=np.int32),
        finish_reason="stop",
    )
    turn = Turn(
        messages=messages,
        prompt_ids=prompt.token_ids,
        completion=completion,
        text=prompt.problem.answer,
    )
    return Rollout(prompt=prompt, sample=0, turns=(turn,))
