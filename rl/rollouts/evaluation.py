"""Evaluation on held-out sets: one greedy rollout of each problem, and further samples for pass@k.

Shape legend: P problems, G samples of each.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from rl.config.configurable import unless
from rl.config.tree import check_bounds
from rl.observability.metrics import Mean, Metric, Sum, merge
from rl.protocols import Rewarder
from rl.rollouts.episode import RolloutSource
from rl.rollouts.group import check_failures
from rl.rollouts.rubric import ENVIRONMENT
from rl.types import Problem, Rollout, SamplingParams, Score

SEED = 20_240_607
"""Seed of the samples for pass@k, the same at every evaluation of every run."""
OF_STEP = frozenset({"mean", "std", "correct", "equal_groups", "kl", "num_failed", "num_unparsed"})
OF_EVALUATION = frozenset(
    {"correct", "reward", "num_problems", "turns_mean", "num_failed", "num_unparsed"}
)
"""Metrics of a step's rewards and of an evaluation that are not those of a reward function."""
PASS_AT = "pass@"
"""Metric of an evaluation, followed by the number of tries."""


@dataclass(kw_only=True, slots=True)
class Evaluation:
    """Replies that an evaluation draws for each problem, besides the greedy one."""

    num_samples: int = 0
    """Replies sampled at `temperature`: `eval/pass@k` is the probability that one of k of them is
    right, for k = 1, 2, 4, ... up to this number. 0: none."""
    temperature: float = field(default=1.0, metadata=unless("num_samples", 0))
    """Temperature of the sampled replies."""

    def __post_init__(self) -> None:
        check_bounds(self, "num_samples", at_least=0)
        check_bounds(self, "temperature", at_least=0.01, below=math.inf)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EvaluatedSet:
    """Rollouts of one evaluation set with their scores."""

    name: str
    greedy: list[tuple[Rollout, Score]]
    """[P]."""
    sampled: list[list[tuple[Rollout, Score]]]
    """[P][G]; empty if only greedy replies are drawn."""

    @property
    def failures(self) -> list[str]:
        """Failures of greedy and sampled rollouts."""
        failures = []
        for _, score in chain(self.greedy, *self.sampled):
            if score.failure is not None:
                failures.append(score.failure)
        return failures

    def iterate_sampled_correct(self) -> Iterator[tuple[str, list[bool]]]:
        """Yield each problem's id and the correctness of its sampled replies.

        Failed ones are left out.
        """
        for group in self.sampled:
            correct_G = [score.correct for _, score in group if score.failure is None]
            if correct_G:
                yield group[0][0].prompt.problem.id, correct_G


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EvaluationResult:
    """All sets of one evaluation."""

    sets: list[EvaluatedSet]

    def compute_metrics(self) -> dict[str, Metric]:
        """Return the metrics `eval/<name>` of the first set and `eval/<set>/<name>` of the others.

        Failed rollouts, sampled ones too, are counted and left out of the means.
        """
        merged: dict[str, Metric] = {}
        for place, done in enumerate(self.sets):
            # The first set is that of the run's curve, so its metrics have the short names.
            prefix = f"eval/{done.name}" if place else "eval"
            rollouts, scores = list[Rollout](), list[Score]()
            for rollout, score in done.greedy:
                if score.failure is None:
                    rollouts.append(rollout)
                    scores.append(score)
            merged |= score_metrics(scores, prefix=prefix)
            merged[f"{prefix}/num_failed"] = Sum(len(done.failures))

            parts: list[dict[str, Metric]] = [{"num_problems": Sum(len(done.greedy))}]
            for score in scores:
                parts.append({"correct": Mean(score.correct), "reward": Mean(score.reward)})
            # A set of single-turn problems has no metric that is always 1.
            if any(len(rollout.turns) > 1 for rollout in rollouts):
                for rollout in rollouts:
                    parts.append({"turns_mean": Mean(len(rollout.turns))})
            for _, correct_G in done.iterate_sampled_correct():
                parts.append(_pass_metrics(correct_G))
            for name, metric in merge(parts).items():
                merged[f"{prefix}/{name}"] = metric
        return merged

    def pass_rates(self) -> dict[str, float]:
        """Return the share of right replies among each problem's sampled ones, by id.

        Failed ones are left out.
        """
        rates = {}
        for done in self.sets:
            for problem_id, correct_G in done.iterate_sampled_correct():
                rates[problem_id] = sum(correct_G) / len(correct_G)
        return rates


