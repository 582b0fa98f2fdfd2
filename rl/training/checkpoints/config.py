"""Settings of checkpoints, and the choice of what a run loads before its first step.

Tensors are not read here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rl.config.configurable import Configurable, all_of, check_refused, only_if, refused, unless
from rl.config.tree import check_bounds
from rl.training.checkpoints.files import (
    HF_CONFIG,
    HF_FOLDER,
    Skip,
    check_files,
    find_newest_usable,
    is_checkpoint,
    list_steps,
    read_state,
)
from rl.training.checkpoints.tensors import DATALOADER, is_excluded
from rl.types import LoopPosition

RUN_FOLDER = "checkpoints"
LATEST = -1
_MODEL_ONLY = "holds only the model (last_save_model_only), so it cannot be continued"
_SAVES = all_of(only_if("enable", True), only_if("load_only", False))


@dataclass(kw_only=True, slots=True)
class CheckpointConfig(Configurable.Config):
    """Settings of `Checkpointer`."""

    enable: bool = True
    """Save and load checkpoints; False also skips the Hugging Face folder at the end."""
    folder: str = field(default=RUN_FOLDER, metadata=only_if("enable", True))
    """`checkpoints` for a folder inside the run's folder, or an absolute path; a later run with the
    same absolute path continues its latest checkpoint."""
    interval: int = field(default=500, metadata=_SAVES)
    """Steps between checkpoints; the last step is always saved."""
    enable_first_step_checkpoint: bool = field(default=False, metadata=_SAVES)
    """Save after step 1 too, to find out early that saving works."""
    create_seed_checkpoint: bool = field(default=False, metadata=_SAVES)
    """Save before step 1 too, as step-0, from which every layout can start alike; never removed."""
    keep_latest_k: int = field(default=10, metadata=_SAVES)
    """Number of latest checkpoints to keep; 0 keeps all, 1 is refused."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = field(
        default="disabled", metadata=_SAVES
    )
    """Write a copy in host memory while training continues; page-locked memory copies faster and
    stays allocated between saves (needs a GPU)."""
    timeout_s: float = 1800.0
    """Seconds to wait for a background save, and for other ranks during saving and loading."""
    last_save_model_only: bool = field(default=False, metadata=_SAVES)
    """Leave optimizer and random states out of the last checkpoint, which then cannot be continued.
    """
    last_save_in_hf: bool = field(default=True, metadata=_SAVES)
    """Write the final weights as a Hugging Face folder, hf/, too."""
    export_dtype: Literal["float32", "bfloat16", "float16"] = field(
        default="float32", metadata=all_of(_SAVES, only_if("last_save_in_hf", True))
    )
    """Dtype of the weights in a Hugging Face folder."""
    initial_load_path: str | None = None
    """Checkpoint to start from, or a folder of checkpoints; ignored once `folder` holds a
    checkpoint.
    """
    initial_load_model_only: bool = True
    """Load only the weights from `initial_load_path` and start at step 0; False continues that run
    with optimizer, policy version, random states and the loop's position."""
    initial_load_in_hf: bool = field(default=False, metadata=unless("initial_load_path", None))
    """Read `initial_load_path` as a Hugging Face folder."""
    initial_load_in_hf_quantized: bool = field(
        default=False,
        metadata=refused(
            "quantized weights cannot be trained; convert the folder to bfloat16 and load it with "
            "initial_load_in_hf"
        ),
    )
    """Quantized weights; refused."""
    load_step: int = field(default=LATEST, metadata=only_if("enable", True))
    """Step to load from `initial_load_path` or, without one, from `folder`; -1 is the latest."""
    load_only: bool = field(default=False, metadata=only_if("enable", True))
    """Load and never save."""
    exclude_from_loading: tuple[str, ...] = field(default=(), metadata=only_if("enable", True))
    """Parts that keep their state when a checkpoint is loaded: model, optimizer, reference,
    train_state (the policy version, which also sets the learning rate), random, dataloader (the
    loop's position), a tensor or a dotted prefix of its name, or a pattern such as
    model.layers.*.norm.weight. tokenizer: accept a checkpoint that was made with another tokenizer;
    problems: one of a run with other training problems, also for --resume."""

    def __post_init__(self) -> None:
        check_refused(self)
        check_bounds(self, "interval", at_least=1)
        check_bounds(self, "timeout_s", above=0, below=float("inf"))
        check_bounds(self, "load_step", at_least=LATEST)
        if self.keep_latest_k < 0 or self.keep_latest_k == 1:
            raise ValueError(
                f"keep_latest_k={self.keep_latest_k}: must be 0 (all) or at least 2, so that a "
                "damaged checkpoint leaves one to fall back to"
            )
        if self.shared_folder is None and self.folder != RUN_FOLDER:
            raise ValueError(
                f"folder={self.folder!r}: must be {RUN_FOLDER!r}, inside the run's folder, or an "
                "absolute path"
            )
        for name in self.exclude_from_loading:
            if not name or name.split(".")[0] == "lr_scheduler":
                raise ValueError(
                    f"exclude_from_loading: {name!r} has no state; the schedule follows train_state"
                )

    def is_due(self, step: int, *, last: bool = False) -> bool:
        """Return whether a checkpoint is saved after `step`; step 0 is the seed checkpoint."""
        if not self.saves:
            return False
        if step == 0:
            return self.create_seed_checkpoint
        return (
            last or step % self.interval == 0 or (step == 1 and self.enable_first_step_checkpoint)
        )

    @property
    def saves(self) -> bool:
        return self.enable and not self.load_only

    @property
    def exports(self) -> bool:
        return self.saves and self.last_save_in_hf

    @property
    def shared_folder(self) -> Path | None:
        """The absolute folder that later runs may share, or None for a folder inside the run's."""
        path = Path(self.folder).expanduser()
        return path if path.is_absolute() else None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSource:
    """A checkpoint or Hugging Face folder that a run loads before its first step."""

    path: Path
    model_only: bool
    position: LoopPosition | None
    """Position at which the loop continues; None starts the loop anew."""
    whole: bool = False
    """True for a checkpoint of the run itself: `exclude_from_loading` does not apply."""


