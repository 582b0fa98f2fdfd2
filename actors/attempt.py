"""A run's training on a fleet: from where it stands to its end, through trainers that are lost.

    prepare     the trainer loads the run's latest checkpoint, or what the config says it starts from
    loop        from the state in that checkpoint
    finish      Hugging Face folder, adapter, learning curve

A trainer that is lost is replaced, and all of this begins again, with the same generators; so it does where
another process resumes the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from actors.backend import ActorLearner, ActorPublisher, ActorSampler, ActorScorer
from actors.calls import ActorCallError, Group, may_hang
from actors.checks import has_lora
from actors.fleet import Fleet
from actors.loading import drawn_with, load_newest
from actors.plan import Plan
from actors.processes import ProcessId, is_alive
from actors.random_states import ActorRandomStates
from actors.revive import revive_trainer
from actors.router import Router
from actors.run_config import RunConfig
from actors.supervision import AddEvent, no_event
from losses.types import uses_proximal_logprobs
from rl.atomic_folder import remove
from rl.config.serialize import to_dict
from rl.errors import RunError
from rl.loop import Loop, Seams, Sink
from rl.loop_state import LoopState, read_loop_state
from rl.observability.console import progress
from rl.observability.curve import draw_learning_curve
from rl.observability.cut_back import cut_back
from rl.observability.events import read_events
from rl.observability.limit_sink import LimitSink, RunLimits
from rl.observability.metrics import MetricsWriter
from rl.observability.recorder import Recorder
from rl.observability.run_folder import RunFolder
from rl.observability.sinks.run_sinks import RunSinks, open_sinks
from rl.rollouts.rubric import Rubric
from rl.rollouts.scoring import longest_s
from rl.step_checkpoints import StepCheckpoints
from rl.stop_request import StopAskedError, StopRequest
from rl.supervised import SupervisedWarmup
from rl.training.checkpoint_config import RANDOM, TOKENIZER, LoadSource, excluded, find_load_source
from rl.training.checkpoint_files import ADAPTER_FOLDER, HF_FOLDER, damaged_folders
from rl.training.own_checkpoint import own_checkpoint

logger = logging.getLogger(__name__)

TOLD_S = 10.0
"""For whoever has asked a dead trainer for something to say so."""


async def while_trainer_lives(fleet: Fleet, training: Coroutine[Any, Any, None]) -> None:
    """A trainer's death is seen also while nothing is asked of it; whoever asks tells more of it."""
    if fleet.recovery is None:
        return await training
    running = asyncio.ensure_future(training)
    try:
        await fleet.recovery.trainer.while_alive(running, "training", grace_s=TOLD_S)
    finally:
        # It is closed before anything is started again.
        running.cancel()
        await asyncio.wait({running})


class Revive(Protocol):
    """As `revive_trainer`."""

    async def __call__(self, fleet: Fleet, error: RunError, /, *, at_least: int) -> Fleet: ...


