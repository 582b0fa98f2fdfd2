"""The GRPO loop, written over the protocols.

    prompts -> generate -> score -> advantages        the producer, up to max_policy_age steps ahead
            -> forward_backward -> optim_step         the loop, step by step
            -> publish                                the sync, behind the next gradient

With `max_policy_age` 0 the three take turns, and every rollout is on-policy. Above, the next steps'
rollouts are drawn while this one trains, weights are pushed while the next gradient is computed, and
generators pull them between two tokens. No token is ever trained on that is older: docs/async.md.

Nothing here knows of processes: the actors implement the protocols, so do the fakes in
the tests. Shape legend: P prompts of a step, G samples of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from rl.clock import now_s
from rl.config.configurable import Configurable
from rl.errors import RunError, naming
from rl.loop_config import LoopConfig
from rl.observability.background import BackgroundWriter
from rl.observability.metrics import Record
from rl.observability.recorder import Recorder
from rl.protocols import Learner, Sampler, Scorer, WeightPublisher
from rl.rollout_parts import RolloutParts
from rl.rollouts.ages import token_ages
from rl.rollouts.environment_thread import EnvironmentThreads
from rl.rollouts.evaluation import FailedEvaluationError
from rl.rollouts.producer import Batch, NothingToLearnError
from rl.rollouts.renderer import Renderer
from rl.step_checkpoints import StepCheckpoints
from rl.step_clock import StepClock
from rl.step_metrics import TrainedMinibatch, age_metrics, batch_metrics, time_metrics, training_metrics
from rl.step_samples import SampleMaker, StepSamples
from rl.tasks.task import Task
from rl.types import ForwardBackwardResult, LoopPosition
from rl.weights.sync import WeightSync


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


class LogprobMismatchError(RunError):
    """Trainer and generator disagree about tokens that equal weights should have drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seams:
    """The collaborators of a loop; each is any implementation of its protocol."""

    sampler: Sampler
    learner: Learner
    publisher: WeightPublisher
    scorer: Scorer


