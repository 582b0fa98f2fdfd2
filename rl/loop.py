"""The synchronous GRPO loop, written over the protocols: every rollout is on-policy.

    prompts -> generate -> score -> advantages -> samples
            -> forward_backward -> optim_step -> publish -> next step

Nothing here knows of processes: the actors implement the protocols, so do the fakes in
the tests. Shape legend: P prompts of a step, G samples of each.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import numpy as np

from rl.config.configurable import Configurable
from rl.errors import RunError, naming
from rl.observability.metrics import Record, merge
from rl.protocols import Learner, Sampler, Scorer, WeightPublisher
from rl.rollouts.advantage import GroupAdvantage
from rl.rollouts.evaluation import evaluate, raise_on_failures
from rl.rollouts.grading import GradedRollout, grade, teaches_nothing
from rl.rollouts.renderer import ChatRenderer
from rl.rollouts.samples import policy_sample
from rl.step_checkpoints import StepCheckpoints
from rl.step_metrics import TrainedMinibatch, group_metrics, time_metrics, training_metrics
from rl.types import (
    ForwardBackwardResult,
    LoopPosition,
    Problem,
    Rollout,
    SamplingParams,
    Score,
    TrainingSample,
)


class Sink(Protocol):
    """Where records go: metrics.jsonl, the console, later TensorBoard and others."""

    def write(self, record: Record) -> None:
        """A step's record, or an evaluation's (it has the key `eval/correct`)."""
        ...


class Watch(Protocol):
    """Shows whoever waits what is going on."""

    def __call__(self, title: str, /) -> AbstractContextManager[object]:
        """Entered before something long begins, left when it is done."""
        ...


class NothingToLearnError(RunError):
    """Too many steps in a row in which every group's rewards were equal."""


class LogprobMismatchError(RunError):
    """Trainer and generator disagree about tokens that equal weights should have drawn."""


