"""Loops over fakes with small settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count, repeat
from typing import Any

from rl.loop.loop import Loop
from rl.loop.setup import RolloutSetup
from rl.loop.state import StepCheckpoints
from rl.loop.stop_request import StopRequest
from rl.protocols import Environment
from rl.rollouts.environment import SingleTurn
from rl.rollouts.renderer import Renderer
from rl.rollouts.rubric import Rubric
from rl.tasks.sum_digits import SumDigits, make_problem
from rl.tasks.task import Task
from rl.training.checkpoints.config import CheckpointConfig
from rl.types import LoopPosition, Problem
from tests.support.fakes import RENDERER, FakePolicy, ListSink, RubricRewarder
from tests.support.virtual_time import run_in_virtual_time

PROBLEM = make_problem([12, 34])  # its digits sum to 10


def half_right(prompt: str, sample: int) -> str:
    return "[ANSWER] 10" if sample % 2 == 0 else "no"


@dataclass(kw_only=True)
class ListedTask:
    """Task with a given list of problems."""

    train: Iterator[Problem]
    held_out: Sequence[Problem]
    make_environment: Callable[[Problem], Environment] = SingleTurn.of

    def train_problems(self, *, seed: int) -> Iterator[Problem]:
        return self.train

    def warmup_problems(self, *, seed: int) -> Iterator[Problem]:
        return self.train

    def eval_sets(self) -> dict[str, Sequence[Problem]]:
        return {"held_out": self.held_out}

    def environment(self, problem: Problem) -> Environment:
        return self.make_environment(problem)

    def rubric(self, *, seed: int) -> Rubric:
        raise NotImplementedError


def make_loop(
    policy: Any,
    *,
    rubric: Rubric | None = None,
    watch: Callable[[str], AbstractContextManager[object]] = nullcontext,
    checkpoint: CheckpointConfig | None = None,
    position: LoopPosition | None = None,
    problems: Iterator[Problem] | None = None,
    proximal_logprobs: bool = False,
    environment: Callable[[Problem], Environment] = SingleTurn.of,
    held_out: Sequence[Problem] = (PROBLEM,),
    stop: StopRequest | None = None,
    sink: ListSink | None = None,
    renderer: Renderer = RENDERER,
    task: Task | None = None,
    last_saved: int | None = None,
    **config: Any,
) -> tuple[Loop, ListSink]:
    """Return a loop and its sink; checkpoints count the records of a given `sink`."""
    records, sink = sink, sink or ListSink()
    settings = {"num_steps": 1, "groups_per_batch": 2, "group_size": 4, "eval_every": 0} | config
    loop: Loop = Loop.Config(**settings).build(
        trainer=policy,
        publisher=policy,
        rollouts=RolloutSetup(
            generator=policy,
            rewarder=RubricRewarder(
                rubric=rubric or SumDigits.Config(num_integers=2).build().rubric(seed=0)
            ),
            renderer=renderer,
            task=task
            or ListedTask(
                train=repeat(PROBLEM) if problems is None else problems,
                held_out=held_out,
                make_environment=environment,
            ),
            max_sequence_tokens=96,
            seed=0,
        ),
        sinks=[sink],
        checkpoints=StepCheckpoints(
            trainer=policy,
            config=checkpoint or CheckpointConfig(),
            folder="ckpt",
            records=records,
            last_saved=last_saved,
        ),
        watch=watch,
        position=position,
        stop=stop,
        proximal_logprobs=proximal_logprobs,
    )
    return loop, sink


def problems() -> Iterator[Problem]:
    """Yield different prompts: 10 1000, 10 1001, ..."""
    return (make_problem([10, 1000 + i]) for i in count())


def number_of(prompt: str) -> int:
    return int(prompt.strip("<>").split()[-1]) - 1000


def run(policy: FakePolicy, **settings: Any) -> tuple[list[dict], float]:
    """Run a loop over `problems`; return its records and the virtual seconds."""
    loop, sink = make_loop(policy, problems=problems(), **settings)
    _, took_s = run_in_virtual_time(loop.run())
    return sink.records, took_s


def some_right(prompt: str, sample: int) -> str:
    """Return the right answer for the first samples of a prompt; their number depends on the
    prompt.
    """
    digits = sum(map(int, str(1000 + number_of(prompt)) + "10"))
    return f"[ANSWER] {digits}" if sample <= number_of(prompt) % 3 else "no"
