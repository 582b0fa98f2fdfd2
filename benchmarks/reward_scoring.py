"""What a score costs beside its reward functions: `python -m benchmarks.reward_scoring`.

Reward functions that do nothing, 16 groups of 8 rollouts of 128 tokens, in one scoring process: milliseconds
a rollout in one call of `ScoringWorker.score`, the best of several (other processes only ever add to it), and
seconds until a process is ready.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import numpy as np

from rl.rollouts.rubric import Criterion, GroupCriterion, Rubric
from rl.rollouts.scoring import ScoringWorker
from rl.types import Completion, Problem, Prompt, Rollout, Turn

NUM_GROUPS, NUM_SAMPLES, NUM_TOKENS, NUM_REPEATS = 16, 8, 64, 20


def sync(rollout: Rollout) -> float:
    return 1.0


async def overlapping(rollout: Rollout) -> float:
    return 1.0


def together(rollouts: Sequence[Rollout]) -> list[float]:
    return [1.0] * len(rollouts)


RUBRICS = {
    "sync": Rubric(criteria=(Criterion(name="sync", function=sync),)),
    "sync, async and of a group": Rubric(
        criteria=(
            Criterion(name="sync", function=sync),
            Criterion(name="overlapping", function=overlapping),
            GroupCriterion(name="together", function=together),
        )
    ),
}


def make_rollout(sample: int) -> Rollout:
    completion = Completion(
        token_ids=np.ones(NUM_TOKENS, dtype=np.int32),
        logprobs=np.full(NUM_TOKENS, -1.0, dtype=np.float32),
        policy_versions=np.zeros(NUM_TOKENS, dtype=np.int32),
        finish_reason="stop",
    )
    token_ids = np.ones(NUM_TOKENS, dtype=np.int32)
    prompt = Prompt(problem=Problem(id="p", question="q", answer="a"), token_ids=token_ids)
    turn = Turn(messages=(), prompt_ids=token_ids, completion=completion, text="x" * NUM_TOKENS)
    return Rollout(prompt=prompt, sample=sample, turns=(turn,))


async def measure(rubric: Rubric) -> tuple[float, float]:
    """Seconds of the start, and of a score of all groups."""
    worker = ScoringWorker(rubric=rubric, time_limit_s=10.0)
    groups = [[make_rollout(i) for i in range(NUM_SAMPLES)] for _ in range(NUM_GROUPS)]
    try:
        started = time.perf_counter()
        await worker.start()
        start_s = time.perf_counter() - started
        times_s = []
        for _ in range(NUM_REPEATS):
            started = time.perf_counter()
            scores = await worker.score(groups)
            times_s.append(time.perf_counter() - started)
            assert all(score.failure is None for group in scores for score in group)
    finally:
        await worker.close()
    return start_s, min(times_s)


def main() -> None:
    for name, rubric in RUBRICS.items():
        start_s, score_s = asyncio.run(measure(rubric))
        per_rollout_ms = 1e3 * score_s / (NUM_GROUPS * NUM_SAMPLES)
        print(f"{name}: {per_rollout_ms:.2f} ms a rollout; the process was ready after {start_s:.1f} s")


if __name__ == "__main__":
    main()
