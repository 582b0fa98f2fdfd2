"""The controller: checks a run's config, starts its actors, wires the loop, and ends everything.

It drives an ordinary Python loop in this process; the actors do the work in theirs.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from actors import launch
from actors.backend import ActorLearner, ActorPublisher, ActorSampler, ActorScorer
from actors.calls import ActorCallError, Timeouts
from actors.checks import (
    check_converters,
    check_demonstrations,
    check_end,
    check_layout,
    check_load_source,
    check_memory,
    check_reference_weights,
    check_task,
    has_lora,
)
from actors.fleet import Fleet, FleetConfig, LogSettings, close_fleet, num_gpus, start_fleet
from actors.generator import VLLMGenerator
from actors.reward import RewardActor
from actors.trainer import PolicyTrainer
from rl.config.configurable import HIDDEN, ONE_RUN, Configurable
from rl.config.registry import ResolvedRun
from rl.config.serialize import code_name, to_dict, write_json
from rl.config.tree import input_paths
from rl.distributed.seeds import check_seed
from rl.errors import RunError
from rl.loop import Seams, SyncLoop
from rl.models.spec import ModelSpec
from rl.observability.console import ConsoleSink, progress
from rl.observability.curve import write_learning_curve
from rl.observability.logs import setup_logging
from rl.observability.metrics import MetricsWriter, read_metrics
from rl.observability.run_folder import RunFolder
from rl.observability.summary import summary
from rl.rollouts.renderer import ChatRenderer
from rl.starting_point import StartingPoint, given_folder, random_model, warmed_up_model
from rl.step_checkpoints import StepCheckpoints
from rl.supervised import SupervisedWarmup
from rl.tasks.task import Task
from rl.training.checkpoint_config import LoadSource, find_load_source
from rl.training.checkpoint_files import ADAPTER_FOLDER, HF_FOLDER
from rl.training.experts import ExpertBalance
from rl.weights.files import check_unused, make_store
from rl.weights.store import WeightStore

logger = logging.getLogger(__name__)

STARTING_POINTS = "starting_points"
"""Folder inside the dump folder that keeps warmed-up models for later runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prepared:
    """What a run needs to start, checked."""

    start: StartingPoint
    source: LoadSource | None
    """What the trainer loads instead of the starting point's weights."""
    reference: Path | None
    """What the trainer loads into the reference policy, where that is not the starting point."""
    task: Task
    renderer: ChatRenderer

    def inputs(self, config: Controller.Config) -> dict[str, Path]:
        """Files and folders that the run reads, by the field that they come from."""
        paths = {field: path for field, path in input_paths(config).items() if field != "dump_folder"}
        return paths | ({} if self.reference is None else {"trainer.reference": self.reference})