@dataclass(kw_only=True, slots=True)
class Evaluator:
    """Draws and scores rollouts of the evaluation sets."""

    sets: Mapping[str, Sequence[Problem]]
    episodes: RolloutSource
    rewarder: Rewarder
    settings: Evaluation
    sampling: SamplingParams
    """Sampling of training, from which the length and the stop tokens are taken."""
    max_failed: float = 0.0
    """Largest share of failed rollouts among the greedy ones of a set, and among its sampled ones.
    """

    @property
    def num_problems(self) -> int:
        return sum(map(len, self.sets.values()))

    async def run(self) -> EvaluationResult:
        """Evaluate the weights that the generator has now.

        Raises RunError if too many rollouts have no score.
        """
        # Greedy replies need no seed; sampled ones get the same at every evaluation, so that two
        # evaluations differ by their weights alone.
        greedy = replace(self.sampling, temperature=0.0, num_samples=1, seed=None)
        sampled = replace(
            self.sampling,
            temperature=self.settings.temperature,
            num_samples=self.settings.num_samples,
            seed=SEED,
        )
        sets: list[EvaluatedSet] = []
        for name, problems in self.sets.items():
            firsts = await self._score(name, problems, greedy)
            further = []
            if self.settings.num_samples:
                further = await self._score(name, problems, sampled)
            sets.append(
                EvaluatedSet(name=name, greedy=list(chain.from_iterable(firsts)), sampled=further)
            )
        return EvaluationResult(sets=sets)

    async def _score(
        self, name: str, problems: Sequence[Problem], sampling: SamplingParams
    ) -> list[list[tuple[Rollout, Score]]]:
        """Return the [P][G] rollouts of a set with their scores.

        Raises RunError if too many failed.
        """
        # No session, which would send all requests to one generator.
        groups = await self.episodes.run(problems, sampling=sampling)
        # The single reply to a problem cannot be compared with others.
        scores = await self.rewarder.score(groups, alone=sampling.num_samples == 1)
        pairs_PG = []
        for rollouts_G, scores_G in zip(groups, scores, strict=True):
            pairs_PG.append(list(zip(rollouts_G, scores_G, strict=True)))

        failures = []
        for score in chain.from_iterable(scores):
            if score.failure is not None:
                failures.append(score.failure)
        num_scored = sum(map(len, scores))
        check_failures(
            failures,
            num_scored=num_scored,
            out_of=num_scored,
            max_share=self.max_failed,
            where=f"in the evaluation of {name!r}",
        )
        return pairs_PG


def pass_at(k: int, *, num_samples: int, num_correct: int) -> float:
    """Return the unbiased estimate of pass@k: the probability that k samples contain a right one.

    Chen et al., "Evaluating large language models trained on code" (arXiv:2107.03374), equation 1.
    """
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def _pass_metrics(correct_G: Sequence[bool]) -> dict[str, Metric]:
    num_samples, num_correct = len(correct_G), sum(correct_G)
    metrics: dict[str, Metric] = {}
    k = 1
    while k <= num_samples:
        share = pass_at(k, num_samples=num_samples, num_correct=num_correct)
        metrics[f"{PASS_AT}{k}"] = Mean(share)
        k *= 2
    return metrics


def score_metrics(scores: Sequence[Score], *, prefix: str = "reward") -> dict[str, Metric]:
    """Return the mean `<prefix>/<name>` of each reward function, and counts of bad scores.

    Means are unweighted.

    A function that has the name of another metric is reported as `function_<name>`. All scores of a
    step must be passed at once: the environment's part, missing where it is 0, is averaged over all
    of them if any has it.
    """
    good = [score for score in scores if score.failure is None]
    # Tasks of a mixture have different functions, so not every score has every part.
    values_by_name: dict[str, list[float]] = defaultdict(list)
    num_unparsed = 0
    for score in good:
        num_unparsed += bool(score.unparsed)
        for name, value in score.parts.items():
            values_by_name[name].append(value)

    metrics: dict[str, Metric] = {
        f"{prefix}/num_failed": Sum(len(scores) - len(good)),
        f"{prefix}/num_unparsed": Sum(num_unparsed),
    }
    for name, values in values_by_name.items():
        # A missing part of the environment is a 0, a missing part of a function is no value.
        count = len(good) if name == ENVIRONMENT else len(values)
        is_taken = name in OF_STEP | OF_EVALUATION or name.startswith(PASS_AT)
        metrics[f"{prefix}/{'function_' if is_taken else ''}{name}"] = Mean(sum(values), count)
    return metrics