def find_load_source(config: CheckpointConfig, *, repairs: bool = False) -> LoadSource | None:
    """Return what the config asks to load, after checking that its files are complete.

    With `repairs`, damaged checkpoints at the end of `folder` are set aside and the one before is
    taken. Raises ValueError if something is missing or damaged, or the run could not save into
    `folder` later.
    """
    if not config.enable:
        return None
    shared = config.shared_folder
    if shared is None:
        return find_initial_source(config)

    # A checkpoint in a shared folder comes before `initial_load_path`, so that a run that is
    # started again with the same command continues.
    load_step = config.load_step if config.initial_load_path is None else LATEST
    if not config.load_only:
        _check_free(config, shared, load_step)
        if repairs and load_step == LATEST:
            find_newest_usable(shared, lambda path: _make_source(path, config, model_only=False))

    steps = list_steps(shared)
    if not steps:
        return find_initial_source(config)
    source = _make_source(_find_step(steps, load_step, folder=shared), config, model_only=False)
    if source.position is None and not config.load_only:
        raise ValueError(
            f"folder={config.folder!r} holds checkpoints, but the loop would start at step 0 and "
            "save the same steps again; load with initial_load_path into another folder"
        )
    return source


def find_initial_source(config: CheckpointConfig) -> LoadSource | None:
    """Return what `initial_load_path` asks to load, or None.

    Raises ValueError as `find_load_source`.
    """
    load_step = config.load_step
    if config.initial_load_path is None:
        if load_step != LATEST or config.load_only:
            raise ValueError(
                f"load_step={load_step}, load_only={config.load_only}: there is no checkpoint to "
                "load; set initial_load_path, or a folder that holds checkpoints "
                f"(folder={config.folder!r})"
            )
        return None

    path = Path(config.initial_load_path).expanduser().absolute()
    if not path.is_dir():
        raise ValueError(f"initial_load_path={config.initial_load_path}: there is no such folder")

    if config.initial_load_in_hf:
        if load_step != LATEST or config.exclude_from_loading:
            raise ValueError(
                "load_step and exclude_from_loading are only for checkpoints: must not be set with "
                "initial_load_in_hf=True"
            )
        if not (path / HF_CONFIG).exists() and (is_checkpoint(path) or list_steps(path)):
            raise ValueError(
                f"initial_load_in_hf=True: {path} is a checkpoint, or a folder of them, and has no "
                "config.json: set initial_load_in_hf=False, or give a Hugging Face folder"
            )
        return LoadSource(path=path, model_only=True, position=None)

    steps = list_steps(path)
    if steps:
        path = _find_step(steps, load_step, folder=path)
    elif not is_checkpoint(path) or load_step != LATEST:
        raise ValueError(
            f"initial_load_path={path}: must be a checkpoint, a folder of step-<n> for "
            f"load_step={load_step}, or, with initial_load_in_hf, a Hugging Face folder"
        )
    return _make_source(path, config, model_only=config.initial_load_model_only)


