"""Training on the actors of a run, from its starting weights to its end, through losses of the
trainer.

    load     the run's latest checkpoint, or what the config starts from (starting_weights.py)
    loop     from the state in that checkpoint
    export   Hugging Face folder, adapter, learning curve

After the loss of the trainer all of this begins again, with the same generators; a resumed run does
the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from actors.backend import TrainerClient
from actors.calls import may_hang
from actors.checks import has_lora
from actors.recovery import Role
from actors.run import Run
from actors.starting_weights import load_start
from losses.types import uses_proximal_logprobs
from rl.config.json import to_dict
from rl.loop.loop import Loop, RolloutSetup
from rl.loop.state import StepCheckpoints
from rl.loop.stop_request import StopRequest
from rl.observability.events import read_events
from rl.observability.machine import LimitSink
from rl.observability.metrics import MetricsWriter, Sink, cut_back, draw_learning_curve
from rl.observability.recorder import Recorder
from rl.observability.sinks import RunSinks, open_sinks
from rl.training.checkpoint_config import LoadSource, find_load_source, own_checkpoint
from rl.training.checkpoint_files import ADAPTER_FOLDER, HF_FOLDER, damaged_folders
from rl.types import LoopPosition
from rl.utils.errors import RunError, StopRequestedError
from rl.utils.files import remove

logger = logging.getLogger(__name__)


class Training:
    """The training of one run: attempts from the latest checkpoint until one of them ends."""

    def __init__(self, run: Run, *, stop: StopRequest) -> None:
        """`stop` asks the loop to end between two steps."""
        self.run_of_actors = run
        self.config, self.plan, self.folder = run.config, run.plan, run.folder
        self.stop = stop
        self._has_begun = self.plan.resumed is not None or self.folder.metrics.exists()
        """True if the folder may hold records of this run."""
        self._starts: list[int] = []
        """Step after which each attempt began."""
        self._damaged = {event.get("set_aside") for event in read_events(self.folder.events)}
        """Names of the folders that were set aside and reported."""

    async def run(self) -> None:
        """Train to the end; raise StopRequestedError if the run was asked to stop, RunError if it
        cannot go on.
        """
        async with open_sinks(
            self.config.sinks,
            folder=self.folder.path,
            title=self.folder.path.name,
            num_steps=self.config.loop.num_steps,
            settings=to_dict(self.config),
        ) as sinks:
            while True:
                try:
                    await self._attempt(sinks)
                    return
                except RunError as error:
                    if self.stop.was_asked:
                        raise
                    # Attempts that begin at the same step made no progress between their losses.
                    from_here = self._starts.count(self._starts[-1]) if self._starts else 1
                    await self.run_of_actors.cluster.restart_trainer(error, at_least=from_here)
                    logger.warning(
                        "the trainer is there again; the run goes back to its last checkpoint"
                    )

    async def _attempt(self, sinks: RunSinks) -> None:
        run, trainer = self.run_of_actors, self.run_of_actors.trainer
        source = await load_start(
            trainer,
            config=self.config,
            plan=self.plan,
            find=self._find,
            may_set_aside=self._may_set_aside,
        )
        position = None if source is None else _position(source)
        self._starts.append(0 if position is None else position.step)
        self._report_damaged()
        if self._has_begun:
            self._go_back(source)
        self._has_begun = True
        with MetricsWriter(self.folder.metrics) as metrics, sinks.attempt():
            loop = self._loop(metrics=metrics, sinks=sinks, position=position, source=source)
            in_background = self.config.trainer.checkpoint.async_mode != "disabled"
            async with _last_save_ends(run, in_background=in_background):
                await run.cluster.while_trainer_lives(loop.run())
        ends = [self._export(trainer)]
        if self.config.loop.num_steps or self.config.loop.eval_every:
            # In a thread: importing matplotlib takes as long as the export.
            draws = asyncio.to_thread(
                draw_learning_curve, self.folder.metrics, self.folder.learning_curve
            )
            ends.append(draws)
        await asyncio.gather(*ends)

    def _find(self) -> LoadSource | None:
        """Return the latest checkpoint of the run, or else the one of the config."""
        folder, asked = self.folder.checkpoints, self.plan.source
        if self._has_begun and self.config.trainer.checkpoint.saves:
            own = own_checkpoint(folder, num_steps=self.config.loop.num_steps)
            if own is not None:
                return asked if asked is not None and asked.path == own.path else own
        if asked is None or asked.path.is_dir():
            return asked
        return find_load_source(self.config.trainer.checkpoint, repairs=True)

    def _may_set_aside(self, source: LoadSource) -> bool:
        """Return whether a damaged checkpoint is in the run's own folder; others belong to other
        runs.
        """
        return (
            self.config.trainer.checkpoint.saves and source.path.parent == self.folder.checkpoints
        )

    def _report_damaged(self) -> None:
        for path in damaged_folders(self.folder.checkpoints):
            if path.name not in self._damaged:
                self._damaged.add(path.name)
                self.run_of_actors.events.add("checkpoint_damaged", set_aside=path.name)

    def _go_back(self, source: LoadSource | None) -> None:
        """Drop the records of steps after the checkpoint."""
        position = None if source is None or not source.whole else source.position
        step = self._starts[
            -1
        ]  # may be of another run's checkpoint, which the records do not belong to
        logger.info("going on after step %d", step)
        cut_back(metrics=self.folder.metrics, rollouts=self.folder.rollouts, position=position)
        self.run_of_actors.events.add("went_back", to_step=step)

    def _loop(
        self,
        *,
        metrics: MetricsWriter,
        sinks: RunSinks,
        position: LoopPosition | None,
        source: LoadSource | None,
    ) -> Loop:
        config, plan, run = self.config, self.plan, self.run_of_actors
        outputs: list[Sink] = [metrics, sinks]
        in_folder = source is not None and source.path.parent == self.folder.checkpoints
        loop: Loop = config.loop.build(
            trainer=run.trainer,
            publisher=run.publisher,
            rollouts=RolloutSetup(
                generator=run.generator,
                rewarder=run.rewarder,
                renderer=plan.renderer,
                task=plan.task,
                max_sequence_tokens=config.generator.max_model_len,
                seed=config.seed,
                thread=plan.environments.thread,
            ),
            sinks=outputs if run.limits is None else [LimitSink(limits=run.limits, sinks=outputs)],
            checkpoints=StepCheckpoints(
                trainer=run.trainer,
                config=config.trainer.checkpoint,
                folder=str(self.folder.checkpoints),
                records=metrics,
                can_answer=partial(_can_answer, run.cluster.trainer),
                problems=plan.problems,
                last_saved=position.step if position is not None and in_folder else None,
            ),
            recorder=Recorder(self.folder.rollouts, config=config.recorder),
            watch=sinks.console.watch,
            position=position,
            proximal_logprobs=uses_proximal_logprobs(config.trainer.loss),
            stop=self.stop,
        )
        return loop

    async def _export(self, trainer: TrainerClient) -> None:
        checkpoint, folder = self.config.trainer.checkpoint, self.folder.checkpoints
        exports: list[tuple[Path, Callable[[str], Awaitable[None]]]] = []
        if checkpoint.exports:
            exports.append((folder / HF_FOLDER, trainer.export_hf))
        if checkpoint.saves and has_lora(self.config):
            exports.append((folder / ADAPTER_FOLDER, trainer.save_adapter))
        for path, export in exports:
            if (
                path.exists()
            ):  # of this run's earlier end: another run's was refused before the start
                remove(path)
            await export(str(path))


def _position(source: LoadSource) -> LoopPosition | None:
    """Return the position of the loop that saved the checkpoint, or None."""
    if source.position is None or source.whole:
        return source.position
    # The checkpoint is another run's: this run has no record of its evaluation.
    return replace(source.position, evaluated=False)


def _can_answer(trainer: Role, error: Exception) -> bool:
    """Return whether a call to the trainer makes sense: no process of this host is dead and none
    may hang.
    """
    return not trainer.group.dead() and not may_hang(trainer.name, after=error)


@asynccontextmanager
async def _last_save_ends(run: Run, *, in_background: bool) -> AsyncIterator[None]:
    """Let the trainer finish a background save before a run ends early."""
    try:
        yield
    except Exception as error:
        is_stop = isinstance(error, StopRequestedError)
        if in_background and (is_stop or _can_answer(run.cluster.trainer, error)):
            # The trainer itself may be the reason of another end.
            with nullcontext() if is_stop else suppress(RunError):
                await run.trainer.finish_saving()
        raise
