"""The GRPO loop, written against the protocols of `rl.protocols`.

    prompts -> generate -> score -> advantages     the producer, up to max_off_policy_steps ahead
            -> forward_backward -> optim_step      the loop, step by step
            -> push -> pull                        the weight sync, behind the next gradient

The loop waits for
    a batch               until enough groups are generated and scored. The producer starts groups
                          as long as their tokens can stay within max_off_policy_steps; newer
                          weights and taken batches allow more.
    the trainer           for each gradient and each update.
    the previous push     before an update changes the weights that are still being copied.
    the generators        with max_off_policy_steps 0, until all of them serve the new weights;
                          above 0, only if the weights before the last are not served yet.
    the rollouts' writer  until the rollouts of the previous step are written.

With `max_off_policy_steps` 0 generation, training and the weight sync take turns, and every rollout
is on-policy. Above 0 the next batches are generated while a step trains, and weights are pushed
while the next gradient is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from rl.config.configurable import Configurable
from rl.config.rules import check_rules, select_rules
from rl.loop.batch import TrainingBatch, collect_trained_rollouts, make_training_batch
from rl.loop.config import LoopConfig
from rl.loop.ledger import StepLedger
from rl.loop.metrics import (
    StepClock,
    TrainedMinibatch,
    batch_metrics,
    staleness_metrics,
    time_metrics,
    training_metrics,
)
from rl.loop.setup import RolloutSetup
from rl.loop.state import Progress, StepCheckpoints
from rl.loop.stop_request import StopRequest
from rl.loop.sync import WeightSync
from rl.observability.metrics import Record, Sink
from rl.observability.recorder import Recorder
from rl.observability.spans import add_error_context
from rl.protocols import Publisher, Trainer
from rl.rollouts.bundles import EpisodeRoom
from rl.rollouts.group import RolloutId, RolloutWorker, SampleId, get_rollout_id
from rl.rollouts.producer import Batch, NothingToLearnError, NumberedProblems, RolloutProducer
from rl.rollouts.staleness import StalenessBound, WeightVersions
from rl.run_rules import RULES
from rl.trainer_types import ForwardBackwardResult, OptimStepResult, TrainedTokens
from rl.types import LoopPosition
from rl.utils.background import BackgroundWriter
from rl.utils.clock import now_s
from rl.utils.errors import RunError, StopRequestedError


def _make_producer(
    config: LoopConfig,
    *,
    worker: RolloutWorker,
    problems: NumberedProblems,
    step: int,
    room: EpisodeRoom | None,
) -> RolloutProducer:
    """Return the producer of a loop that has done `step` steps."""
    return RolloutProducer(
        bound=StalenessBound(
            max_off_policy_steps=config.max_off_policy_steps,
            groups_per_batch=config.groups_per_batch,
            num_steps=config.num_steps,
            step=step,
        ),
        worker=worker.run,
        problems=problems,
        drop_equal=config.drop_zero_advantage_groups,
        max_sample_tokens=config.max_sample_tokens if config.long_samples == "drop_group" else None,
        room=room,
        max_dropped=config.max_empty_steps * config.groups_per_batch,
        max_failed_rewards=config.max_failed_rewards,
        # A batch's first failure must not count as all of its rewards.
        rewards_per_step=config.groups_per_batch * config.group_size,
    )


class LogprobMismatchError(RunError):
    """Trainer and generator disagree about the logprobs of on-policy tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopAlone:
    """The part of a run's config that a loop without a run has, as the rules see it."""

    loop: LoopConfig


