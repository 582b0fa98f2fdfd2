"""Configs and clients of TensorBoard, Weights & Biases and trackio.

All calls of one logger come from one thread.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl.config.configurable import only_if

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_ENABLED = only_if("enable", True)


class MetricsLogger:
    """Client of one package. Any call may raise."""

    name: str

    def open(self, last_step: int | None) -> None:
        """Start, or continue a run after this step.

        Called again when the run goes back to an earlier step.
        """

    def write(self, step: int, values: Mapping[str, float], *, row: int) -> None:
        """Log one record; `row` is twice the step, plus one for an evaluation."""
        raise NotImplementedError

    def close(self, *, failed: bool) -> None:
        """Release everything. Idempotent."""


@dataclass(kw_only=True, slots=True)
class TensorBoardConfig:
    """Event files for `tensorboard --logdir outputs`, in tensorboard/ of the run's folder."""

    enable: bool = False
    """Write the event files; needs the extra `sinks`."""


class TensorBoardLogger(MetricsLogger):
    """Writer of TensorBoard's event files."""

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def open(self, last_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.close(failed=False)
        # Readers drop the points of earlier files from the purge step on.
        self._writer = SummaryWriter(
            str(self._folder), purge_step=0 if last_step is None else last_step + 1
        )

    def write(self, step: int, values: Mapping[str, float], *, row: int) -> None:
        assert self._writer is not None
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        # Otherwise the file is written every two minutes.
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _check_project(project: str) -> None:
    if not project or set(project) & set("/\\#?%:"):
        raise ValueError(f"project={project!r}: must be a name without / \\ # ? % or :")


@dataclass(kw_only=True, slots=True)
class WandbConfig:
    """Weights & Biases. Its client reads WANDB_ENTITY, WANDB_RUN_GROUP, WANDB_TAGS and others."""

    enable: bool = False
    """Log to W&B; needs the extra `sinks`."""
    mode: Literal["offline", "online"] = field(default="offline", metadata=_ENABLED)
    """offline: write to wandb/ of the run's folder, without network, for a later `wandb sync`;
    online: send to the server during the run, with the key of `wandb login` or WANDB_API_KEY."""
    project: str = field(default="relay", metadata=_ENABLED)
    """Project of the run."""

    def __post_init__(self) -> None:
        _check_project(self.project)


@contextmanager
def keep_error_hooks() -> Iterator[None]:
    """Undo W&B's changes of `sys.excepthook` and `sys.exit`, which print every error twice."""
    hooks = sys.excepthook, sys.exit
    try:
        yield
    finally:
        sys.excepthook, sys.exit = hooks


class WandbLogger(MetricsLogger):
    """Run of Weights & Biases. W&B keeps its records of steps that are trained again."""

    name = "wandb"

    def __init__(self, config: WandbConfig, /, *, finish_s: float, **run: Any) -> None:
        """Take the arguments of `wandb.init` about the run.

        `finish_s` limits the time to reach the server, and the time to send what is left at the
        end.
        """
        self._config = config
        self._finish_s = finish_s
        self._arguments = run
        self._run: Any = None

    def open(self, last_step: int | None) -> None:
        # W&B cannot go back: it keeps its records of steps that are trained again.
        if self._run is not None:
            return
        if self._config.mode == "offline":
            # W&B's own error reports need the network.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        with keep_error_hooks():
            self._run = wandb.init(
                **self._arguments,
                project=self._config.project,
                mode=self._config.mode,
                resume="allow",
                # A notebook may have another run.
                reinit="create_new",
                settings=wandb.Settings(
                    console="off",
                    silent=True,
                    save_code=False,
                    disable_git=True,
                    init_timeout=self._finish_s,
                    finish_timeout=self._finish_s,
                    x_transaction_log_flush_interval=1.0,
                ),
            )
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float], *, row: int) -> None:
        assert self._run is not None
        # W&B takes one row for each of its steps, and none again.
        self._run.log({"step": step, **values}, step=row, commit=True)

    def close(self, *, failed: bool) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        import wandb

        try:
            run.finish(exit_code=int(failed))
        finally:
            if wandb.run is None:  # no other run of this process needs W&B's service
                wandb.teardown()


@dataclass(kw_only=True, slots=True)
class TrackioConfig:
    """Trackio, a local dashboard: `trackio show`."""

    enable: bool = False
    """Write to trackio's database on this machine, in the folder TRACKIO_DIR or the cache of
    Hugging Face; needs the extra `sinks`."""
    project: str = field(default="relay", metadata=_ENABLED)
    """Project of the run."""

    def __post_init__(self) -> None:
        _check_project(self.project)


class TrackioLogger(MetricsLogger):
    """Run in trackio's local database.

    The storage is used directly: `trackio.init` starts a dashboard server and hides errors of the
    database.
    """

    name = "trackio"

    def __init__(
        self, config: TrackioConfig, *, title: str, run_id: str, settings: Mapping[str, Any]
    ) -> None:
        self._run = {"project": config.project, "run": title, "run_id": run_id}
        self._settings: dict[str, Any] | None = dict(settings)

    def write(self, step: int, values: Mapping[str, float], *, row: int) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        # A row with an id that exists stays as it is: a step that is trained again.
        SQLiteStorage.bulk_log(
            **self._run,
            metrics_list=[dict(values)],
            steps=[step],
            config=self._settings,
            log_ids=[f"{self._run['run_id']}-{row}"],
        )
        self._settings = None