@dataclass(kw_only=True, slots=True)
class Training:
    """Of one run."""

    config: RunConfig
    plan: Plan
    folder: RunFolder
    rubric: Rubric
    stop: StopRequest
    revive: Revive = revive_trainer
    events: AddEvent = no_event
    """Is told of what happens to the run."""
    limits: RunLimits | None = None
    """What its steps are compared with; None: nothing."""
    _began: bool = field(init=False, default=False)
    """Whether the run's folder may hold records of this run."""
    _starts: list[int] = field(init=False, default_factory=list)
    """The step after which each attempt began."""
    _damaged: set[str] = field(init=False)
    """Names of the folders that were set aside and of which that was told."""

    def __post_init__(self) -> None:
        self._began = self.plan.resumed is not None or self.folder.metrics.exists()
        # A new run has set none aside; of one that goes on, the plan may have.
        self._damaged = self._told_damaged() if self._began else self._names_of_damaged()

    async def run(self, fleet: Fleet) -> Fleet:
        """To the end; the fleet as it is then.

        Raises:
            StopAskedError: the run was asked to end.
            RunError: it cannot go on.
        """
        async with self._sinks() as sinks:
            while True:
                try:
                    await self._attempt(fleet, sinks)
                    return fleet
                except RunError as error:
                    if self.stop.was_asked:
                        raise
                    # However far apart its losses are: a run that saves nothing between them gets nowhere.
                    from_here = self._starts.count(self._starts[-1]) if self._starts else 1
                    fleet = await self.revive(fleet, error, at_least=from_here)
                    logger.warning("the trainer is there again; the run goes back to its last checkpoint")

    def _sinks(self) -> RunSinks:
        return open_sinks(
            self.config.sinks,
            folder=self.folder.path,
            logs=self.folder.logs,
            title=self.folder.path.name,
            num_steps=self.config.loop.num_steps,
            settings=to_dict(self.config),
        )

    async def _attempt(self, fleet: Fleet, sinks: RunSinks) -> None:
        learner = ActorLearner(fleet.trainer)
        source = await self._prepare(learner)
        state = None if source is None else _state(source, self.config)
        self._starts.append(0 if state is None else state.position.step)
        self._tell_damaged()
        if self._began:
            self._go_back(source)
        self._began = True
        with MetricsWriter(self.folder.metrics) as metrics, sinks.attempt():
            loop = self._loop(fleet, learner, metrics=metrics, sinks=sinks, state=state, source=source)
            background = self.config.trainer.checkpoint.async_mode != "disabled"
            async with _last_save_ends(fleet, background=background):
                await while_trainer_lives(fleet, loop.run())
        await asyncio.gather(self._export(learner), self._draw())

    async def _prepare(self, learner: ActorLearner) -> LoadSource | None:
        """Load what the run goes on from; None: it starts from its beginning."""
        exclude = self.config.trainer.checkpoint.exclude_from_loading
        source = await load_newest(
            learner,
            self._source,
            may_set_aside=self._may_set_aside,
            # Which is no part of a checkpoint, but a check of it.
            exclude_of_own=(TOKENIZER,) if excluded(TOKENIZER, exclude) else (),
        )
        if source is not None:
            return source
        if self.plan.start.warmed_up is not None:
            await self._warm_up(learner, destination=self.plan.start.warmed_up)
        return None

    def _source(self) -> LoadSource | None:
        """The latest checkpoint of the run, or else what the config says."""
        folder, asked = self.folder.checkpoints, self.plan.source
        if self._began and self.config.trainer.checkpoint.saves:
            own = own_checkpoint(folder, num_steps=self.config.loop.num_steps)
            if own is not None:
                return asked if asked is not None and asked.path == own.path else own
        if asked is None or asked.path.is_dir():
            return asked
        return find_load_source(self.config.trainer.checkpoint, repairs=True)

    def _may_set_aside(self, source: LoadSource) -> bool:
        """Checkpoints of the run's own folder; others are somebody else's."""
        return self.config.trainer.checkpoint.saves and source.path.parent == self.folder.checkpoints

    def _tell_damaged(self) -> None:
        for name in sorted(self._names_of_damaged() - self._damaged):
            self.events("checkpoint_damaged", set_aside=name)
            self._damaged.add(name)

    def _names_of_damaged(self) -> set[str]:
        return {path.name for path in damaged_folders(self.folder.checkpoints)}

    def _told_damaged(self) -> set[str]:
        return {str(event.get("set_aside")) for event in read_events(self.folder.events)}

    def _go_back(self, source: LoadSource | None) -> None:
        position = None if source is None or not source.whole else source.position
        step = self._starts[-1]  # maybe of a checkpoint of another run, whose records are not these
        logger.info("going on after step %d", step)
        cut_back(
            metrics=self.folder.metrics,
            rollouts=self.folder.rollouts,
            position=position,
            # Else they are of steps that were not saved, and are written again as they were.
            keep_old=position is None and bool(damaged_folders(self.folder.checkpoints)),
        )
        self.events("went_back", to_step=step)

    def _loop(
        self,
        fleet: Fleet,
        learner: ActorLearner,
        *,
        metrics: MetricsWriter,
        sinks: RunSinks,
        state: LoopState | None,
        source: LoadSource | None,
    ) -> Loop:
        config, plan = self.config, self.plan
        told: list[Sink] = [metrics, sinks]
        in_folder = source is not None and source.path.parent == self.folder.checkpoints
        loop: Loop = config.loop.build(
            seams=self._seams(fleet, learner),
            renderer=plan.renderer,
            task=plan.task,
            max_sequence_tokens=config.generator.max_model_len,
            sinks=told if self.limits is None else [LimitSink(limits=self.limits, sinks=told)],
            checkpoints=StepCheckpoints(
                learner=learner,
                config=config.trainer.checkpoint,
                folder=str(self.folder.checkpoints),
                records=metrics,
                processes=ActorRandomStates([*fleet.generators, fleet.reward]),
                can_answer=partial(_can_answer, fleet.trainer),
                drawn_with=drawn_with(config),
                last_saved=state.position.step if state is not None and in_folder else None,
            ),
            seed=config.seed,
            recorder=Recorder(self.folder.rollouts, config=config.recorder),
            watch=sinks.watch,
            state=state,
            proximal_logprobs=uses_proximal_logprobs(config.trainer.loss),
            threads=plan.environments.threads,
            stop=self.stop,
        )
        return loop

    def _seams(self, fleet: Fleet, learner: ActorLearner) -> Seams:
        reward = self.config.reward
        return Seams(
            sampler=Router(
                [ActorSampler(generator) for generator in fleet.generators],
                strategy=self.config.router,
                pool=fleet.pool,
            ),
            learner=learner,
            publisher=ActorPublisher(
                trainer=fleet.trainer,
                generators=fleet.generators,
                store=fleet.store,
                check=fleet.check,
                pool=fleet.pool,
            ),
            scorer=ActorScorer(
                fleet.reward,
                num_procs=reward.num_procs,
                keep_groups=self.rubric.has_group_functions,
                longest_s=partial(
                    longest_s,
                    self.rubric,
                    time_limit_s=reward.time_limit_s,
                    max_concurrency=reward.max_concurrency,
                ),
            ),
        )

    async def _warm_up(self, learner: ActorLearner, *, destination: Path) -> None:
        """Supervised steps, kept as a Hugging Face folder; the trainer then starts from that folder,
        as every later run does."""
        config = self.config.warmup
        assert config is not None
        if not destination.exists():  # else a trainer that was lost since has made it
            warmup: SupervisedWarmup = config.build(
                learner=learner, renderer=self.plan.renderer, environments=self.plan.environments
            )
            with progress("warm-up", total=config.num_steps) as advance:
                await warmup.run(
                    self.plan.task.warmup_problems(seed=self.config.seed),
                    on_step=lambda loss: advance(note=f"loss {loss:.3f}"),
                )
            try:
                await learner.export_hf(str(destination), dtype="float32")
            except ActorCallError:
                # Another run with the same starting point may have finished its own first.
                if not destination.exists():
                    raise
        await learner.load_checkpoint(str(destination))
        logger.info("warmed up; starting from %s", destination)

    async def _export(self, learner: ActorLearner) -> None:
        checkpoint, folder = self.config.trainer.checkpoint, self.folder.checkpoints
        if checkpoint.exports:
            _remove_earlier(folder / HF_FOLDER)
            await learner.export_hf(str(folder / HF_FOLDER))
        if checkpoint.saves and has_lora(self.config.fleet):
            _remove_earlier(folder / ADAPTER_FOLDER)
            await learner.save_adapter(str(folder / ADAPTER_FOLDER))

    async def _draw(self) -> None:
        if self.config.loop.num_steps or self.config.loop.eval_every:
            # In a thread: to import matplotlib takes as long as to export.
            await asyncio.to_thread(draw_learning_curve, self.folder.metrics, self.folder.learning_curve)


