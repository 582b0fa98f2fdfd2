"""Episodes that branch: split at random into rows, or random forests of turns.

Every token has an id of its own, so a table of numbers by id stands for a policy's logprobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from rl.types import Branch, Completion, Observation, Problem, Prompt, Rollout, Turn

NUM_IDS = 4000
SYSTEM = (1, 2)
"""First tokens of every conversation."""


@dataclass
class EpisodeMaker:
    """Maker of random episodes, whose generator logprobs are near a table's."""

    seed: int
    random: np.random.Generator = field(init=False)
    logprobs_V: np.ndarray = field(init=False)
    """Table of the policy's logprobs by token id."""

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.logprobs_V = self.random.normal(-2.0, 0.4, NUM_IDS)
        self._ids = count(10)

    def make_turn(self, *, begins: bool, prompt: Sequence[int] | None = None) -> Turn:
        """Return a turn of new tokens; `begins` tells that it is the first of a conversation."""
        if prompt is None:
            new = self._draw_ids(int(self.random.integers(1, 5)))
            prompt = [*SYSTEM, *new] if begins else new
        ids = np.asarray(self._draw_ids(int(self.random.integers(1, 6))), dtype=np.int32)
        near = self.logprobs_V[ids] + self.random.normal(0.0, 0.05, len(ids))
        return Turn(
            messages=(),
            prompt_ids=np.asarray(prompt, dtype=np.int32),
            completion=Completion(
                token_ids=ids,
                logprobs=near.astype(np.float32),
                policy_versions=np.zeros(len(ids), dtype=np.int32),
                finish_reason="stop",
            ),
            text="",
            observation=Observation(reward=float(self.random.normal(0.0, 0.5))),
        )

    def make_linear(self, *, num_turns: int, sample: int, prompt: Sequence[int]) -> Rollout:
        """Return a linear episode; all of a group have the same prompt."""
        turns = [self.make_turn(begins=True, prompt=prompt)]
        turns += [self.make_turn(begins=False) for _ in range(num_turns - 1)]
        return make_rollout(turns, sample=sample)

    def make_prompt(self) -> list[int]:
        return [*SYSTEM, *self._draw_ids(int(self.random.integers(2, 6)))]

    def split(self, rollout: Rollout) -> Rollout:
        """Return the same episode in rows: row k has the tokens up to a turn, and trains the last
        ones."""
        num = len(rollout.turns)
        cuts = [i for i in range(1, num) if self.random.random() < 0.6]
        paths = [tuple(range(end)) for end in (*cuts, num)]
        return replace(rollout, branches=make_branches(paths))

    def make_forest(self, *, num_turns: int, sample: int, prompt: Sequence[int]) -> Rollout:
        """Return an episode whose turns follow random earlier ones, or begin a conversation."""
        turns: list[Turn] = []
        paths: list[tuple[int, ...]] = []
        for i in range(num_turns):
            path: tuple[int, ...] = ()
            if i and self.random.random() < 0.8:
                path = paths[int(self.random.integers(i))]
            is_first = not path and self.random.random() < 0.5
            turns.append(self.make_turn(begins=not path, prompt=prompt if is_first else None))
            paths.append((*path, i))
        ends = [p for p in paths if not any(len(q) > len(p) and q[: len(p)] == p for q in paths)]
        # Some branches end where others go on, and some are never trained.
        if self.random.random() < 0.5:
            ends.append(paths[int(self.random.integers(num_turns))])
        order = self.random.permutation(len(ends))
        is_trained = [bool(self.random.random() < 0.75) for _ in ends]
        is_trained[0] = True
        branches = make_branches([ends[i] for i in order], is_trained=is_trained)
        return replace(make_rollout(turns, sample=sample), turns=tuple(turns), branches=branches)

    def _draw_ids(self, num: int) -> list[int]:
        return [next(self._ids) for _ in range(num)]


def make_rollout(turns: Sequence[Turn], *, sample: int = 0) -> Rollout:
    problem = Problem(id="p", question="q", answer="a")
    prompt = Prompt(problem=problem, token_ids=turns[0].prompt_ids)
    return Rollout(prompt=prompt, sample=sample, turns=tuple(turns))


def make_branches(
    paths: Sequence[tuple[int, ...]], *, is_trained: Sequence[bool] | None = None
) -> tuple[Branch, ...]:
    """Return main branches of these turns; those that are not trained are superseded."""
    branches = []
    for number, path in enumerate(paths):
        trained = is_trained is None or is_trained[number]
        branches.append(
            Branch(
                turns=path,
                role="main" if trained else "superseded",
                cause="again" if number else "",
                is_trained=trained,
            )
        )
    return tuple(branches)
