"""A loop over fakes, with small settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import repeat
from typing import Any

from rl.loop import Loop, Seams, Watch
from rl.rollouts.renderer import ChatRenderer
from rl.rollouts.rubric import Rubric
from rl.step_checkpoints import StepCheckpoints
from rl.tasks.sum_digits import SumDigits, make_problem
from rl.training.checkpoint_config import CheckpointConfig
from rl.types import LoopPosition, Problem
from tests.support.fakes import ByteTokenizer, FakePolicy, ListSink, RubricScorer

PROBLEM = make_problem([12, 34])  # its digits sum to 10
RENDERER = ChatRenderer(tokenizer=ByteTokenizer(), max_prompt_tokens=64)


def half_right(prompt: str, sample: int) -> str:
    return "[ANSWER] 10" if sample % 2 == 0 else "no"


def make_loop(
    policy: FakePolicy,
    *,
    rubric: Rubric | None = None,
    watch: Watch = nullcontext,
    checkpoint: CheckpointConfig | None = None,
    position: LoopPosition | None = None,
    problems: Iterator[Problem] | None = None,
    proximal_logprobs: bool = False,
    **config: Any,
) -> tuple[Loop, ListSink]:
    """The loop, and where its records go."""
    sink = ListSink()
    settings = {"num_steps": 1, "num_prompts": 2, "num_samples": 4, "eval_every": 0} | config
    loop: Loop = Loop.Config(**settings).build(
        seams=Seams(
            sampler=policy,
            learner=policy,
            publisher=policy,
            scorer=RubricScorer(rubric=rubric or SumDigits.Config(num_integers=2).build().rubric(seed=0)),
        ),
        renderer=RENDERER,
        train_problems=repeat(PROBLEM) if problems is None else problems,
        eval_problems=[PROBLEM],
        sinks=[sink],
        checkpoints=StepCheckpoints(learner=policy, config=checkpoint or CheckpointConfig(), folder="ckpt"),
        seed=0,
        watch=watch,
        position=position,
        proximal_logprobs=proximal_logprobs,
    )
    return loop, sink
