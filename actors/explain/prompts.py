"""What is wrong with a task's prompts: the part of a run's checks that calls no reward function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice

from actors.explain.known import Known, only_asks
from actors.plan import tried_environments
from actors.task_checks import (
    NUM_PROBED_PROBLEMS,
    check_demonstrations,
    check_prompts,
    check_sample_limit,
    held_out_problems,
)
from rl.rollouts.renderer import Renderer
from rl.tasks.task import Task


def prompt_checks(known: Known, *, warms_up: bool) -> list[Callable[[], object]]:
    """Evaluation problems where they are needed; and of a task whose environments only ask, prompts, lengths
    and demonstrations that fit."""
    task, config = known.task, known.config
    if task is None:
        return []
    checks: list[Callable[[], object]] = [partial(held_out_problems, task, needed=config.loop.eval_every > 0)]
    if known.renderer is None or not known.single_turn:
        return checks
    checks.append(partial(_check_prompts, known, task=task, renderer=known.renderer))
    environments = tried_environments(config, task=task)
    limit = config.generator.max_model_len
    checks.append(
        partial(
            check_sample_limit,
            config.loop,
            task.train_problems(seed=config.seed),
            environments=environments,
            renderer=known.renderer,
            max_model_len=limit,
        )
    )
    if warms_up:
        checks.append(
            partial(
                check_demonstrations,
                task.warmup_problems(seed=config.seed),
                environments=environments,
                renderer=known.renderer,
                max_tokens=config.loop.sampling.max_tokens,
                max_model_len=limit,
            )
        )
    return checks


def _check_prompts(known: Known, *, task: Task, renderer: Renderer) -> None:
    config = known.config
    held_out = held_out_problems(task, needed=False)
    problems = [*held_out, *islice(task.train_problems(seed=config.seed), NUM_PROBED_PROBLEMS)]
    environments = [task.environment(problem) for problem in problems]
    if not all(map(only_asks, environments)):
        return
    check_prompts(
        problems,
        [environment.opening() for environment in environments],
        must_fit=len(held_out) if config.loop.long_prompts == "drop" else len(problems),
        renderer=renderer,
        max_tokens=known.prompt_room,
    )