def _state(source: LoadSource, config: RunConfig) -> LoopState | None:
    """Of the loop that saved it; None where the loop starts anew."""
    state = None if source.position is None else read_loop_state(source.path)
    if state is None:
        return None
    state = state.fit(drawn_with(config))
    if source.whole:
        return state
    # Another run's: this one has no record of its evaluation.
    keeps_random = not excluded(RANDOM, config.trainer.checkpoint.exclude_from_loading)
    return replace(
        state,
        position=replace(state.position, evaluated=False),
        random_states=state.random_states if keeps_random else {},
    )


def _remove_earlier(folder: Path) -> None:
    """What an earlier end of the run left; that of another run was refused before the start."""
    if folder.exists():
        remove(folder)


def _can_answer(trainer: Group, error: Exception) -> bool:
    """Whether the trainer may be asked for anything: its processes live, as far as they are on this host, and
    no deadline has passed for which it may be to blame."""
    processes: Mapping[int, ProcessId] = getattr(trainer, "processes", {})
    return all(map(is_alive, processes.values())) and not may_hang(trainer.name, after=error)


@asynccontextmanager
async def _last_save_ends(fleet: Fleet, *, background: bool) -> AsyncIterator[None]:
    """A run that ends before its last step lets its trainer finish the checkpoint that is written in the
    background."""
    try:
        yield
    except StopAskedError:
        if background:
            await fleet.trainer.call("finish_saving", limit="checkpoint_s")
        raise
    except Exception as error:
        if background and _can_answer(fleet.trainer, error):
            with suppress(RunError):  # the trainer itself may be what the run stops for
                await fleet.trainer.call("finish_saving", limit="checkpoint_s")
        raise
