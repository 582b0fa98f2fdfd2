"""What is checked of a run's task before anything starts; every error names the problem."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice

import numpy as np

from rl.clock import run_now
from rl.loop import Loop
from rl.rollouts.demonstrations import STEP_TIMEOUT_S, demonstrated
from rl.rollouts.environment import SingleTurn
from rl.rollouts.renderer import PromptTooLongError, Renderer, render_prompt
from rl.rollouts.rubric import Rubric
from rl.rollouts.scoring import score_within
from rl.tasks.task import Task
from rl.types import Completion, Message, Problem, Prompt, Rollout, Turn

NUM_PROBED_PROBLEMS = 64
"""Training problems whose prompts are rendered before the start; the others when their turn comes."""


def check_task(
    task: Task,
    *,
    renderer: Renderer,
    max_prompt_tokens: int,
    seed: int,
    time_limit_s: float,
    drops_long_prompts: bool = False,
) -> Prompt:
    """Prompts that fit the context, and a rubric that gives finite numbers, on a few problems; returns the
    prompt of the first evaluation problem.

    Args:
        drops_long_prompts: a training problem whose prompt is too long is left out later, and no error.

    Raises:
        ValueError: names the problem, or the reward function and what it did.
    """
    sets = task.eval_sets()
    for name, problems in sets.items():
        if not problems:
            raise ValueError(f"the task has no evaluation problems in its set {name!r}")
    if not sets:
        raise ValueError("the task has no evaluation problems")
    held_out = [problem for problems in sets.values() for problem in problems]
    if _has_turns(task, held_out[0]):
        renderer.check_multi_turn()
    probed = [*held_out, *islice(task.train_problems(seed=seed), NUM_PROBED_PROBLEMS)]
    for place, (problem, messages) in enumerate(zip(probed, _openings(task, probed), strict=True)):
        try:
            render_prompt(problem, messages, renderer=renderer, max_tokens=max_prompt_tokens)
        except PromptTooLongError:
            if place < len(held_out) or not drops_long_prompts:
                raise
    rubric: Rubric = task.rubric(seed=seed)
    problem = held_out[0]
    prompt = prompt_of(task, problem, renderer=renderer, max_tokens=max_prompt_tokens)
    for text in ((problem.demonstrations or (problem.answer,))[-1], "", "?"):
        score = score_within(rubric, _reply(prompt, text), time_limit_s)
        if score.failure is not None:
            raise ValueError(f"the task's rubric fails: {score.failure}")
    return prompt


def _has_turns(task: Task, problem: Problem) -> bool:
    environment = task.environment(problem)
    run_now(environment.close())
    return not isinstance(environment, SingleTurn)


def prompt_of(task: Task, problem: Problem, *, renderer: Renderer, max_tokens: int) -> Prompt:
    """What a model is first asked; raises ValueError if it leaves no room."""
    (messages,) = _openings(task, [problem])
    return render_prompt(problem, messages, renderer=renderer, max_tokens=max_tokens)


def check_sample_limit(
    loop: Loop.Config, *, task: Task, renderer: Renderer, max_model_len: int, seed: int
) -> None:
    """A limit that some sample can meet, and some sample can miss.

    Raises:
        ValueError: names the field, and what is valid.
    """
    limit = loop.max_sample_tokens
    if limit is None:
        return
    probed = list(islice(task.train_problems(seed=seed), NUM_PROBED_PROBLEMS))
    shortest = min(len(renderer.opening(messages)) for messages in _openings(task, probed))
    longest = max_model_len
    if not shortest < limit < longest:
        raise ValueError(
            f"loop.max_sample_tokens={limit}: must be from {shortest + 1}, as the shortest prompt has "
            f"{shortest} tokens, to {longest - 1}, as generator.max_model_len={longest} is a limit already; "
            "or None"
        )


def check_demonstrations(
    task: Task, *, renderer: Renderer, seed: int, max_tokens: int, max_model_len: int
) -> None:
    """Demonstrations whose every reply a model could give.

    Raises:
        ValueError: names the problem and both lengths.
    """
    for problem in islice(task.warmup_problems(seed=seed), NUM_PROBED_PROBLEMS):
        longest = max((len(renderer.reply(text)) for text in problem.demonstrations), default=0)
        if longest > max_tokens:
            raise ValueError(
                f"the demonstration of problem {problem.id!r} has {longest} tokens in one reply, more than "
                f"loop.sampling.max_tokens={max_tokens}: no reply could be as long; raise it"
            )
        sample = run_now(demonstrated(problem, task.environment(problem), renderer=renderer))
        if len(sample.token_ids) > max_model_len:
            raise ValueError(
                f"the demonstration of problem {problem.id!r} has {len(sample.token_ids)} tokens with its "
                f"prompt, more than generator.max_model_len={max_model_len}: raise it"
            )


def _openings(task: Task, problems: Sequence[Problem]) -> list[tuple[Message, ...]]:
    """What a model is first told of each, by environments that are closed again."""

    async def opened() -> list[tuple[Message, ...]]:
        openings = []
        for problem in problems:
            environment = task.environment(problem)
            try:
                openings.append(tuple(environment.opening()))
            finally:
                async with asyncio.timeout(STEP_TIMEOUT_S):
                    await environment.close()
        return openings

    return run_now(opened())


def _reply(prompt: Prompt, text: str) -> Rollout:
    completion = Completion(
        token_ids=np.zeros(1, dtype=np.int32),
        logprobs=np.zeros(1, dtype=np.float32),
        policy_versions=np.zeros(1, dtype=np.int32),
        finish_reason="stop",
    )
    turn = Turn(messages=(), prompt_ids=prompt.token_ids, completion=completion, text=text)
    return Rollout(prompt=prompt, sample=0, turns=(turn,))
