"""What is checked of a run's task before anything starts; every error names the problem."""

from __future__ import annotations

from itertools import islice

import numpy as np

from rl.loop import Loop
from rl.rollouts.renderer import ChatRenderer
from rl.rollouts.rubric import Rubric
from rl.rollouts.scoring import score_within
from rl.tasks.task import Task
from rl.types import Completion, Problem, Rollout

NUM_PROBED_PROBLEMS = 64
"""Training problems whose prompts are rendered before the start; the others when their turn comes."""


def check_task(task: Task, *, renderer: ChatRenderer, seed: int, time_limit_s: float) -> None:
    """Prompts that fit the context, and a rubric that gives finite numbers, on a few problems.

    Raises:
        ValueError: names the problem, or the reward function and what it did.
    """
    problems = task.eval_problems()
    if not problems:
        raise ValueError("the task has no evaluation problems")
    for problem in [*problems, *islice(task.train_problems(seed=seed), NUM_PROBED_PROBLEMS)]:
        renderer.prompt(problem)
    rubric: Rubric = task.rubric(seed=seed)
    problem = problems[0]
    for reply in (problem.demonstration or problem.answer, "", "?"):
        score = score_within(rubric, _reply(problem, reply, renderer), time_limit_s)
        if score.failure is not None:
            raise ValueError(f"the task's rubric fails: {score.failure}")


def check_sample_limit(loop: Loop.Config, *, task: Task, renderer: ChatRenderer, seed: int) -> None:
    """A limit that some sample can meet, and some sample can miss.

    Raises:
        ValueError: names the field, and what is valid.
    """
    limit = loop.max_sample_tokens
    if limit is None:
        return
    probed = islice(task.train_problems(seed=seed), NUM_PROBED_PROBLEMS)
    shortest = min(len(renderer.prompt(problem).token_ids) for problem in probed)
    longest = renderer.max_prompt_tokens + loop.sampling.max_tokens
    if not shortest < limit < longest:
        raise ValueError(
            f"loop.max_sample_tokens={limit}: must be from {shortest + 1}, as the shortest prompt has "
            f"{shortest} tokens, to {longest - 1}, as generator.max_model_len={longest} is a limit already; "
            "or None"
        )


def check_demonstrations(task: Task, *, renderer: ChatRenderer, seed: int, max_tokens: int) -> None:
    """Demonstrations that a reply of at most `max_tokens` can follow.

    Raises:
        ValueError: names the problem and both lengths.
    """
    for problem in islice(task.warmup_problems(seed=seed), NUM_PROBED_PROBLEMS):
        renderer.prompt(problem)
        num_tokens = len(renderer.demonstration(problem))
        if num_tokens > max_tokens:
            raise ValueError(
                f"the demonstration of problem {problem.id!r} has {num_tokens} tokens, more than "
                f"loop.sampling.max_tokens={max_tokens}: no reply could be as long; raise it"
            )


def _reply(problem: Problem, text: str, renderer: ChatRenderer) -> Rollout:
    completion = Completion(
        token_ids=np.zeros(1, dtype=np.int32),
        logprobs=np.zeros(1, dtype=np.float32),
        policy_versions=np.zeros(1, dtype=np.int32),
        finish_reason="stop",
    )
    return Rollout(prompt=renderer.prompt(problem), sample=0, completion=completion, text=text)
