"""Weights & Biases, of which W&B's own process sends, or keeps, what it is handed."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl.observability.sinks.config import WandbConfig
from rl.observability.sinks.place import Place, Sent
from rl.observability.sinks.tail import NumberedRecord

FLUSH_S = 1.0
"""W&B's process writes to its file that often; what came later is lost with a process that is killed."""
NO_REPORTS = "WANDB_ERROR_REPORTING"
"""In the environment: whether W&B tells its makers of its own errors."""


class Wandb:
    """A `Backend`. What W&B has it keeps: of a run that goes back the records that it was given
    before stay, and those that take their place are not sent."""

    name = "wandb"

    def __init__(
        self, config: WandbConfig, *, folder: Path, title: str, settings: Mapping[str, Any], finish_s: float
    ) -> None:
        """
        Args:
            folder: of the run; W&B makes wandb/ in it.
            title: of the run, as it is shown.
            settings: the run's config.
            finish_s: longest time to reach the server, and to send what is left at the end.
        """
        self.config = config
        self.folder = folder
        self.title = title
        self.settings = settings
        self.finish_s = finish_s
        self._run: Any = None

    def open(self, sent: Sent) -> Place | None:
        if self._run is None:
            hooks = sys.excepthook, sys.exit
            try:
                self._run = self._init(sent.run_id)
            finally:
                # It puts its own there, which print tracebacks that our log has already.
                sys.excepthook, sys.exit = hooks
        return sent.last

    def _init(self, run_id: str) -> Any:
        if self.config.mode == "offline":
            os.environ.setdefault(NO_REPORTS, "false")  # nothing leaves this machine
        import wandb

        run = wandb.init(
            entity=self.config.entity,
            project=self.config.project,
            group=self.config.group,
            tags=list(self.config.tags) or None,
            id=run_id,
            name=self.title,
            dir=str(self.folder),
            config=dict(self.settings),
            mode=self.config.mode,
            resume="allow",
            reinit="create_new",  # a notebook may have a run of its own
            settings=wandb.Settings(
                console="off",
                silent=True,
                save_code=False,
                disable_git=True,
                # The end of this process waits for W&B's, which is in one of these.
                init_timeout=self.finish_s,
                finish_timeout=self.finish_s,
                x_transaction_log_flush_interval=FLUSH_S,
            ),
        )
        run.define_metric("*", step_metric="step")
        return run

    def write(self, record: NumberedRecord) -> None:
        assert self._run is not None
        # The record's number: W&B takes none of a row twice, and a step may have two, one of its evaluation.
        row = {"step": record.place.step, **record.values}
        self._run.log(row, step=record.number, commit=True)

    def close(self, *, failed: bool) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        import wandb

        try:
            run.finish(exit_code=int(failed))
        finally:
            if wandb.run is None:  # else somebody else's run needs W&B's process
                wandb.teardown()