def find_own_checkpoint(
    folder: Path, *, num_steps: int, skip: Skip | None = None
) -> LoadSource | None:
    """Return the latest checkpoint of a run's own folder, or None.

    Raises ValueError if it cannot be continued.

    Args:
        num_steps: number of steps that the run is to have in all.
        skip: called for each damaged checkpoint; None sets them aside.
    """
    return find_newest_usable(
        folder, lambda path: _continue_from(path, num_steps=num_steps), skip=skip
    )


def _continue_from(path: Path, *, num_steps: int) -> LoadSource:
    """Return a run's own checkpoint as a source; raises ValueError if it cannot be continued."""
    # The trainer's ranks check the tensors, as all of them together read faster.
    check_files(path, tensors=False)
    state = read_state(path)
    position = state.position
    if position is None:
        raise ValueError(f"{path} was not saved by a loop, so no run can continue it; move it away")
    if position.step > num_steps:
        raise ValueError(
            f"loop.num_steps={num_steps}: must be at least {position.step}, the steps that {path} "
            "has done"
        )
    # A run that has done all of its steps needs no optimizer: it may still export its weights.
    if state.model_only and position.step < num_steps:
        raise ValueError(
            f"{path} {_MODEL_ONLY}; move it away to continue from the checkpoint before it"
        )
    return LoadSource(path=path, model_only=state.model_only, position=position, whole=True)


def _check_free(config: CheckpointConfig, folder: Path, load_step: int) -> None:
    """Check that the run can save into the folder later."""
    # The folder may not exist yet; then the nearest folder above it must be writable.
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"folder={config.folder!r}: {existing} is not a writable folder")
    if config.exports and (folder / HF_FOLDER).exists():
        raise ValueError(
            f"last_save_in_hf=True: {folder / HF_FOLDER} exists, from a run that ended; move it "
            "away"
        )
    steps = list_steps(folder)
    if load_step in steps and load_step < max(steps):
        raise ValueError(
            f"load_step={load_step}: {folder} also holds later steps up to {max(steps)}, which "
            "this run would save again; move them away, or load with initial_load_path into "
            "another folder"
        )


def _find_step(steps: dict[int, Path], load_step: int, *, folder: Path) -> Path:
    """Return the folder of a step; raises ValueError that lists the steps there are."""
    step = max(steps) if load_step == LATEST else load_step
    if step not in steps:
        raise ValueError(
            f"load_step={load_step}: {folder} has no such step, only {', '.join(map(str, steps))}"
        )
    return steps[step]


def _make_source(path: Path, config: CheckpointConfig, *, model_only: bool) -> LoadSource:
    """Return a checkpoint as a source; raises ValueError if it lacks what the config needs."""
    check_files(path, tensors=False)
    state = read_state(path)
    if state.model_only and not model_only:
        raise ValueError(
            f"{path} {_MODEL_ONLY}; load an earlier step, or start from it with "
            "initial_load_model_only"
        )
    continues = not model_only and not is_excluded(DATALOADER, config.exclude_from_loading)
    return LoadSource(
        path=path,
        model_only=model_only,
        position=state.position if continues else None,
    )
