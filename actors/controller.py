"""The controller: checks a run's config, starts its actors, wires the loop, and ends everything.

It drives an ordinary Python loop in this process; the actors do the work in theirs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from actors import launch
from actors.backend import ActorLearner, ActorPublisher, ActorSampler, ActorScorer
from actors.calls import ActorCallError
from actors.checks import (
    has_lora,
)
from actors.fleet import Fleet, close_fleet, place_fleet, start_fleet
from actors.hosts import describe
from actors.plan import Plan, make_plan
from actors.roles import LogSettings, num_gpus
from actors.router import Router
from actors.run_config import RunConfig
from actors.sync_check import SyncCheck
from actors.temporary_files import temporary_files
from losses.types import uses_proximal_logprobs
from rl.config.configurable import Configurable
from rl.config.registry import ResolvedRun
from rl.config.serialize import to_dict, write_json
from rl.errors import RunError, writing
from rl.loop import Loop, Seams
from rl.observability.console import ConsoleSink, progress, say
from rl.observability.curve import draw_learning_curve
from rl.observability.logs import setup_logging
from rl.observability.metrics import MetricsWriter, read_metrics
from rl.observability.recorder import Recorder
from rl.observability.run_folder import RunFolder
from rl.observability.summary import summary
from rl.rollouts.rubric import Rubric
from rl.rollouts.scoring import longest_s
from rl.step_checkpoints import StepCheckpoints
from rl.supervised import SupervisedWarmup
from rl.training.checkpoint_files import ADAPTER_FOLDER, HF_FOLDER
from rl.training.errors import unwritten
from rl.weights.files import make_store
from rl.weights.store import WeightStore

logger = logging.getLogger(__name__)


class Controller(Configurable):
    """One run, from its config to its learning curve."""

    @dataclass(kw_only=True, slots=True)
    class Config(RunConfig):
        """Its fields are those of `RunConfig`."""

    def __init__(self, *, config: Config, run: ResolvedRun) -> None:
        """`run` is where the config came from; it is written beside the results."""
        self.config = config
        self.source = run

    def run(self) -> Path:
        """Run to the end; returns the run's folder, or the one it would be in if `launch.dry_run`.

        Raises:
            ValueError: the config cannot run; nothing was started or written, and an earlier run
                of that name is as it was.
            RunError: the run stopped; its folder says so, or is not there where it could not be begun.
        """
        config = self.config
        plan = make_plan(config)
        if config.launch.dry_run:
            print(describe(config.launch, place_fleet(config.fleet, num_gpus=num_gpus())), flush=True)
            return Path(config.dump_folder)
        resolved = to_dict(config)
        name = config.name or f"{self.source.module.replace('.', '-')}-{self.source.function}"
        with RunFolder.create(
            config.dump_folder,
            name,
            time_stamp=config.name is None,
            overwrite=config.overwrite,
            inputs=plan.inputs(config),
            checkpoints=config.trainer.checkpoint.shared_folder,
        ) as folder:
            try:
                with writing(folder.config_json):
                    write_json(self.source, folder.config_json)
                with unwritten(str(plan.start.folder)):
                    plan.start.make()
            except BaseException:
                folder.discard()
                raise
            if config.print_config:
                say(json.dumps(resolved, indent=2))
            say(f"run folder: {folder.path}")
            undo_logging = setup_logging("controller", folder=folder.logs, console_level=config.console_level)
            try:
                logger.info("config %s.%s", self.source.module, self.source.function)
                logger.info("starting from %s", plan.start.folder)
                self._run(folder, plan)
                logger.info("finished")
            finally:
                undo_logging()
        return folder.path

    def _run(self, folder: RunFolder, plan: Plan) -> None:
        config = self.config
        store = make_store(config.weights, dtype=config.generator.dtype, run_folder=folder.path)
        try:
            # A folder of this machine; hosts elsewhere have none of that name.
            with nullcontext() if config.launch.on_cluster else temporary_files():
                launch.run(self._main(folder, plan, store))
        except BaseException as error:
            # For the log, with its traceback; the console gets the message from the entry.
            logger.info("the run stopped: %s", type(error).__name__, exc_info=True)
            if not isinstance(error, ValueError) or isinstance(error, RunError):
                raise
            # Only before the start does a ValueError mean a config that cannot run.
            stopped = RunError(str(error))
            stopped.where = ", ".join(getattr(error, "__notes__", ()))
            raise stopped from error
        finally:
            store.discard()

    async def _main(self, folder: RunFolder, plan: Plan, store: WeightStore) -> None:
        started = time.monotonic()
        config = self.config
        start, task, renderer = plan.start, plan.task, plan.renderer
        rubric = task.rubric(seed=config.seed)
        with progress("starting the actors (import, load, compile)"):
            fleet = await start_fleet(
                config.fleet,
                store=store,
                check=SyncCheck(
                    plan.canary,
                    drains=config.loop.max_policy_age > 0 and config.generator.on_update == "drain",
                ),
                model_spec=start.spec,
                hf_assets_path=str(start.folder),
                rubric=rubric,
                failure_folder=folder.path,
                logs=LogSettings(folder=folder.logs, console_level=config.console_level),
            )
        learner = ActorLearner(fleet.trainer)
        source = plan.source
        if start.warmed_up is not None:
            await self._warm_up(learner, plan, destination=start.warmed_up)
        if source is not None:
            version = await learner.load_checkpoint(str(source.path), model_only=source.model_only)
            logger.info("loaded %s, policy version %d", source.path, version)
        with MetricsWriter(folder.metrics) as metrics:
            loop: Loop = config.loop.build(
                seams=self._seams(fleet, learner, rubric=rubric),
                renderer=renderer,
                task=task,
                max_sequence_tokens=config.generator.max_model_len,
                sinks=[metrics, ConsoleSink()],
                checkpoints=StepCheckpoints(
                    learner=learner, config=config.trainer.checkpoint, folder=str(folder.checkpoints)
                ),
                seed=config.seed,
                recorder=Recorder(folder.rollouts, config=config.recorder),
                watch=progress,
                position=None if source is None else source.position,
                proximal_logprobs=uses_proximal_logprobs(config.trainer.loss),
                threads=plan.environments.threads,
            )
            async with _last_save_ends(fleet, background=config.trainer.checkpoint.async_mode != "disabled"):
                await loop.run()
        await asyncio.gather(self._export(learner, folder), self._draw(folder))
        folder.mark_finished()
        run_s = time.monotonic() - started
        say(summary(read_metrics(folder.metrics), folder=folder, run_s=run_s))
        await close_fleet(fleet)

    async def _export(self, learner: ActorLearner, folder: RunFolder) -> None:
        if self.config.trainer.checkpoint.exports:
            await learner.export_hf(str(folder.checkpoints / HF_FOLDER))
        if self.config.trainer.checkpoint.saves and has_lora(self.config.fleet):
            await learner.save_adapter(str(folder.checkpoints / ADAPTER_FOLDER))

    async def _draw(self, folder: RunFolder) -> None:
        if self.config.loop.num_steps or self.config.loop.eval_every:
            # In a thread: to import matplotlib takes as long as to export.
            await asyncio.to_thread(draw_learning_curve, folder.metrics, folder.learning_curve)

    def _seams(self, fleet: Fleet, learner: ActorLearner, *, rubric: Rubric) -> Seams:
        return Seams(
            sampler=Router(
                [ActorSampler(generator) for generator in fleet.generators], strategy=self.config.router
            ),
            learner=learner,
            publisher=ActorPublisher(
                trainer=fleet.trainer, generators=fleet.generators, store=fleet.store, check=fleet.check
            ),
            scorer=ActorScorer(
                fleet.reward,
                num_procs=self.config.reward.num_procs,
                keep_groups=rubric.has_group_functions,
                longest_s=partial(
                    longest_s,
                    rubric,
                    time_limit_s=self.config.reward.time_limit_s,
                    max_concurrency=self.config.reward.max_concurrency,
                ),
            ),
        )

    async def _warm_up(self, learner: ActorLearner, plan: Plan, *, destination: Path) -> None:
        """Supervised steps, kept as a Hugging Face folder; the trainer then starts from that folder,
        as every later run does."""
        config = self.config.warmup
        assert config is not None
        warmup: SupervisedWarmup = config.build(
            learner=learner, renderer=plan.renderer, environments=plan.environments
        )
        with progress("warm-up", total=config.num_steps) as advance:
            await warmup.run(
                plan.task.warmup_problems(seed=self.config.seed),
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


@asynccontextmanager
async def _last_save_ends(fleet: Fleet, *, background: bool) -> AsyncIterator[None]:
    """A run that an error stops lets its trainer finish the checkpoint that is written in the background."""
    try:
        yield
    except RunError:
        if background:
            with suppress(RunError):  # the trainer itself may be what the run stops for
                await fleet.trainer.call("finish_saving", limit="checkpoint_s")
        raise