@dataclass(kw_only=True, slots=True)
class Sampling:
    """How training completions are drawn."""

    max_tokens: int = 32
    """Most new tokens of one completion."""
    temperature: float = 1.0
    """The trainer divides its logits by it, so that its logprobs are of the same distribution."""
    top_p: float = 1.0
    """Only 1 (off) can be trained on: the trainer cannot undo a truncated distribution."""
    top_k: int = 0
    """Only 0 (off) can be trained on."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} is less than 1")
        if not 0.01 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature={self.temperature} cannot be trained on: greedy tokens carry no "
                "policy gradient; use a finite value of at least 0.01 (evaluation is greedy anyway)"
            )
        if self.top_p != 1.0 or self.top_k != 0:
            raise ValueError(
                f"top_p={self.top_p}, top_k={self.top_k}: training needs 1.0 and 0 (off), or the recorded "
                " logprobs are not those of the distribution that the trainer computes"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Seams:
    """The collaborators of a loop; each is any implementation of its protocol."""

    sampler: Sampler
    learner: Learner
    publisher: WeightPublisher
    scorer: Scorer


class SyncLoop(Configurable):
    """Runs GRPO until `num_steps` steps are done."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        num_steps: int = 100
        """Optimizer steps times `num_minibatches`: rounds of generate, train, publish."""
        num_prompts: int = 32
        """Prompts of a step."""
        num_samples: int = 8
        """Completions of each prompt; their mean reward is the baseline."""
        num_minibatches: int = 1
        """Optimizer steps a round of rollouts is cut into, by prompts."""
        sampling: Sampling = field(default_factory=Sampling)
        advantage: GroupAdvantage = field(default_factory=GroupAdvantage)
        max_failed_rewards: float = 0.0
        """Share of a step's rewards that may fail (raise, time out, not finite) before the run
        stops; a failed one is counted and not trained on."""
        max_empty_steps: int = 20
        """Steps in a row without any policy gradient (equal rewards in every group) before the
        run stops with a message."""
        max_logprob_diff: float = float("inf")
        """Largest mean difference, in nats a token, between the logprobs of trainer and generator
        before the run stops: beyond rounding it means that they do not hold the same weights."""
        eval_every: int = 20
        """Steps between evaluations; also before the first and after the last step. 0: none."""

        def __post_init__(self) -> None:
            for name in ("num_steps", "eval_every", "max_empty_steps", "max_logprob_diff"):
                if not getattr(self, name) >= 0:
                    raise ValueError(f"{name}={getattr(self, name)} is not at least 0")
            if self.num_prompts < 1 or self.num_samples < 2:
                raise ValueError(
                    f"num_prompts={self.num_prompts}, num_samples={self.num_samples}: a step needs at least "
                    "1 prompt and 2 samples of each, whose mean is the baseline"
                )
            if self.num_minibatches < 1 or self.num_prompts % self.num_minibatches:
                raise ValueError(
                    f"num_minibatches={self.num_minibatches} does not divide num_prompts={self.num_prompts}"
                )
            if not 0 <= self.max_failed_rewards < 1:
                raise ValueError(f"max_failed_rewards={self.max_failed_rewards} is not in [0, 1)")

    def __init__(
        self,
        *,
        config: Config,
        seams: Seams,
        renderer: ChatRenderer,
        train_problems: Iterator[Problem],
        eval_problems: Sequence[Problem],
        sinks: Sequence[Sink],
        checkpoints: StepCheckpoints,
        seed: int,
        watch: Watch = nullcontext,
        position: LoopPosition | None = None,
    ) -> None:
        """
        Args:
            watch: is told of evaluations, which are silent until they are done.
            position: of an earlier loop that is continued; the learner holds that loop's state.
        """
        self.config = config
        self.seams = seams
        self.renderer = renderer
        self._position = position or LoopPosition(step=0, num_problems=0)
        self._continues = position is not None
        self.train_problems = islice(train_problems, self._position.num_problems, None)
        self.eval_prompts = [renderer.prompt(p) for p in eval_problems]
        self.sinks = sinks
        self.checkpoints = checkpoints
        self.seed = seed
        self.watch = watch
        self.policy_version = 0
        self._num_empty_steps = 0

    async def run(self) -> None:
        """Publish the starting weights, evaluate, train, evaluate, save."""
        done = self._position.step
        with naming(f"before step {done + 1}"):
            published = await self.seams.publisher.publish()
            self.policy_version = published.policy_version
            if not self._continues:
                await self.checkpoints.save_if_due(self._position)
            await self._evaluate(step=done)
        for step in range(done + 1, self.config.num_steps + 1):
            with naming(f"step {step}"):
                await self._step(step)
            last = step == self.config.num_steps
            with naming(f"after step {step}"):
                if last or (self.config.eval_every and step % self.config.eval_every == 0):
                    await self._evaluate(step=step)
                await self.checkpoints.save_if_due(self._position, last=last)

    async def _step(self, step: int) -> None:
        clock = _Clock()
        groups = await self._generate(step)
        clock.lap("generate")
        scores = await self._score(groups)
        graded_PG = grade(groups, scores, advantage=self.config.advantage)
        clock.lap("score")
        minibatches = await self._train(graded_PG)
        clock.lap("train")
        published = await self.seams.publisher.publish()
        self.policy_version = published.policy_version
        clock.lap("publish")
        self._write(
            {
                "step": step,
                "policy_version": self.policy_version,
                **merge(
                    group_metrics(graded_G, num_drawn=len(group))
                    for graded_G, group in zip(graded_PG, groups, strict=True)
                ),
                **training_metrics(minibatches),
                **time_metrics(
                    groups=groups, minibatches=minibatches, published=published, laps_s=clock.laps_s
                ),
            }
        )
        self._position = LoopPosition(step=step, num_problems=self._position.num_problems + len(groups))
        self._stop_if_nothing_to_learn(graded_PG)

    async def _generate(self, step: int) -> list[list[Rollout]]:
        """[P][G] rollouts, all of the current policy version."""
        num_prompts = self.config.num_prompts
        prompts = [self.renderer.prompt(p) for p in islice(self.train_problems, num_prompts)]
        if len(prompts) < num_prompts:
            raise RunError(
                f"the task's training problems are used up: {len(prompts)} are left, of loop.num_prompts="
                f"{num_prompts} that a step takes; let `train_problems` repeat them, or lower loop.num_steps"
            )
        settings = self.config.sampling
        sampling = SamplingParams(
            max_tokens=settings.max_tokens,
            num_samples=self.config.num_samples,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            stop_token_ids=self.renderer.stop_token_ids,
            seed=self.seed * 1_000_003 + step,
        )
        completions = await self.seams.sampler.generate([p.token_ids for p in prompts], sampling=sampling)
        rollouts = [
            [self.renderer.rollout(prompt, completion, sample=i) for i, completion in enumerate(group)]
            for prompt, group in zip(prompts, completions, strict=True)
        ]
        self._check_on_policy(rollouts)
        return rollouts

    def _check_on_policy(self, groups: list[list[Rollout]]) -> None:
        for rollout in (r for group in groups for r in group):
            versions = rollout.completion.policy_versions
            if np.any(versions != self.policy_version):
                raise RunError(
                    f"a completion was drawn by policy versions {np.unique(versions).tolist()}, the "
                    f"synchronous loop is at {self.policy_version}: the weights' sync is broken"
                )

    async def _score(self, groups: list[list[Rollout]]) -> list[Score]:
        scores = await self.seams.scorer.score([r for group in groups for r in group])
        raise_on_failures(scores, max_fraction=self.config.max_failed_rewards)
        return scores

    async def _train(self, graded_PG: list[list[GradedRollout]]) -> list[TrainedMinibatch]:
        minibatches: list[TrainedMinibatch] = []
        width = self.config.num_prompts // self.config.num_minibatches
        for start in range(0, len(graded_PG), width):
            samples = self._samples(graded_PG[start : start + width])
            if not samples:  # every reward of these prompts failed
                continue
            gradient = await self.seams.learner.forward_backward(samples)
            if not minibatches:  # later ones differ from the generator by the updates between
                self._check_logprobs(gradient)
            update = await self.seams.learner.optim_step()
            minibatches.append(TrainedMinibatch(gradient=gradient, update=update))
        return minibatches

    def _check_logprobs(self, result: ForwardBackwardResult) -> None:
        if result.logprob_diff_mean > self.config.max_logprob_diff:
            raise LogprobMismatchError(
                f"policy version {self.policy_version}: the logprobs of trainer and generator "
                f"differ by {result.logprob_diff_mean:.3g} nats a token (at most "
                f"{result.logprob_diff_max:.3g}), more than loop.max_logprob_diff="
                f"{self.config.max_logprob_diff:g}: they do not hold the same weights, or compute them in "
                "other precisions"
            )

    def _samples(self, graded_PG: list[list[GradedRollout]]) -> list[TrainingSample]:
        temperature = self.config.sampling.temperature
        return [
            policy_sample(g.rollout, advantage=g.advantage, temperature=temperature)
            for group in graded_PG
            for g in group
        ]

    def _stop_if_nothing_to_learn(self, graded_PG: list[list[GradedRollout]]) -> None:
        empty = all(map(teaches_nothing, graded_PG))
        self._num_empty_steps = self._num_empty_steps + 1 if empty else 0
        if self._num_empty_steps > self.config.max_empty_steps:
            rewards = {g.score.reward for group in graded_PG for g in group}
            raise NothingToLearnError(
                f"{self._num_empty_steps} steps in a row had equal rewards in every group (the last: "
                f"{sorted(rewards)[:3]}), more than loop.max_empty_steps={self.config.max_empty_steps}: the "
                "task is solved or out of reach, so there is no policy gradient"
            )

    async def _evaluate(self, *, step: int) -> None:
        if not self.config.eval_every:
            return
        started = time.perf_counter()
        with self.watch(f"evaluation at step {step} ({len(self.eval_prompts)} problems)"):
            evaluation = await evaluate(
                prompts=self.eval_prompts,
                sampler=self.seams.sampler,
                scorer=self.seams.scorer,
                renderer=self.renderer,
                max_tokens=self.config.sampling.max_tokens,
            )
        self._write(
            {
                "step": step,
                "policy_version": self.policy_version,
                **evaluation,
                "time/eval_s": time.perf_counter() - started,
            }
        )

    def _write(self, record: Record) -> None:
        for sink in self.sinks:
            sink.write(record)


class _Clock:
    """Laps of one step, in seconds."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.laps_s: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps_s[name] = now - self._last
        self._last = now