class Loop(Configurable):
    """Trains with GRPO until `num_steps` steps are done.

    Example:
        loop = Loop.Config(num_steps=80, groups_per_batch=32, group_size=8).build(
            trainer=trainer, publisher=publisher, rollouts=rollouts,
            checkpoints=checkpoints, sinks=[metrics],
        )
        await loop.run()  # 80 steps of 256 rollouts each
    """

    Config: TypeAlias = LoopConfig

    def __init__(
        self,
        *,
        config: LoopConfig,
        trainer: Trainer,
        publisher: Publisher,
        rollouts: RolloutSetup,
        checkpoints: StepCheckpoints,
        sinks: Sequence[Sink],
        recorder: Recorder | None = None,
        ledger: StepLedger | None = None,
        watch: Callable[[str], AbstractContextManager[object]] = nullcontext,
        position: LoopPosition | None = None,
        proximal_logprobs: bool = False,
        stop: StopRequest | None = None,
    ) -> None:
        """
        Args:
            recorder: writes the rollouts of every batch and evaluation.
            ledger: writes what every step has trained.
            watch: shows the title of an evaluation while it runs.
            position: position of an earlier loop to continue from; the trainer has the weights of
                its step.
            proximal_logprobs: the loss needs the logprobs from before a step's first update
                (`losses.types.uses_proximal_logprobs`).
            stop: a request to stop after the current step.
        """
        # A run has checked these; a script may make a loop alone.
        check_rules(LoopAlone(loop=config), select_rules(RULES, "loop"))
        self.config = config
        self.trainer = trainer
        self.checkpoints = checkpoints
        self.sinks = sinks
        self.recorder = recorder
        self.ledger = ledger
        self.watch = watch

        # With a single update the loss can use its own logprobs.
        self._adds_proximal_logprobs = proximal_logprobs and config.num_minibatches > 1
        self._stop = stop or StopRequest()
        self._continues = position is not None
        self._writer = BackgroundWriter("rollouts.jsonl and ledger")

        worker, self._evaluator = rollouts.build(config)
        start = position or LoopPosition(step=0, num_problems=0)
        self._problems = NumberedProblems(rollouts.task.train_problems(seed=rollouts.seed), start)
        self._producer = _make_producer(
            config, worker=worker, problems=self._problems, step=start.step, room=rollouts.room
        )
        self._versions = WeightVersions(max_off_policy_steps=config.max_off_policy_steps)
        self._clock = StepClock(worker)
        self._sync = WeightSync(publisher, on_failure=self._producer.fail)
        self._progress = Progress(
            problems=self._problems,
            producer=self._producer,
            start=start,
            evaluates=config.eval_every > 0,
        )

    async def run(self) -> None:
        """Publish the first weights, then evaluate, train and save until the last step is done.

        Raises:
            StopRequestedError: a stop was requested; the last completed step is saved.
            RunError: the run cannot go on; the last completed step is saved if the trainer still
                has its weights.
        """
        try:
            with self._stop.listen(self._describe_stop):
                await self._run_steps()
        except StopRequestedError:
            try:
                # A checkpoint's rollouts are not generated again, so they are written first.
                await self._writer.finish()
            finally:
                if self.checkpoints.should_save(self._progress.done):
                    await self.checkpoints.save(self._progress.make_position(), wait=True)
            raise
        except Exception as error:
            # Any error, as the user's task runs here too: without a save the steps since the last
            # checkpoint are lost.
            if self._progress.whole is not None:
                await self.checkpoints.save_after(error, self._progress.whole)
            raise
        finally:
            await self._writer.close()
            await self._producer.close()
            await self._sync.close()

    async def _run_steps(self) -> None:
        first, last = self._progress.done + 1, self.config.num_steps
        with add_error_context(f"before step {first}"):
            await self._begin()
        for step in range(first, last + 1):
            with add_error_context(f"step {step}"):
                self._stop.check()
                await self._step(step)

            with add_error_context(f"after step {step}"):
                if not self._progress.evaluated:
                    self._stop.check()
                    await self._evaluate(step)
                await self._save(step)

        # The generators of a finished run serve its last weights, and its rollouts are on disk.
        with add_error_context(f"after step {max(first - 1, last)}"):
            await self._sync.wait_for_pull()
            await self._writer.finish()

    async def _begin(self) -> None:
        done = self._progress.done
        self._stop.check()

        # A generator's weights are zero until its first pull, also in a run that continues.
        await self._sync.begin()
        published = await self._sync.wait_for_pull()
        self._versions.record_push(published.policy_version, step=done)

        if not self._continues:
            await self._save(done)
        if not self._progress.evaluated:
            await self._evaluate(done)

    async def _step(self, step: int) -> None:
        clock, config = self._clock, self.config
        clock.start()

        # On-policy, groups start with the step: an evaluation between two steps has the generators
        # for itself.
        if config.max_off_policy_steps == 0:
            self._producer.record_pull(step - 1)
        batch = await self._wait_for_batch(step)
        self._progress.has_batch = True
        clock.split_batch_wait(batch)

        # The bound holds by construction; tokens are checked all the same, because a generator that
        # keeps old weights would break it silently.
        staleness = self._versions.count_off_policy_steps(batch.groups, step=step)
        training = await make_training_batch(
            batch,
            config=config,
            trainer=self.trainer,
            adds_proximal_logprobs=self._adds_proximal_logprobs,
        )
        trained = await self._train(step, batch, training, on_policy=not staleness.any())

        policy_version = trained[-1].update.policy_version
        await self._push_weights(step, policy_version)
        clock.lap("publish")

        self._write(
            {
                "step": step,
                "policy_version": policy_version,
                **batch_metrics(batch),
                **training.metrics,
                **training_metrics(trained),
                **staleness_metrics(staleness),
                **time_metrics(minibatches=trained, published=self._sync.last, clock=clock),
            }
        )
        self._progress.finish_step(
            step,
            has_gradient=training.has_gradient,
            evaluation_is_due=config.is_evaluation_due(step),
        )
        self._check_empty_steps(batch)

    async def _train(
        self, step: int, batch: Batch, training: TrainingBatch, *, on_policy: bool
    ) -> list[TrainedMinibatch]:
        """Update the weights once for each minibatch, and record the rollouts."""
        recorded: set[RolloutId] = set()
        for records in (self.recorder, self.ledger):
            recorded |= set() if records is None else set(records.choose_ids(batch.groups))
        tokens: dict[SampleId, TrainedTokens] = {}
        trained: list[TrainedMinibatch] = []
        steps_of_versions = dict(self._versions.step_of_version)
        outstanding = {*self._producer.outstanding, *self._problems.again}

        def write() -> None:
            rollouts = collect_trained_rollouts(batch, training, recorded=recorded, tokens=tokens)
            if self.recorder is not None:
                self.recorder.step(step, batch, rollouts)
            # A step that failed has trained nothing.
            if self.ledger is not None and len(trained) == len(training.minibatches):
                self.ledger.step(
                    step,
                    batch,
                    rollouts,
                    trained=trained,
                    steps_of_versions=steps_of_versions,
                    outstanding=outstanding,
                )

        try:
            for samples in training.minibatches:
                # Ask only for tokens that are recorded: each costs a copy from the device.
                indices: list[int] = []
                ids: list[SampleId] = []
                for index, sample_id in enumerate(samples):
                    if get_rollout_id(sample_id) in recorded:
                        indices.append(index)
                        ids.append(sample_id)
                gradient = await self.trainer.forward_backward(
                    [*samples.values()], return_trained=indices or False
                )
                tokens |= zip(ids, gradient.trained or (), strict=False)

                # Later minibatches differ from the generator by the updates between them.
                if on_policy and not trained:
                    self._check_logprobs(gradient)
                self._clock.lap("train")

                # The gradient needed the weights only to be read; the update writes them.
                await self._sync.wait_for_push()
                self._clock.lap("publish")

                is_empty = not any(sample.mask.any() for sample in samples.values())
                update = await self._update_weights(allow_empty=is_empty)
                self._clock.lap("train")
                trained.append(TrainedMinibatch(gradient=gradient, update=update))
        except Exception:
            # The rollouts of the failed step are what explains it.
            await self._record(write, last=True)
            raise
        await self._record(write)
        return trained

    async def _wait_for_batch(self, step: int) -> Batch:
        try:
            return await self._stop.run_until_stop(self._producer.take_batch())
        except StopRequestedError:
            raise
        except Exception:
            # Groups that no batch has taken are recorded here, or nowhere.
            unused = self._producer.collect_unused()
            if self.recorder is not None:
                await self._record(partial(self.recorder.record_pending, step, unused), last=True)
            raise

    async def _update_weights(self, *, allow_empty: bool) -> OptimStepResult:
        """Update the weights; with `allow_empty` also where all of a minibatch is masked."""
        progress = self._progress
        # From here to the end of the step the weights belong to no step, so an error must not save
        # them.
        before, progress.whole = progress.whole, None
        try:
            return await self.trainer.optim_step(allow_empty=allow_empty)
        except ArithmeticError:
            # The gradient was not finite, so the weights are unchanged and may be saved.
            progress.whole = before
            raise

    async def _push_weights(self, step: int, policy_version: int) -> None:
        """Begin to push the weights if they are due.

        With `max_off_policy_steps` 0 wait until all generators have pulled them.
        """
        if not self.config.is_push_due(step):
            return
        self._versions.record_push(policy_version, step=step)
        if self.config.max_off_policy_steps == 0:
            await self._sync.begin()
            await self._sync.wait_for_pull()
        else:
            await self._sync.begin(on_pulled=lambda: self._producer.record_pull(step))

    async def _evaluate(self, step: int) -> None:
        policy_version = (await self._sync.wait_for_pull()).policy_version
        started = now_s()
        with self.watch(f"evaluation at step {step} ({self._evaluator.num_problems} problems)"):
            result = await self._stop.run_until_stop(self._evaluator.run())
        eval_s = now_s() - started
        if self.recorder is not None:
            await self._record(partial(self.recorder.evaluation, step, result))
        self._write(
            {
                "step": step,
                "policy_version": policy_version,
                **result.compute_metrics(),
                "time/eval_s": eval_s,
            }
        )
        self._progress.finish_evaluation()

    async def _save(self, step: int) -> None:
        last = step == self.config.num_steps > 0
        if self.checkpoints.is_due(step, last=last):
            # A checkpoint's rollouts are not generated again, so they are written first.
            await self._writer.finish()
            await self.checkpoints.save(self._progress.make_position(), last=last)

    async def _record(self, write: Callable[[], None], *, last: bool = False) -> None:
        """Write rollouts in the background; with `last`, before a run that fails ends."""
        if self.recorder is None and self.ledger is None:
            return
        submit = self._writer.last if last else self._writer.begin
        await submit(write)

    def _write(self, record: Record) -> None:
        for sink in self.sinks:
            sink.write(record)

    def _check_logprobs(self, gradient: ForwardBackwardResult) -> None:
        if gradient.logprob_diff_mean > self.config.max_logprob_diff:
            raise LogprobMismatchError(
                f"the logprobs of trainer and generator differ by {gradient.logprob_diff_mean:.3g} "
                f"nats a token (at most {gradient.logprob_diff_max:.3g}), more than "
                f"loop.max_logprob_diff={self.config.max_logprob_diff:g}: their weights differ, or "
                "their precision does"
            )

    def _check_empty_steps(self, batch: Batch) -> None:
        num_empty, most = self._progress.num_empty_steps, self.config.max_empty_steps
        if num_empty <= most:
            return

        rewards: set[float] = set()
        for group in batch.groups:
            for member in group.scored:
                rewards.add(member.score.reward)
        where = "in every group" if self.config.group_size > 1 else "in the batch"
        or_masked = ""
        if self.config.mask_truncated_completions:
            or_masked = (
                " or only truncated replies, which loop.mask_truncated_completions leaves out of "
                "the loss"
            )
        raise NothingToLearnError(
            f"{num_empty} steps in a row had equal rewards {where} (the last: "
            f"{sorted(rewards)[:3]}){or_masked}, more than loop.max_empty_steps={most}: the "
            "task is solved or out of reach, so there is no policy gradient"
        )

    def _describe_stop(self) -> str:
        step = self._progress.done + self._progress.has_batch
        saves = (
            f"saving step {step}"
            if self.checkpoints.should_save(step)
            else f"stopping after step {step}"
        )
        return f"{saves}, then ending; again to end at once"
