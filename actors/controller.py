"""The controller: checks a run's config, starts its actors, trains, and ends everything.

It drives an ordinary Python loop in this process; the actors do the work in theirs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from actors import launch
from actors.attempt import Training
from actors.fleet import Fleet, close_fleet, place_fleet, start_fleet
from actors.hosts import describe
from actors.limits import run_limits
from actors.loading import check_resumes, check_unfinished
from actors.plan import Plan, make_plan
from actors.roles import LogSettings, num_gpus
from actors.run_config import RunConfig
from actors.sync_check import SyncCheck
from actors.temporary_files import temporary_files
from actors.watching import draw_timeline, watched_controller
from rl.config.changes import changed_fields
from rl.config.configurable import Configurable
from rl.config.registry import ExplanationForm, ResolvedRun
from rl.config.serialize import to_dict, write_json
from rl.errors import RunError, writing
from rl.folder_lock import having
from rl.observability.console import progress, say
from rl.observability.environment import write_environment
from rl.observability.events import Events
from rl.observability.logs import setup_logging
from rl.observability.metrics import read_metrics
from rl.observability.run_folder import RunFolder
from rl.observability.summary import summary
from rl.rollouts.rubric import Rubric
from rl.stop_request import StopRequest
from rl.training.checkpoint_config import CheckpointConfig
from rl.training.checkpoint_files import saved_steps
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
        if config.launch.dry_run:
            make_plan(config)
            print(describe(config.launch, place_fleet(config.fleet, num_gpus=num_gpus())), flush=True)
            return Path(config.dump_folder)
        with _only_saver(config.trainer.checkpoint):
            return self._start() if self.source.resumes is None else self._resume(self.source.resumes)

    def _start(self) -> Path:
        """As `run`, of a new one."""
        config = self.config
        plan = make_plan(config)
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
                self._write_start(folder, plan)
            except BaseException:
                folder.discard()
                raise
            self._run_in(folder, plan)
        return folder.path

    def explain(self, form: ExplanationForm) -> int:
        """Print what the run would be, and what is refused of it; returns the exit status (docs/explain.md).

        Nothing is started or written.
        """
        from actors.explain.explain import show
        from actors.explain.machine import Machine

        return show(self.source, form=form, here=Machine.here())

    def _resume(self, path: Path) -> Path:
        """As `run`, of a run that has ended before its last step."""
        config = self.config
        with RunFolder.resume(path, checkpoints=config.trainer.checkpoint.shared_folder) as folder:
            check_unfinished(folder, num_steps=config.loop.num_steps)
            changes = changed_fields(folder.config_json, config)
            undo_logging = setup_logging("controller", folder=folder.logs, console_level=config.console_level)
            try:
                plan = make_plan(config, resumes=folder.checkpoints)
                check_resumes(plan.resumed, folder=folder, num_steps=config.loop.num_steps)
            finally:
                undo_logging()
            self._write_start(folder, plan)
            folder.reopen()
            self._run_in(folder, plan, changes=changes)
        return folder.path

    def _write_start(self, folder: RunFolder, plan: Plan) -> None:
        with writing(folder.config_json):
            write_json(self.source, folder.config_json)
        with unwritten(str(plan.start.folder)):
            plan.start.make()

    def _run_in(self, folder: RunFolder, plan: Plan, *, changes: Sequence[str] = ()) -> None:
        """`changes` are said of fields that differ from those of the run until now."""
        config = self.config
        if config.print_config:
            say(json.dumps(to_dict(config), indent=2))
        say(f"run folder: {folder.path}")
        undo_logging = setup_logging("controller", folder=folder.logs, console_level=config.console_level)
        try:
            logger.info("config %s.%s", self.source.module, self.source.function)
            for change in changes:
                logger.info("changed: %s", change)
                say(f"changed: {change}")
            resumed_after = None
            if self.source.resumes is not None:
                position = None if plan.resumed is None else plan.resumed.position
                resumed_after = 0 if position is None else position.step
                say(
                    f"going on after step {resumed_after}"
                    if position is not None
                    else "starting from the beginning: there is no checkpoint to go on from"
                )
            logger.info("starting from %s", plan.start.folder)
            write_environment(folder.environment)
            events = Events(folder.events)
            with watched_controller(
                folder.logs, events, timeline=config.timeline, resumed_after=resumed_after
            ):
                self._run(folder, plan, events)
            logger.info("finished")
        except BaseException:
            draw_timeline(folder, config.timeline)  # of a run that is looked at for its end
            raise
        finally:
            undo_logging()

    def _run(self, folder: RunFolder, plan: Plan, events: Events) -> None:
        config = self.config
        store = make_store(config.weights, dtype=config.generator.dtype, run_folder=folder.path)
        stop = StopRequest()
        try:
            # A folder of this machine; hosts elsewhere have none of that name.
            with nullcontext() if config.launch.on_cluster else temporary_files():
                launch.run(self._main(folder, plan, store, stop, events), stop=stop)
        except BaseException as error:
            # For the log, with its traceback; the console gets the message from the entry.
            logger.info("the run stopped: %s", type(error).__name__, exc_info=True)
            if saved_steps(folder.checkpoints):
                say(f"continue with --resume {folder.path}", stream=sys.stderr)
            if not isinstance(error, ValueError) or isinstance(error, RunError):
                raise
            # Only before the start does a ValueError mean a config that cannot run.
            stopped = RunError(str(error))
            stopped.where = ", ".join(getattr(error, "__notes__", ()))
            raise stopped from error
        finally:
            store.discard()

    async def _main(
        self, folder: RunFolder, plan: Plan, store: WeightStore, stop: StopRequest, events: Events
    ) -> None:
        started = time.monotonic()
        rubric = plan.task.rubric(seed=self.config.seed)
        fleet = await self._start_fleet(folder, plan, store=store, rubric=rubric, events=events)
        training = Training(
            config=self.config,
            plan=plan,
            folder=folder,
            rubric=rubric,
            stop=stop,
            events=events.add,
            limits=await run_limits(self.config, fleet, spec=plan.start.spec),
        )
        fleet = await training.run(fleet)
        folder.mark_finished()
        await asyncio.to_thread(draw_timeline, folder, self.config.timeline)
        run_s = time.monotonic() - started
        records = read_metrics(folder.metrics)
        say(summary(records, folder=folder, run_s=run_s, config=to_dict(self.config)))
        await close_fleet(fleet)

    async def _start_fleet(
        self, folder: RunFolder, plan: Plan, *, store: WeightStore, rubric: Rubric, events: Events
    ) -> Fleet:
        config = self.config
        with progress("starting the actors (import, load, compile)"):
            return await start_fleet(
                config.fleet,
                store=store,
                check=SyncCheck(
                    plan.canary,
                    drains=config.loop.max_policy_age > 0 and config.generator.on_update == "drain",
                ),
                model_spec=plan.start.spec,
                hf_assets_path=str(plan.start.folder),
                rubric=rubric,
                failure_folder=folder.path,
                logs=LogSettings(
                    folder=folder.logs, console_level=config.console_level, timeline=config.timeline
                ),
                events=events.add,
            )


def _only_saver(config: CheckpointConfig) -> AbstractContextManager[None]:
    """No other run saves into a folder outside of its own meanwhile, from before it is read.

    Raises:
        ValueError: one does, or the folder cannot be made.
    """
    if config.shared_folder is None or not config.saves:
        return nullcontext()
    return having(
        config.shared_folder,
        as_what="trainer.checkpoint.folder",
        otherwise="only one run at a time may save there: choose another trainer.checkpoint.folder, or "
        "trainer.checkpoint.load_only",
    )
