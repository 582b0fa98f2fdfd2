"""What is checked of a run's task before anything starts; every error names the problem."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from rl.clock import run_now
from rl.loop import Loop
from rl.rollouts.demonstrations import UnfitDemonstrationError, demonstrated, demonstrated_rollout
from rl.rollouts.renderer import PromptTooLongError, Renderer, render_prompt
from rl.rollouts.rubric import Rubric
from rl.rollouts.scoring_limit import score_group_within
from rl.rollouts.tried_environments import TriedEnvironments
from rl.tasks.task import Task
from rl.types import Completion, Message, Problem, Prompt, Rollout, Turn

logger = logging.getLogger(__name__)

NUM_PROBED_PROBLEMS = 64
"""Training problems whose prompts are rendered before the start; the others when their turn comes."""


def check_task(
    task: Task,
    *,
    environments: TriedEnvironments,
    renderer: Renderer,
    max_prompt_tokens: int,
    seed: int,
    time_limit_s: float,
    drops_long_prompts: bool = False,
    max_turns: int | None = None,
    num_samples: int = 2,
    rewards_may_fail: bool = False,
    evaluates: bool = True,
) -> Prompt:
    """Prompts that fit the context, environments that work, and a rubric that gives finite numbers, on a few
    problems; returns the prompt of the first evaluation problem, or of the first of training where there is
    none.

    Args:
        environments: of the task.
        drops_long_prompts: a training problem whose prompt is too long is left out later, and no error.
        max_turns: that an episode may have (loop.episode.max_turns); None is without limit.
        num_samples: of a group, which is what functions of a group are given.
        rewards_may_fail: a rubric that fails, or an environment that breaks after it has opened, is only
            warned of.
        evaluates: whether there will be evaluations, which need problems.

    Raises:
        ValueError: names the problem and what its environment did, or the reward function and what it did.
    """
    held_out = held_out_problems(task, needed=evaluates)
    problem = held_out[0] if held_out else next(task.train_problems(seed=seed))
    goes_on = has_turns(environments, problem)
    if max_turns != 1 and goes_on:
        renderer.check_multi_turn()
    probed = [*held_out, *islice(task.train_problems(seed=seed), NUM_PROBED_PROBLEMS)]
    openings = _openings(environments, probed)
    must_fit = len(held_out) if drops_long_prompts else len(probed)
    check_prompts(probed, openings, must_fit=must_fit, renderer=renderer, max_tokens=max_prompt_tokens)
    prompt = render_prompt(problem, openings[0], renderer=renderer, max_tokens=max_prompt_tokens)
    example = _example(prompt, environments, renderer=renderer, may_fail=rewards_may_fail)
    rubric: Rubric = task.rubric(seed=seed)
    failure = _rubric_failure(
        rubric,
        example or _one_turn(prompt, openings[0]),
        num_samples=num_samples,
        time_limit_s=time_limit_s,
    )
    if failure is None:
        return prompt
    # A judge may not be up yet; an episode of one turn may not be what the functions are made for.
    is_sure = not rubric.has_async_functions and (example is not None or not goes_on)
    if is_sure and not rewards_may_fail:
        raise ValueError(f"the task's rubric fails: {failure}")
    logger.warning("the task's rubric fails when it is tried: %s", failure)
    return prompt


def check_prompts(
    problems: Sequence[Problem],
    openings: Sequence[Sequence[Message]],
    *,
    must_fit: int,
    renderer: Renderer,
    max_tokens: int,
) -> None:
    """The first `must_fit` leave room for a reply, and the others are left out later if they do not.

    Raises:
        ValueError: names the problem.
    """
    for place, (problem, messages) in enumerate(zip(problems, openings, strict=True)):
        try:
            render_prompt(problem, messages, renderer=renderer, max_tokens=max_tokens)
        except PromptTooLongError:
            if place < must_fit:
                raise


def held_out_problems(task: Task, *, needed: bool) -> list[Problem]:
    """Of all evaluation sets.

    Raises:
        ValueError: some are `needed`, and there are none.
    """
    sets = task.eval_sets()
    for name, problems in sets.items():
        if needed and not problems:
            raise ValueError(f"the task has no evaluation problems in its set {name!r}")
    if needed and not sets:
        raise ValueError(
            "the task has no evaluation problems: give it some (a task of files: task.eval_files, or "
            "task.held_out above 0), or set loop.eval_every to 0"
        )
    return [problem for problems in sets.values() for problem in problems]


def _rubric_failure(rubric: Rubric, example: Rollout, *, num_samples: int, time_limit_s: float) -> str | None:
    """The first, of a group of the example, and of its likes that end with no words and with others."""
    *before, last = example.turns
    for text in (last.text, "", "?"):
        attempt = replace(example, turns=(*before, replace(last, text=text)))
        size = num_samples if rubric.has_group_functions else 1
        group = [replace(attempt, sample=sample) for sample in range(size)]
        for score in score_group_within(rubric, group, time_limit_s):
            if score.failure is not None:
                return score.failure
    return None


def _example(
    prompt: Prompt, environments: TriedEnvironments, *, renderer: Renderer, may_fail: bool
) -> Rollout | None:
    """The problem's demonstration, played against its environment; None where there is none, or it does not
    go with the environment, which is an error only of a run that warms up on it (`check_demonstrations`)."""
    problem = prompt.problem
    if not problem.demonstrations:
        return None
    try:
        played = demonstrated_rollout(problem, environments, renderer=renderer)
        return replace(run_now(played), prompt=prompt)
    except ValueError as error:
        if not (may_fail or isinstance(error, UnfitDemonstrationError)):
            raise
        logger.warning("the rubric is tried on a reply of one turn: %s", error)
        return None


def has_turns(environments: TriedEnvironments, problem: Problem) -> bool:
    """Whether an episode of the problem may go on after the first reply; raises ValueError as
    `TriedEnvironments.opened` does."""

    async def goes_on() -> bool:
        async with environments.opened(problem) as environment:
            return not environment.single_turn

    return run_now(goes_on())


def check_sample_limit(
    loop: Loop.Config,
    problems: Iterable[Problem],
    *,
    environments: TriedEnvironments,
    renderer: Renderer,
    max_model_len: int,
) -> None:
    """A limit that some sample of the first training problems can meet, and some sample can miss.

    Raises:
        ValueError: names the field, and what is valid.
    """
    limit = loop.max_sample_tokens
    if limit is None:
        return
    openings = _openings(environments, islice(problems, NUM_PROBED_PROBLEMS))
    shortest = min(len(renderer.opening(messages)) for messages in openings)
    longest = max_model_len
    if not shortest < limit < longest:
        raise ValueError(
            f"loop.max_sample_tokens={limit}: must be from {shortest + 1}, as the shortest prompt has "
            f"{shortest} tokens, to {longest - 1}, as generator.max_model_len={longest} is a limit already; "
            "or None"
        )


def check_demonstrations(
    problems: Iterable[Problem],
    *,
    environments: TriedEnvironments,
    renderer: Renderer,
    max_tokens: int,
    max_model_len: int,
) -> None:
    """Demonstrations, of the first problems of a warm-up, whose every reply a model could give.

    Raises:
        ValueError: names the problem, and both lengths or what its environment did.
    """
    for problem in islice(problems, NUM_PROBED_PROBLEMS):
        longest = max((len(renderer.reply(text)) for text in problem.demonstrations), default=0)
        if longest > max_tokens:
            raise ValueError(
                f"the demonstration of problem {problem.id!r} has {longest} tokens in one reply, more than "
                f"loop.sampling.max_tokens={max_tokens}: no reply could be as long; raise it"
            )
        sample = run_now(demonstrated(problem, environments, renderer=renderer))
        if len(sample.token_ids) > max_model_len:
            raise ValueError(
                f"the demonstration of problem {problem.id!r} has {len(sample.token_ids)} tokens with its "
                f"prompt, more than generator.max_model_len={max_model_len}: raise it"
            )


def _openings(environments: TriedEnvironments, problems: Iterable[Problem]) -> list[tuple[Message, ...]]:
    """What a model is first told of each."""

    async def opened() -> list[tuple[Message, ...]]:
        openings = []
        for problem in problems:
            async with environments.opened(problem) as environment:
                openings.append(environment.messages)
        return openings

    return run_now(opened())


def _one_turn(prompt: Prompt, messages: tuple[Message, ...]) -> Rollout:
    """The reference answer as a reply."""
    completion = Completion(
        token_ids=np.zeros(1, dtype=np.int32),
        logprobs=np.zeros(1, dtype=np.float32),
        policy_versions=np.zeros(1, dtype=np.int32),
        finish_reason="stop",
    )
    turn = Turn(
        messages=messages, prompt_ids=prompt.token_ids, completion=completion, text=prompt.problem.answer
    )
    return Rollout(prompt=prompt, sample=0, turns=(turn,))
