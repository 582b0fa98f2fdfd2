"""The controller: checks a run's config, starts its actors, wires the loop, and ends everything.

It drives an ordinary Python loop in this process; the actors do the work in theirs.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from actors import launch
from actors.backend import ActorLearner, ActorPublisher, ActorSampler, ActorScorer
from actors.calls import Timeouts
from actors.checks import check_layout, check_task
from actors.fleet import Fleet, FleetConfig, LogSettings, close_fleet, num_gpus, start_fleet
from actors.generator import VLLMGenerator
from actors.reward import RewardActor
from actors.trainer import PolicyTrainer
from rl.config.configurable import HIDDEN, Configurable
from rl.config.registry import ResolvedRun
from rl.config.serialize import to_dict, write_json
from rl.loop import Seams, SyncLoop
from rl.models.spec import ModelSpec
from rl.models.tokenizer import load_tokenizer, stop_token_ids
from rl.observability.console import ConsoleSink, progress
from rl.observability.curve import write_learning_curve
from rl.observability.logs import setup_logging
from rl.observability.metrics import MetricsWriter
from rl.observability.run_folder import RunFolder
from rl.rollouts.renderer import ChatRenderer
from rl.starting_point import StartingPoint, given_folder, made_here
from rl.supervised import SupervisedWarmup
from rl.tasks.task import Task
from rl.weights.store import WeightStore

logger = logging.getLogger(__name__)

STARTING_POINTS = "starting_points"
"""Folder inside the dump folder that keeps warmed-up models for later runs."""


class Controller(Configurable):
    """One run, from its config to its learning curve."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        name: str | None = None
        """Folder of the run inside `dump_folder`; by default the config's name and a time stamp."""
        dump_folder: str = "outputs"
        """Where runs, and the starting points they share, are kept."""
        overwrite: bool = False
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
        warmup: SupervisedWarmup.Config | None = None
        """Supervised steps that make the starting point; its result is kept for later runs."""
        trainer: PolicyTrainer.Config
        generator: VLLMGenerator.Config
        reward: RewardActor.Config = field(default_factory=RewardActor.Config)
        weights: WeightStore.Config = field(default_factory=WeightStore.Config)
        loop: SyncLoop.Config = field(default_factory=SyncLoop.Config)
        timeouts: Timeouts = field(default_factory=Timeouts)

        @property
        def fleet(self) -> FleetConfig:
            return FleetConfig(
                trainer=self.trainer,
                generator=self.generator,
                reward=self.reward,
                weights=self.weights,
                timeouts=self.timeouts,
            )

    def __init__(self, *, config: Config, run: ResolvedRun) -> None:
        """`run` is where the config came from; it is written beside the results."""
        self.config = config
        self.source = run

    def run(self) -> Path:
        """Run to the end; returns the run's folder.

        Raises:
            ValueError: the config cannot run; nothing was started, and no folder is left.
        """
        config = self.config
        spec = self._check_model()
        name = config.name or f"{self.source.module.replace('.', '-')}-{self.source.function}"
        folder = RunFolder.create(
            config.dump_folder, name, time_stamp=config.name is None, overwrite=config.overwrite
        )
        with folder:
            write_json(self.source, folder.config_json)
            undo_logging = setup_logging("controller", folder=folder.logs, console_level=config.console_level)
            try:
                start, task, renderer = self._prepare(spec)
            except ValueError:
                folder.discard()
                raise
            if config.print_config:
                print(json.dumps(to_dict(config), indent=2))
            print(f"run folder: {folder.path}", flush=True)
            logger.info("%s.%s starts from %s", self.source.module, self.source.function, start.folder)
            try:
                launch.run(self._main(folder, start=start, task=task, renderer=renderer))
            except Exception:
                logger.exception("the run failed")
                raise
            else:
                folder.mark_finished()
                logger.info("finished")
            finally:
                undo_logging()
        return folder.path

    def _check_model(self) -> ModelSpec:
        """The model's spec, from the given folder where there is one, checked against the layout."""
        config = self.config
        spec = config.model
        if config.hf_assets_path is not None:
            spec = given_folder(config.hf_assets_path, spec=spec, any_size=config.any_model_size).spec
        check_layout(config.fleet, model_spec=spec, loop=config.loop, num_gpus=num_gpus())
        return spec

    def _prepare(self, spec: ModelSpec) -> tuple[StartingPoint, Task, ChatRenderer]:
        """Where weights and tokenizer come from, and the task, checked with that tokenizer."""
        config = self.config
        if config.hf_assets_path is not None:
            start = StartingPoint(folder=Path(config.hf_assets_path), warmed_up=None, spec=spec)
        else:
            start = made_here(
                Path(config.dump_folder).expanduser().absolute() / STARTING_POINTS,
                spec=spec,
                task=config.task,
                warmup=config.warmup,
                seed=config.seed,
            )
        room = config.generator.max_model_len - config.loop.sampling.max_tokens
        tokenizer = load_tokenizer(start.folder)
        renderer = ChatRenderer(
            tokenizer=tokenizer,
            max_prompt_tokens=room,
            stop_token_ids=stop_token_ids(start.folder, tokenizer=tokenizer),
        )
        task: Task = config.task.build()
        check_task(task, renderer=renderer, time_limit_s=config.reward.time_limit_s)
        return start, task, renderer

    async def _main(
        self, folder: RunFolder, *, start: StartingPoint, task: Task, renderer: ChatRenderer
    ) -> None:
        config = self.config
        with progress("starting the actors (import, load, compile)"):
            fleet = await start_fleet(
                config.fleet,
                model_spec=start.spec,
                hf_assets_path=str(start.folder),
                rubric=task.rubric(),
                failure_folder=folder.path,
                logs=LogSettings(folder=folder.logs, console_level=config.console_level),
            )
        learner = ActorLearner(fleet.trainer)
        if start.warmed_up is not None:
            await self._warm_up(learner, renderer=renderer, task=task, destination=start.warmed_up)
        with MetricsWriter(folder.metrics) as metrics:
            loop: SyncLoop = config.loop.build(
                seams=self._seams(fleet, learner),
                renderer=renderer,
                train_problems=task.train_problems(seed=config.seed),
                eval_problems=task.eval_problems(),
                sinks=[metrics, ConsoleSink()],
                checkpoint_folder=str(folder.checkpoints),
                seed=config.seed,
            )
            await loop.run()
        await learner.export_hf(str(folder.checkpoints / "hf"))
        write_learning_curve(folder.metrics, folder.learning_curve)
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
        await learner.export_hf(str(destination))
        await learner.load_checkpoint(str(destination))
