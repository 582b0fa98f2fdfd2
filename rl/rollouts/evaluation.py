"""Evaluation on held-out sets: one greedy rollout of each problem, and further ones for pass@k.

Shape legend: P problems, G samples of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rl.errors import RunError
from rl.observability.metrics import Mean, Metric, Sum, merge
from rl.protocols import Scorer
from rl.rollouts.episodes import Episodes
from rl.rollouts.score_metrics import PASS_AT, score_metrics
from rl.rollouts.settings import Evaluation
from rl.types import Problem, Rollout, SamplingParams, Score

SEED = 20_240_607
"""Of what is sampled for pass@k: the same at every evaluation of every run."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EvaluatedSet:
    """Rollouts of one set with their scores."""

    name: str
    greedy: list[tuple[Rollout, Score]]
    """[P]."""
    sampled: list[list[tuple[Rollout, Score]]]
    """[P][G]; empty where only greedy ones are drawn."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EvaluationResult:
    sets: list[EvaluatedSet]

    def metrics(self) -> dict[str, Metric]:
        """`eval/correct`, `eval/reward`, `eval/num_problems`, `eval/num_unparsed`, `eval/<name>` of each
        reward function; where more than the greedy replies are drawn, `eval/pass@<k>`; where a rollout of
        the set has several turns, `eval/turns_mean`. Of sets after the first `eval/<set>/...`."""
        merged: dict[str, Metric] = {}
        for place, done in enumerate(self.sets):
            prefix = f"eval/{done.name}" if place else "eval"
            scores = [score for _, score in done.greedy]
            merged |= score_metrics(scores, prefix=prefix)
            parts = [_score_metrics(score) for score in scores]
            parts += _turn_metrics([rollout for rollout, _ in done.greedy])
            parts += [_pass_metrics([score.correct for _, score in group]) for group in done.sampled]
            merged |= {f"{prefix}/{name}": metric for name, metric in merge(parts).items()}
        return merged

    def pass_rates(self) -> dict[str, float]:
        """Share of right replies among those sampled of each problem, by its id; empty where only greedy ones
        were drawn."""
        return {
            group[0][0].prompt.problem.id: sum(score.correct for _, score in group) / len(group)
            for done in self.sets
            for group in done.sampled
        }


@dataclass(kw_only=True, slots=True)
class Evaluator:
    """Draws, scores and counts."""

    sets: Mapping[str, Sequence[Problem]]
    episodes: Episodes
    scorer: Scorer
    settings: Evaluation
    sampling: SamplingParams
    """Of training, from which the length and the stop tokens are taken."""
    num_problems: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_problems = sum(map(len, self.sets.values()))

    async def run(self) -> EvaluationResult:
        """Of the weights that the sampler has now.

        Raises:
            RunError: if a rollout could not be scored.
        """
        greedy = replace(self.sampling, temperature=0.0, num_samples=1, seed=None)
        sampled = replace(
            self.sampling,
            temperature=self.settings.temperature,
            num_samples=self.settings.num_samples,
            seed=SEED,
        )
        sets = []
        for name, problems in self.sets.items():
            firsts = await self._scored(problems, greedy)
            further = await self._scored(problems, sampled) if self.settings.num_samples else []
            sets.append(EvaluatedSet(name=name, greedy=[pair for (pair,) in firsts], sampled=further))
        return EvaluationResult(sets=sets)

    async def _scored(
        self, problems: Sequence[Problem], sampling: SamplingParams
    ) -> list[list[tuple[Rollout, Score]]]:
        # Of no session: that would send all of them to one generator.
        groups = await self.episodes.run(problems, sampling=sampling)
        scores = await self.scorer.score(groups)
        raise_on_failures([score for group in scores for score in group], max_fraction=0.0)
        return [list(zip(*pair, strict=True)) for pair in zip(groups, scores, strict=True)]


def pass_at(k: int, *, num_samples: int, num_correct: int) -> float:
    """The chance that k of the samples, drawn without putting back, hold a right one: unbiased for pass@k.

    Chen et al., "Evaluating large language models trained on code" (arXiv:2107.03374), equation 1.
    """
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def _pass_metrics(correct_G: Sequence[bool]) -> dict[str, Metric]:
    num_samples, num_correct = len(correct_G), sum(correct_G)
    return {
        f"{PASS_AT}{k}": Mean(pass_at(k, num_samples=num_samples, num_correct=num_correct))
        for k in _powers_of_two(num_samples)
    }


def _powers_of_two(limit: int) -> Iterable[int]:
    return (2**i for i in range(limit.bit_length()))


def _turn_metrics(rollouts: Sequence[Rollout]) -> list[dict[str, Metric]]:
    """Of a set with conversations; nothing where each rollout is one reply."""
    nums = [len(rollout.turns) for rollout in rollouts]
    return [{"turns_mean": Mean(num)} for num in nums] if max(nums, default=1) > 1 else []


def _score_metrics(score: Score) -> dict[str, Metric]:
    return {"correct": Mean(score.correct), "reward": Mean(score.reward), "num_problems": Sum(1)}


def raise_on_failures(scores: Sequence[Score], *, max_fraction: float) -> None:
    """Raises RunError, which shows the first failure, if more than this share of the scores failed."""
    failures = [s.failure for s in scores if s.failure is not None]
    if len(failures) > max_fraction * len(scores):
        raise RunError(
            f"{len(failures)} of {len(scores)} rewards failed, where a share of {max_fraction:g} may; "
            f"the first: {failures[0]}"
        )