class Loop(Configurable):
    """Runs GRPO until `num_steps` steps are done."""

    @dataclass(kw_only=True, slots=True)
    class Config(LoopConfig):
        """Its fields are those of `LoopConfig`."""

    def __init__(
        self,
        *,
        config: Config,
        seams: Seams,
        renderer: Renderer,
        task: Task,
        max_sequence_tokens: int,
        sinks: Sequence[Sink],
        checkpoints: StepCheckpoints,
        seed: int,
        recorder: Recorder | None = None,
        watch: Watch = nullcontext,
        position: LoopPosition | None = None,
        proximal_logprobs: bool = False,
        threads: EnvironmentThreads | None = None,
    ) -> None:
        """
        Args:
            max_sequence_tokens: of one sequence, that generator and trainer can take.
            recorder: is given every batch and evaluation.
            watch: is told of evaluations, which are silent until they are done.
            position: of an earlier loop that is continued; the learner holds that loop's state.
            proximal_logprobs: the loss asks for the logprobs before a step's first update
                (`losses.types.uses_proximal_logprobs`).
            threads: that the task's environments were called in before; None makes some.
        """
        self.config = config
        self.seams = seams
        self.sinks = sinks
        self.checkpoints = checkpoints
        self.recorder = recorder
        self._recording = BackgroundWriter("rollouts.jsonl")
        self.watch = watch
        self._samples = SampleMaker(
            config=config,
            learner=seams.learner,
            # Of a single update, the loss knows them itself.
            adds_proximal=proximal_logprobs and config.num_minibatches > 1,
        )
        self._position = position
        parts = RolloutParts(
            config=config,
            sampler=seams.sampler,
            scorer=seams.scorer,
            renderer=renderer,
            task=task,
            max_sequence_tokens=max_sequence_tokens,
            seed=seed,
            threads=threads or EnvironmentThreads(),
        )
        self._evaluator = parts.evaluator()
        self._problems = parts.problems(position)
        worker = parts.worker()
        self._clock = StepClock(worker)
        self._producer = parts.producer(worker, self._problems, position)
        self._sync = WeightSync(seams.publisher, on_failure=self._producer.fail)
        self._step_of_version: dict[int, int] = {}
        """Step after which each policy version was published, so that ages can be told."""
        self._num_empty_steps = 0

    async def run(self) -> None:
        """Publish the starting weights, evaluate, train, evaluate, save."""
        done = 0 if self._position is None else self._position.step
        try:
            with naming(f"before step {done + 1}"):
                await self._sync.begin()
                self._step_of_version[await self._served_version()] = done
                if self._position is None:
                    await self._save(done)
                await self._evaluate(done)
            for step in range(done + 1, self.config.num_steps + 1):
                with naming(f"step {step}"):
                    await self._step(step)
                with naming(f"after step {step}"):
                    if self._evaluates(step):
                        await self._evaluate(step)
                    await self._save(step)
            with naming(f"after step {max(done, self.config.num_steps)}"):
                await self._sync.served()
                await self._recording.finish()
        finally:
            await self._recording.close()
            await self._producer.close()
            await self._sync.close()

    async def _step(self, step: int) -> None:
        clock = self._clock
        clock.start()
        if self.config.max_policy_age == 0:
            self._producer.serve(step - 1)
        try:
            batch = await self._producer.next_batch()
        except Exception:
            if self.recorder is not None:
                unused = self._producer.unused()
                await self._recording.last(partial(self.recorder.stopped, step, unused))
            raise
        clock.rollouts(batch)
        ages = token_ages(
            batch.groups,
            step=step,
            step_of_version=self._step_of_version,
            max_age=self.config.max_policy_age,
        )
        made = await self._samples.make(batch)
        if self.recorder is not None:
            # Long rollouts take a second to write: beside the gradient.
            await self._recording.begin(partial(self.recorder.step, step, batch, made.advantages_PG))
        minibatches = await self._train(made, is_on_policy=not ages.any())
        policy_version = minibatches[-1].update.policy_version
        await self._publish(step, policy_version)
        clock.lap("publish")
        self._write(
            {
                "step": step,
                "policy_version": policy_version,
                **batch_metrics(batch),
                **made.metrics,
                **training_metrics(minibatches),
                **age_metrics(ages),
                **time_metrics(minibatches=minibatches, published=self._sync.last, clock=clock),
            }
        )
        self._stop_if_nothing_to_learn(batch, made)

    async def _train(self, made: StepSamples, *, is_on_policy: bool) -> list[TrainedMinibatch]:
        minibatches: list[TrainedMinibatch] = []
        for samples in made.minibatches:
            gradient = await self.seams.learner.forward_backward(samples)
            if is_on_policy and not minibatches:  # later ones differ by the updates between
                self._check_logprobs(gradient)
            self._clock.lap("train")
            await self._sync.pushed()
            self._clock.lap("publish")
            update = await self.seams.learner.optim_step()
            self._clock.lap("train")
            minibatches.append(TrainedMinibatch(gradient=gradient, update=update))
        return minibatches

    async def _publish(self, step: int, policy_version: int) -> None:
        """Begin to, if it is due; with `max_policy_age` 0 wait until it is done."""
        if step % self.config.publish_every and not self._evaluates(step):
            return
        self._step_of_version[policy_version] = step
        if self.config.max_policy_age == 0:
            await self._sync.begin()
            await self._sync.served()
        else:
            await self._sync.begin(on_served=lambda: self._producer.serve(step))

    async def _served_version(self) -> int:
        return (await self._sync.served()).policy_version

    def _check_logprobs(self, result: ForwardBackwardResult) -> None:
        if result.logprob_diff_mean > self.config.max_logprob_diff:
            raise LogprobMismatchError(
                f"the logprobs of trainer and generator differ by {result.logprob_diff_mean:.3g} nats a "
                f"token (at most {result.logprob_diff_max:.3g}), more than loop.max_logprob_diff="
                f"{self.config.max_logprob_diff:g}: they do not hold the same weights, or compute them in "
                "other precisions"
            )

    def _stop_if_nothing_to_learn(self, batch: Batch, made: StepSamples) -> None:
        self._num_empty_steps = 0 if made.teaches else self._num_empty_steps + 1
        if self._num_empty_steps > self.config.max_empty_steps:
            rewards = {member.score.reward for group in batch.groups for member in group.scored}
            raise NothingToLearnError(
                f"{self._num_empty_steps} steps in a row had equal rewards in every group (the last: "
                f"{sorted(rewards)[:3]}), more than loop.max_empty_steps={self.config.max_empty_steps}: the "
                "task is solved or out of reach, so there is no policy gradient"
            )

    def _evaluates(self, step: int) -> bool:
        """Whether an evaluation is due after this step."""
        every = self.config.eval_every
        return bool(every) and (step % every == 0 or step == self.config.num_steps)

    async def _evaluate(self, step: int) -> None:
        if not self.config.eval_every:
            return
        policy_version = await self._served_version()
        started = now_s()
        with self.watch(f"evaluation at step {step} ({self._evaluator.num_problems} problems)"):
            try:
                evaluation = await self._evaluator.run()
            except FailedEvaluationError as error:
                if self.recorder is not None:
                    stopped = partial(self.recorder.stopped_evaluation, step, error.result)
                    await self._recording.last(stopped)
                raise
        eval_s = now_s() - started
        if self.recorder is not None:
            await self._recording.begin(partial(self.recorder.evaluation, step, evaluation))
        self._write(
            {"step": step, "policy_version": policy_version, **evaluation.metrics(), "time/eval_s": eval_s}
        )

    async def _save(self, step: int) -> None:
        position = self._problems.position(step, outstanding=self._producer.bound.outstanding)
        await self.checkpoints.save_if_due(position, last=step == self.config.num_steps > 0)

    def _write(self, record: Record) -> None:
        for sink in self.sinks:
            sink.write(record)