class Controller(Configurable):
    """One run, from its config to its learning curve."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        name: str | None = field(default=None, metadata=ONE_RUN)
        """Folder of the run inside `dump_folder`; by default the config's name and a time stamp."""
        dump_folder: str = "outputs"
        """Where runs, and the starting points they share, are kept."""
        overwrite: bool = field(default=False, metadata=ONE_RUN)
        """Replace a folder of this name that an earlier run left."""
        description: str = ""
        """A line for the reader of config.json."""
        print_config: bool = False
        """Show the resolved config before the start."""
        console_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "WARNING"
        """Log records of the actors from this level up also go to the console."""
        seed: int = 0
        """Of the starting point, of the order of problems and of the sampling."""
        model: ModelSpec = field(metadata=HIDDEN)
        hf_assets_path: str | None = None
        """A Qwen3 folder of Hugging Face (config, tokenizer, safetensors) to start from, without
        warm-up; None makes the starting point here."""
        any_model_size: bool = False
        """Take the model's sizes from `hf_assets_path` rather than asking for those of this config."""
        task: Configurable.Config
        dataset: str | None = None
        """Name of a dataset; refused, because problems come from `task`."""
        dataset_path: str | None = None
        """Folder of a dataset; refused, because problems come from `task`."""
        warmup: SupervisedWarmup.Config | None = None
        """Supervised steps that make the starting point; its result is kept for later runs."""
        trainer: PolicyTrainer.Config
        generator: VLLMGenerator.Config
        reward: RewardActor.Config = field(default_factory=RewardActor.Config)
        weights: WeightStore.Config = field(default_factory=WeightStore.Config)
        loop: SyncLoop.Config = field(default_factory=SyncLoop.Config)
        timeouts: Timeouts = field(default_factory=Timeouts)

        def __post_init__(self) -> None:
            check_seed(self.seed)
            for field_name, value in (("dataset", self.dataset), ("dataset_path", self.dataset_path)):
                if value is not None:
                    raise ValueError(
                        f"{field_name}={value!r}: must be None, as problems come from the config's task: "
                        "choose one by --module and --config, or write one (docs/extending.md)"
                    )
            if self.name == STARTING_POINTS:
                raise ValueError(
                    f"name={self.name!r} is the folder of the starting points that runs share: choose another"
                )

        @property
        def fleet(self) -> FleetConfig:
            return FleetConfig(
                trainer=self.trainer,
                generator=self.generator,
                reward=self.reward,
                timeouts=self.timeouts,
            )

    def __init__(self, *, config: Config, run: ResolvedRun) -> None:
        """`run` is where the config came from; it is written beside the results."""
        self.config = config
        self.source = run

    def run(self) -> Path:
        """Run to the end; returns the run's folder.

        Raises:
            ValueError: the config cannot run; nothing was started or written, and an earlier run
                of that name is as it was.
            RunError: the run stopped; its folder says so.
        """
        config = self.config
        prepared = self._prepare()
        resolved = to_dict(config)
        name = config.name or f"{self.source.module.replace('.', '-')}-{self.source.function}"
        with RunFolder.create(
            config.dump_folder,
            name,
            time_stamp=config.name is None,
            overwrite=config.overwrite,
            inputs=prepared.inputs(config),
            checkpoints=config.trainer.checkpoint.shared_folder,
        ) as folder:
            try:
                write_json(self.source, folder.config_json)
                prepared.start.make()
            except BaseException:
                folder.discard()
                raise
            if config.print_config:
                print(json.dumps(resolved, indent=2))
            print(f"run folder: {folder.path}", flush=True)
            undo_logging = setup_logging("controller", folder=folder.logs, console_level=config.console_level)
            try:
                logger.info("config %s.%s", self.source.module, self.source.function)
                logger.info("starting from %s", prepared.start.folder)
                self._run(folder, prepared)
                logger.info("finished")
            finally:
                undo_logging()
        return folder.path

    def _run(self, folder: RunFolder, prepared: _Prepared) -> None:
        config = self.config
        store = make_store(config.weights, dtype=config.generator.dtype, run_folder=folder.path)
        try:
            launch.run(self._main(folder, prepared, store))
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

    def _prepare(self) -> _Prepared:
        """Check all that can be checked without starting or writing anything."""
        config = self.config
        task: Task = config.task.build()
        source = find_load_source(config.trainer.checkpoint)
        start = self._starting_point(task, source)
        check_load_source(
            source,
            fleet=config.fleet,
            model_spec=start.spec,
            num_steps=config.loop.num_steps,
            num_gpus=num_gpus(),
        )
        check_layout(config.fleet, model_spec=start.spec, loop=config.loop, num_gpus=num_gpus())
        check_converters(config.fleet, model_spec=start.spec, num_gpus=num_gpus())
        reference = check_reference_weights(source, start=start, fleet=config.fleet, num_gpus=num_gpus())
        check_end(config.fleet, warms_up=config.warmup is not None)
        check_unused(config.weights)
        if num_gpus() == 0:
            memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            check_memory(config.fleet, model_spec=start.spec, memory_bytes=memory_bytes)
        tokenizer, stop_ids = start.tokenizer()
        renderer = ChatRenderer(
            tokenizer=tokenizer,
            max_prompt_tokens=config.generator.max_model_len - config.loop.sampling.max_tokens,
            stop_token_ids=stop_ids,
        )
        check_task(task, renderer=renderer, seed=config.seed, time_limit_s=config.reward.time_limit_s)
        if start.warmed_up is not None:
            check_demonstrations(
                task, renderer=renderer, seed=config.seed, max_tokens=config.loop.sampling.max_tokens
            )
        return _Prepared(start=start, source=source, reference=reference, task=task, renderer=renderer)

    def _starting_point(self, task: Task, source: LoadSource | None) -> StartingPoint:
        config = self.config
        if config.hf_assets_path is not None:
            return given_folder(config.hf_assets_path, spec=config.model, any_size=config.any_model_size)
        cache = Path(config.dump_folder).expanduser().absolute() / STARTING_POINTS
        starts_here = source is None or source.needs_start(reference=config.trainer.reference.enable)
        if config.warmup is None or not starts_here:
            return random_model(cache, spec=config.model, seed=config.seed)
        return warmed_up_model(
            cache,
            spec=config.model,
            seed=config.seed,
            warmup=config.warmup,
            demonstrations=task.warmup_problems(seed=config.seed),
            arithmetic=warmup_arithmetic(config.trainer),
        )

    async def _main(self, folder: RunFolder, prepared: _Prepared, store: WeightStore) -> None:
        started = time.monotonic()
        config = self.config
        start, task, renderer = prepared.start, prepared.task, prepared.renderer
        with progress("starting the actors (import, load, compile)"):
            fleet = await start_fleet(
                config.fleet,
                store=store,
                model_spec=start.spec,
                hf_assets_path=str(start.folder),
                rubric=task.rubric(seed=config.seed),
                failure_folder=folder.path,
                logs=LogSettings(folder=folder.logs, console_level=config.console_level),
            )
        learner = ActorLearner(fleet.trainer)
        source = prepared.source
        if start.warmed_up is not None:
            await self._warm_up(learner, renderer=renderer, task=task, destination=start.warmed_up)
        if source is not None:
            version = await learner.load_checkpoint(str(source.path), model_only=source.model_only)
            logger.info("loaded %s, policy version %d", source.path, version)
        with MetricsWriter(folder.metrics) as metrics:
            loop: SyncLoop = config.loop.build(
                seams=self._seams(fleet, learner),
                renderer=renderer,
                train_problems=task.train_problems(seed=config.seed),
                eval_problems=task.eval_problems(),
                sinks=[metrics, ConsoleSink()],
                checkpoints=StepCheckpoints(
                    learner=learner, config=config.trainer.checkpoint, folder=str(folder.checkpoints)
                ),
                seed=config.seed,
                watch=progress,
                position=None if source is None else source.position,
            )
            async with _last_save_ends(fleet, background=config.trainer.checkpoint.async_mode != "disabled"):
                await loop.run()
        if config.trainer.checkpoint.exports:
            await learner.export_hf(str(folder.checkpoints / HF_FOLDER))
        if config.trainer.checkpoint.saves and has_lora(config.fleet):
            await learner.save_adapter(str(folder.checkpoints / ADAPTER_FOLDER))
        if config.loop.num_steps or config.loop.eval_every:
            write_learning_curve(folder.metrics, folder.learning_curve)
        folder.mark_finished()
        run_s = time.monotonic() - started
        print(summary(read_metrics(folder.metrics), folder=folder, run_s=run_s), flush=True)
        await close_fleet(fleet)

    def _seams(self, fleet: Fleet, learner: ActorLearner) -> Seams:
        return Seams(
            sampler=ActorSampler(fleet.generator),
            learner=learner,
            publisher=ActorPublisher(trainer=fleet.trainer, generator=fleet.generator, store=fleet.store),
            scorer=ActorScorer(fleet.reward, num_procs=self.config.reward.num_procs),
        )

    async def _warm_up(
        self, learner: ActorLearner, *, renderer: ChatRenderer, task: Task, destination: Path
    ) -> None:
        """Supervised steps, kept as a Hugging Face folder; the trainer then starts from that folder,
        as every later run does."""
        config = self.config.warmup
        assert config is not None
        warmup: SupervisedWarmup = config.build(learner=learner, renderer=renderer)
        with progress("warm-up", total=config.num_steps) as advance:
            await warmup.run(
                task.warmup_problems(seed=self.config.seed),
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


def warmup_arithmetic(trainer: PolicyTrainer.Config) -> dict[str, Any]:
    """What of the trainer shapes the steps of the warm-up, whose own settings bring the rest.

    Of a subclass nobody here knows what its fields do, so all that it adds are part of it.
    """
    training = trainer.training
    arithmetic: dict[str, Any] = {
        "trainer": code_name(trainer.owner),
        "optimizer": [trainer.optimizer.name, trainer.optimizer.eps],
        "dtypes": [training.dtype, training.param_dtype, training.reduce_dtype],
    }
    if trainer.converters:
        arithmetic["converters"] = to_dict(trainer)["converters"]
    if trainer.experts != ExpertBalance.Config():
        arithmetic["experts"] = to_dict(trainer.experts)
    known = {f.name for f in fields(PolicyTrainer.Config)}
    added = {name: value for name, value in to_dict(trainer).items() if name not in known}
    return arithmetic | ({"added": added} if added else {})


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
