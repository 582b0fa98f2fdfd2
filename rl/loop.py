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

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from rl.clock import now_s
from rl.config.configurable import Configurable
from rl.errors import naming
from rl.loop_checks import check_empty_steps, check_logprobs
from rl.loop_config import LoopConfig
from rl.loop_progress import Progress
from rl.loop_state import LoopState
from rl.observability.background import BackgroundWriter
from rl.observability.metrics import Record
from rl.observability.recorder import Recorder
from rl.protocols import Learner, Sampler, Scorer, WeightPublisher
from rl.rollout_parts import RolloutParts
from rl.rollouts.ages import token_ages
from rl.rollouts.environment_thread import EnvironmentThreads
from rl.rollouts.evaluation import FailedEvaluationError
from rl.rollouts.producer import Batch
from rl.rollouts.renderer import Renderer
from rl.step_checkpoints import StepCheckpoints
from rl.step_clock import StepClock
from rl.step_metrics import TrainedMinibatch, age_metrics, batch_metrics, time_metrics, training_metrics
from rl.step_samples import SampleMaker, StepSamples
from rl.step_tokens import StepTokens
from rl.stop_request import StopAskedError, StopRequest
from rl.tasks.task import Task
from rl.types import OptimStepResult
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


Writing = Callable[[Callable[[], None]], Awaitable[None]]
"""`begin` or `last` of a `BackgroundWriter`."""


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
        state: LoopState | None = None,
        proximal_logprobs: bool = False,
        threads: EnvironmentThreads | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        """
        Args:
            max_sequence_tokens: of one sequence, that generator and trainer can take.
            recorder: is given every batch and evaluation.
            watch: is told of evaluations, which are silent until they are done.
            state: of an earlier loop that is continued; the learner holds the weights of its step.
            proximal_logprobs: the loss asks for the logprobs before a step's first update
                (`losses.types.uses_proximal_logprobs`).
            threads: that the task's environments were called in before; None makes some.
            stop: heard while the loop runs.
        """
        self.config = config
        self.seams = seams
        self.sinks = sinks
        self.checkpoints = checkpoints
        self.recorder = recorder
        self._recording = BackgroundWriter("rollouts.jsonl")
        self.watch = watch
        # Of a single update, the loss knows them itself.
        adds = proximal_logprobs and config.num_minibatches > 1
        self._samples = SampleMaker(config=config, learner=seams.learner, adds_proximal=adds)
        self._stop = stop or StopRequest()
        self._continued = state
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
        problems = parts.problems(state)
        worker = parts.worker()
        self._clock = StepClock(worker)
        self._producer = parts.producer(worker, problems, state)
        self._sync = WeightSync(seams.publisher, on_failure=self._producer.fail)
        self._progress = Progress(config=config, problems=problems, producer=self._producer, state=state)

    async def run(self) -> None:
        """Publish the starting weights, evaluate, train, evaluate, save; or from where `state` stands.

        Raises:
            StopAskedError: the loop was asked to end; the last whole step is saved.
            RunError: why it cannot go on; the last whole step is saved if the learner still has its weights.
        """
        try:
            with self._stop.heard(self._what_a_stop_does):
                await self._run(self._progress.done)
        except StopAskedError:
            try:
                await self._recording.finish()  # nobody draws these rollouts again
            finally:
                await self.checkpoints.save_at_stop(self._progress.now())
            raise
        except Exception as error:  # of somebody's task too
            if self._progress.whole is not None:
                await self.checkpoints.save_after(error, self._progress.whole)
            raise
        finally:
            await self._recording.close()
            await self._producer.close()
            await self._sync.close()

    async def _run(self, done: int) -> None:
        with naming(f"before step {done + 1}"):
            self._stop.check()
            if self._continued is not None:
                await self.checkpoints.restore_random_states(self._continued)
            await self._sync.begin()
            self._progress.step_of_version[await self._served_version()] = done
            if self._continued is None:
                await self._save(done)
            if not self._progress.evaluated:
                await self._evaluate(done)
        for step in range(done + 1, self.config.num_steps + 1):
            with naming(f"step {step}"):
                self._stop.check()
                await self._step(step)
            with naming(f"after step {step}"):
                if not self._progress.evaluated:
                    self._stop.check()
                    await self._evaluate(step)
                await self._save(step)
        with naming(f"after step {max(done, self.config.num_steps)}"):
            await self._sync.served()
            await self._recording.finish()

    async def _step(self, step: int) -> None:
        clock = self._clock
        clock.start()
        if self.config.max_policy_age == 0:
            self._producer.serve(step - 1)
        try:
            batch = await self._stop.cutting_short(self._producer.next_batch())
        except StopAskedError:
            raise
        except Exception:
            if self.recorder is not None:
                unused = self._producer.unused()
                await self._recording.last(partial(self.recorder.stopped, step, unused))
            raise
        self._progress.step_begins()
        clock.rollouts(batch)
        ages = token_ages(
            batch.groups,
            step=step,
            step_of_version=self._progress.step_of_version,
            max_age=self.config.max_policy_age,
        )
        made = await self._samples.make(batch)
        tokens = StepTokens(made, batch, () if self.recorder is None else self.recorder.places(batch.groups))
        try:
            minibatches = await self._train(made, tokens, is_on_policy=not ages.any())
        except Exception:
            await self._record(self._recording.last, step, batch, tokens)
            raise
        # Long rollouts take a second to write: beside what comes next.
        await self._record(self._recording.begin, step, batch, tokens)
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
        self._progress.step_ends(step, teaches=made.teaches)
        check_empty_steps(self._progress.num_empty_steps, batch, most=self.config.max_empty_steps)

    async def _train(
        self, made: StepSamples, tokens: StepTokens, *, is_on_policy: bool
    ) -> list[TrainedMinibatch]:
        minibatches: list[TrainedMinibatch] = []
        for number, samples in enumerate(made.minibatches):
            gradient = await self.seams.learner.forward_backward(samples, **tokens.asked(number))
            tokens.add(number, gradient)
            if is_on_policy and not minibatches:  # later ones differ by the updates between
                check_logprobs(gradient, max_diff=self.config.max_logprob_diff)
            self._clock.lap("train")
            await self._sync.pushed()
            self._clock.lap("publish")
            update = await self._update()
            self._clock.lap("train")
            minibatches.append(TrainedMinibatch(gradient=gradient, update=update))
        return minibatches

    async def _record(self, how: Writing, step: int, batch: Batch, tokens: StepTokens) -> None:
        if self.recorder is not None:
            await how(partial(self.recorder.step, step, batch, tokens.trained()))

    async def _update(self) -> OptimStepResult:
        progress = self._progress
        before, progress.whole = progress.whole, None
        try:
            return await self.seams.learner.optim_step()
        except ArithmeticError:  # a gradient that is not finite: nothing was updated
            progress.whole = before
            raise

    async def _publish(self, step: int, policy_version: int) -> None:
        """Begin to, if it is due; with `max_policy_age` 0 wait until it is done."""
        if step % self.config.publish_every and not self._progress.evaluates(step):
            return
        self._progress.step_of_version[policy_version] = step
        if self.config.max_policy_age == 0:
            await self._sync.begin()
            await self._sync.served()
        else:
            await self._sync.begin(on_served=lambda: self._producer.serve(step))

    async def _served_version(self) -> int:
        return (await self._sync.served()).policy_version

    async def _evaluate(self, step: int) -> None:
        policy_version = await self._served_version()
        started = now_s()
        with self.watch(f"evaluation at step {step} ({self._evaluator.num_problems} problems)"):
            try:
                evaluation = await self._stop.cutting_short(self._evaluator.run())
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
        self._progress.evaluation_ends()

    async def _save(self, step: int) -> None:
        """If it is due."""
        last = step == self.config.num_steps > 0
        if self.checkpoints.is_due(step, last=last):
            await self._recording.finish()  # nobody draws these rollouts again
            await self.checkpoints.save(self._progress.now(), last=last)

    def _what_a_stop_does(self) -> str:
        step = self._progress.done + self._progress.trains
        saves = f"saving step {step}" if self.checkpoints.would_save(step) else f"stopping after step {step}"
        return f"{saves}, then ending; again to end at once"

    def _write(self, record: Record) -> None:
        for sink in self.sinks:
            sink.write(record)
