"""Evaluation on held-out sets: one greedy rollout of each problem, and further ones for pass@k.

Shape legend: P problems, G samples of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rl.errors import RunError
from rl.observability.metrics import Mean, Metric, Sum, merge
from rl.protocols import Scorer
from rl.rollouts.episodes import Episodes
from rl.rollouts.grading import failure_of
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

    @property
    def failures(self) -> list[str]:
        """Of greedy and sampled ones."""
        pairs = [*self.greedy, *(pair for group in self.sampled for pair in group)]
        return [why for pair in pairs if (why := failure_of(*pair)) is not None]

    def sampled_correct(self) -> Iterator[tuple[str, list[bool]]]:
        """A problem's id, and which of its sampled replies are right; of those that did not fail, if any."""
        for group in self.sampled:
            correct_G = [score.correct for r, score in group if failure_of(r, score) is None]
            if correct_G:
                yield group[0][0].prompt.problem.id, correct_G


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EvaluationResult:
    sets: list[EvaluatedSet]

    def metrics(self) -> dict[str, Metric]:
        """`eval/correct`, `eval/reward`, `eval/num_problems`, `eval/num_failed`, `eval/num_unparsed`,
        `eval/<name>` of each reward function. What failed is counted, also of the sampled replies, and left
        out of the means; where more than the greedy replies are drawn, `eval/pass@<k>`; where a rollout of
        the set has several turns, `eval/turns_mean`. Of sets after the first `eval/<set>/...`."""
        merged: dict[str, Metric] = {}
        for place, done in enumerate(self.sets):
            prefix = f"eval/{done.name}" if place else "eval"
            whole = [(r, s) for r, s in done.greedy if failure_of(r, s) is None]
            merged |= score_metrics([score for _, score in whole], prefix=prefix)
            merged[f"{prefix}/num_failed"] = Sum(len(done.failures))
            parts: list[dict[str, Metric]] = [{"num_problems": Sum(len(done.greedy))}]
            parts += [_score_metrics(score) for _, score in whole]
            parts += _turn_metrics([rollout for rollout, _ in whole])
            parts += [_pass_metrics(correct_G) for _, correct_G in done.sampled_correct()]
            merged |= {f"{prefix}/{name}": metric for name, metric in merge(parts).items()}
        return merged

    def pass_rates(self) -> dict[str, float]:
        """Share of right replies among those sampled of each problem, by its id; empty where only greedy ones
        were drawn. What failed does not count."""
        return {
            problem_id: sum(correct_G) / len(correct_G)
            for done in self.sets
            for problem_id, correct_G in done.sampled_correct()
        }


class FailedEvaluationError(RunError):
    """Too many rollouts of an evaluation could not be scored."""

    def __init__(self, message: str, result: EvaluationResult) -> None:
        super().__init__(message)
        self.result = result
        """As far as it got."""


@dataclass(kw_only=True, slots=True)
class Evaluator:
    """Draws, scores and counts."""

    sets: Mapping[str, Sequence[Problem]]
    episodes: Episodes
    scorer: Scorer
    settings: Evaluation
    sampling: SamplingParams
    """Of training, from which the length and the stop tokens are taken."""
    max_failed: float = 0.0
    """Share of the rollouts of a set that may fail, of the greedy ones and of the sampled ones."""
    num_problems: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_problems = sum(map(len, self.sets.values()))

    async def run(self) -> EvaluationResult:
        """Of the weights that the sampler has now.

        Raises:
            FailedEvaluationError: if too many rollouts could not be scored.
        """
        greedy = replace(self.sampling, temperature=0.0, num_samples=1, seed=None)
        sampled = replace(
            self.sampling,
            temperature=self.settings.temperature,
            num_samples=self.settings.num_samples,
            seed=SEED,
        )
        sets: list[EvaluatedSet] = []
        for name, problems in self.sets.items():
            firsts = [pair for (pair,) in await self._scored(problems, greedy)]
            sets.append(EvaluatedSet(name=name, greedy=firsts, sampled=[]))
            self._check_failures(sets, num_rollouts=len(firsts))
            if self.settings.num_samples:
                num_failed = len(sets[-1].failures)
                further = await self._scored(problems, sampled)
                sets[-1] = replace(sets[-1], sampled=further)
                self._check_failures(sets, num_rollouts=sum(map(len, further)), num_before=num_failed)
        return EvaluationResult(sets=sets)

    def _check_failures(
        self, sets: Sequence[EvaluatedSet], *, num_rollouts: int, num_before: int = 0
    ) -> None:
        """Of the rollouts that came last, the failures of the last set after the first `num_before`."""
        failures = sets[-1].failures[num_before:]
        # The quotient, as 0.29 * 100 is less than 29.
        if failures and len(failures) / num_rollouts > self.max_failed:
            raise FailedEvaluationError(
                f"{len(failures)} of {num_rollouts} rewards failed in the evaluation of {sets[-1].name!r}, "
                f"where loop.max_failed_rewards={self.max_failed:g} allows that share; "
                f"the first: {failures[0]}",
                EvaluationResult(sets=list(sets)),
            )

    async def _scored(
        self, problems: Sequence[Problem], sampling: SamplingParams
    ) -> list[list[tuple[Rollout, Score]]]:
        # Of no session: that would send all of them to one generator.
        groups = await self.episodes.run(problems, sampling=sampling)
        # A single reply of a problem has no others that it could be compared with.
        scores = await self.scorer.score(groups, alone=sampling.num_samples == 1)
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
    return {"correct": Mean(score.correct), "reward": Mean(score.reward)}
