"""Controller: runs a config from its check to its learning curve, in this process; the actors work
in theirs.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from actors.checks import Machine
from actors.config import RunConfig
from actors.placement import count_gpus, fit_to_devices, place_actors
from actors.plan import describe_source, make_plan
from actors.run import FROM_THE_BEGINNING, CheckedRun, checked_run, started_run
from actors.training import Training
from rl.config.configurable import Configurable
from rl.config.json import changed_fields, to_dict
from rl.config.registry import ExplanationForm, ResolvedRun
from rl.loop.stop_request import StopRequest
from rl.observability.console import print_line, summary
from rl.observability.metrics import read_metrics
from rl.observability.run_folder import RunFolder
from rl.training.checkpoint_files import saved_steps
from rl.utils.errors import RunError
from rl.utils.printing import say
from rl.utils.processes import rare_collections


class Controller(Configurable):
    Config: TypeAlias = RunConfig

    def __init__(self, *, config: RunConfig, run: ResolvedRun) -> None:
        """`run` is the origin of the config; it is written beside the results."""
        self.config = config
        self.source = run

    def run(self) -> Path:
        """Run to the end and return the run's folder; with `launch.dry_run`, the parent of the
        folder.

        A dry run of `--resume` reads the run's checkpoint, and says what would be loaded.

        Raises:
            ValueError: the config cannot run; nothing was started (`checked_run`).
            RunError: the run stopped.
        """
        config = self.config = fit_to_devices(self.config, num_gpus=count_gpus())
        if config.launch.dry_run:
            self._try(config)
            for placement in place_actors(config, num_gpus=count_gpus()).all:
                say(placement.describe())
            return Path(config.dump_folder)
        with checked_run(config, source=replace(self.source, config=config)) as checked:
            started = time.monotonic()
            self._train(checked)
            run_s = time.monotonic() - started
        folder = checked.folder
        records = read_metrics(folder.metrics)
        print_line(summary(records, folder=folder, run_s=run_s, config=to_dict(config)))
        return folder.path

    def _try(self, config: RunConfig) -> None:
        """Check the run, and print what it would load; a resumed run's folder is only read."""
        resumes, folder = self.source.resumes, None
        if resumes is not None:
            folder = RunFolder.to_read(resumes, checkpoints=config.trainer.checkpoint.shared_folder)
            real_run = replace(config, launch=replace(config.launch, dry_run=False))
            for change in changed_fields(folder.config_json, real_run):
                say(f"changed: {change}")
        plan = make_plan(config, resumes=folder)
        for line in describe_source(plan):
            say(line)
        if folder is not None and plan.resumed is None:
            say(FROM_THE_BEGINNING)

    def explain(self, form: ExplanationForm) -> int:
        """Print the run that this config describes, and what is refused of it; return the exit
        status.

        Nothing is started or written (docs/configuration.md).
        """
        from actors.explain import show

        return show(self.source, form=form, here=Machine.here())

    def _train(self, checked: CheckedRun) -> None:
        folder, stop = checked.folder, StopRequest()
        try:
            with rare_collections():
                asyncio.run(self._main(checked, stop))
        except BaseException as error:
            if saved_steps(folder.checkpoints):
                print_line(f"continue with --resume {folder.path}", stream=sys.stderr)
            if not isinstance(error, ValueError):
                raise
            # After the start, a ValueError no longer means a config that cannot run.
            stopped = RunError(str(error))
            stopped.where = ", ".join(getattr(error, "__notes__", ()))
            raise stopped from error

    async def _main(self, checked: CheckedRun, stop: StopRequest) -> None:
        async with started_run(checked, stop=stop) as run:
            await Training(run, stop=stop).run()
            run.folder.mark_finished()
