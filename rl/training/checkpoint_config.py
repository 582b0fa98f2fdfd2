"""What a run saves and when, and what it loads before its first step. Needs no PyTorch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from rl.config.configurable import Configurable
from rl.config.effect import all_of, only_if
from rl.training.checkpoint_files import (
    HF_FOLDER,
    check_small_files,
    is_checkpoint,
    read_state,
    saved_steps,
)
from rl.training.damaged import newest_usable
from rl.types import LoopPosition

RUN_FOLDER = "checkpoints"
LATEST = -1
TRAIN_STATE, RANDOM, DATALOADER = "train_state", "random", "dataloader"
"""Parts of a checkpoint that are no tensors, as `exclude_from_loading` names them."""
TOKENIZER = "tokenizer"
"""Named there, the tokenizer may be another than that of the run that saved."""
_SAVES = all_of(only_if("enable", True), only_if("load_only", False))


def excluded(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns is that name, the beginning of it up to a dot, or fits it."""
    return any(name == p or name.startswith(f"{p}.") or fnmatchcase(name, p) for p in patterns)


@dataclass(kw_only=True, slots=True)
class CheckpointConfig(Configurable.Config):
    """Fields of `Checkpointer.Config`."""

    enable: bool = True
    """Save, and load what is asked for. False: neither, and no Hugging Face folder at the end."""
    folder: str = field(default=RUN_FOLDER, metadata=only_if("enable", True))
    """checkpoints: inside the run's folder. Or an absolute path: a later run with the same path continues
    the latest checkpoint there."""
    interval: int = field(default=500, metadata=_SAVES)
    """Steps between checkpoints; the last step is always saved."""
    enable_first_step_checkpoint: bool = False
    """Also save after step 1, to see early that saving works."""
    create_seed_checkpoint: bool = False
    """Also save before step 1, as step-0: any layout can start from the same state. Never removed."""
    keep_latest_k: int = field(default=10, metadata=_SAVES)
    """Remove all but the latest k. 0: keep all; 1 is refused."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Let training go on while a copy in CPU memory is written; page-locked memory copies faster and is
    kept from save to save (needs a GPU)."""
    timeout_s: float = 1800.0
    """Longest wait for a background save to end, and of ranks for each other while they save or load."""
    last_save_model_only: bool = field(default=False, metadata=_SAVES)
    """Leave optimizer and random states out of the last checkpoint: smaller, and not to be continued."""
    last_save_in_hf: bool = field(default=True, metadata=_SAVES)
    """At the end also write the weights as a Hugging Face folder, hf/."""
    export_dtype: Literal["float32", "bfloat16", "float16"] = field(
        default="float32", metadata=all_of(_SAVES, only_if("last_save_in_hf", True))
    )
    """Of the weights in a Hugging Face folder."""
    initial_load_path: str | None = None
    """Start from this checkpoint, or from one of this folder of them; without effect where `folder`
    already holds some, which are continued."""
    initial_load_model_only: bool = True
    """Take the weights alone from there and start at step 0; False also takes optimizer, policy version,
    random states and the loop's position, and so continues."""
    initial_load_in_hf: bool = False
    """`initial_load_path` is a Hugging Face folder."""
    initial_load_in_hf_quantized: bool = False
    """Refused: quantized weights cannot be trained on; convert the folder to bfloat16 first."""
    load_step: int = field(default=LATEST, metadata=only_if("enable", True))
    """Which checkpoint of `initial_load_path` to load or, without that, of `folder`; -1: the latest."""
    load_only: bool = False
    """Load and never save."""
    exclude_from_loading: tuple[str, ...] = field(default=(), metadata=only_if("enable", True))
    """What keeps its state when a checkpoint is loaded: model, optimizer, train_state (the policy version,
    which the learning-rate schedule is a function of), random, dataloader (the loop's position), a tensor
    or the beginning of its dotted name, or a pattern such as model.layers.*.norm.weight. tokenizer: load also
    where the run's tokenizer is not the one that the checkpoint was made with."""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise ValueError for what contradicts itself; fields may be edited after construction."""
        self._check_ranges()
        self._check_folder()
        self._check_loading()
        saving = ("enable_first_step_checkpoint", "create_seed_checkpoint")
        if self.load_only:
            self._refuse(saving, "load_only=True", "nothing is saved")
            if self.async_mode != "disabled":
                raise ValueError(f"async_mode={self.async_mode!r} with load_only=True: nothing is saved")
        if not self.enable:
            self._refuse(saving, "enable=False", "nothing is saved")
            self._refuse(("initial_load_path", "load_only"), "enable=False", "nothing is loaded")

    def due(self, step: int, *, last: bool = False) -> bool:
        """Whether a checkpoint is saved after `step`; step 0 is before the first."""
        if not self.enable or self.load_only:
            return False
        if step == 0:
            return self.create_seed_checkpoint
        return last or step % self.interval == 0 or (step == 1 and self.enable_first_step_checkpoint)

    @property
    def saves(self) -> bool:
        """Whether a run writes anything of what it trained."""
        return self.enable and not self.load_only

    @property
    def exports(self) -> bool:
        """Whether a run ends with a Hugging Face folder."""
        return self.saves and self.last_save_in_hf

    @property
    def shared_folder(self) -> Path | None:
        """The folder, where it is not the run's own and so may already hold checkpoints."""
        path = Path(self.folder).expanduser()
        return path if path.is_absolute() else None

    def _check_ranges(self) -> None:
        if self.interval < 1:
            raise ValueError(f"interval={self.interval}: must be at least 1")
        if self.keep_latest_k < 0:
            raise ValueError(f"keep_latest_k={self.keep_latest_k}: must be 0 (all) or at least 2")
        if self.keep_latest_k == 1:
            raise ValueError(
                "keep_latest_k=1: if that one turned out to be damaged there would be none to fall back to; "
                "must be 0 (all) or at least 2"
            )
        if not 0 < self.timeout_s < float("inf"):
            raise ValueError(f"timeout_s={self.timeout_s}: must be a finite number above 0")
        if self.load_step < LATEST:
            raise ValueError(f"load_step={self.load_step}: must be a step, or -1 for the latest")

    def _check_folder(self) -> None:
        if self.shared_folder is None and self.folder != RUN_FOLDER:
            raise ValueError(
                f"folder={self.folder!r}: must be {RUN_FOLDER!r}, inside the run's folder, or an absolute "
                "path"
            )

    def _check_loading(self) -> None:
        if self.initial_load_in_hf_quantized:
            raise ValueError(
                "initial_load_in_hf_quantized=True is not supported: quantized weights cannot be trained "
                "on; convert the folder to bfloat16 and load it with initial_load_in_hf"
            )
        if self.initial_load_in_hf:
            if self.initial_load_path is None:
                raise ValueError("initial_load_in_hf=True: needs initial_load_path")
            if not self.initial_load_model_only:
                raise ValueError(
                    "initial_load_model_only=False with initial_load_in_hf=True: a Hugging Face folder holds "
                    "the model alone"
                )
        elif not self.initial_load_model_only and self.initial_load_path is None:
            raise ValueError("initial_load_model_only=False: needs initial_load_path")
        for name in self.exclude_from_loading:
            if name.split(".")[0] == "lr_scheduler":
                raise ValueError(
                    f"exclude_from_loading: {name!r} has no state, the schedule is a function of the policy "
                    "version; exclude train_state to start it anew"
                )
            if not name:
                raise ValueError("exclude_from_loading: '' names nothing")

    def _refuse(self, fields: tuple[str, ...], setting: str, why: str) -> None:
        for name in fields:
            if getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)!r} with {setting}: {why}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSource:
    """What a run loads before its first step."""

    path: Path
    model_only: bool
    in_hf: bool
    """A Hugging Face folder, not a checkpoint of `Checkpointer`."""
    position: LoopPosition | None
    """Where the loop goes on; None starts it anew."""
    started_from: str | None = None
    """Of a checkpoint that is continued: `SavedState.started_from`."""
    whole: bool = False
    """A checkpoint of the run itself: all of it is loaded, whatever `exclude_from_loading` says."""

    def needs_start(self, *, reference: bool) -> bool:
        """Whether the weights that the run started from have to be made again: a policy that is continued has
        its own from the checkpoint, its `reference` policy from the run's start, which may be gone."""
        if self.model_only or not reference:
            return False
        return self.started_from is None or not Path(self.started_from).is_dir()


def find_load_source(config: CheckpointConfig, *, repairs: bool = False) -> LoadSource | None:
    """What the fields ask for: a checkpoint whose files are all there, of their sizes, or a folder of
    Hugging Face that is there; None to start without. The tensors themselves are not read.

    `repairs`: where the latest checkpoint of `folder` is damaged it is set aside, and the one before taken.

    Raises:
        ValueError: names the field and what is missing, the file that is not whole, or the steps there are.
    """
    config.check()
    if not config.enable:
        return None
    shared = config.shared_folder
    steps = {} if shared is None else saved_steps(shared)
    if shared is not None and not config.load_only:
        _check_free(config, shared, steps)
        if repairs and not (_is_of_folder(config) and config.load_step != LATEST):
            newest_usable(shared, lambda path: _checkpoint(path, config, model_only=False))
            steps = saved_steps(shared)
    if shared is not None and steps:
        load_step = config.load_step if _is_of_folder(config) else LATEST
        source = _checkpoint(_step_of(steps, load_step, folder=shared), config, model_only=False)
        if source.position is None and not config.load_only:
            raise ValueError(
                f"folder={config.folder!r} holds checkpoints, but the loop would start at step 0 and come to "
                "the same steps again: dataloader is excluded from loading, or no loop saved them; load with "
                "initial_load_path into another folder"
            )
        return source
    return initial_source(config)


def initial_source(config: CheckpointConfig) -> LoadSource | None:
    """What `initial_load_path` asks for, as `find_load_source` does where `folder` holds nothing."""
    if config.initial_load_path is None:
        for name, value in (("load_step", config.load_step != LATEST), ("load_only", config.load_only)):
            if value:
                raise ValueError(
                    f"{name}={getattr(config, name)}: there is no checkpoint to load; give "
                    f"initial_load_path, or a folder that holds some (folder={config.folder!r})"
                )
        return None
    path = Path(config.initial_load_path).expanduser().absolute()
    if not path.is_dir():
        raise ValueError(f"initial_load_path={config.initial_load_path}: there is no such folder")
    if config.initial_load_in_hf:
        return _hugging_face(path, config)
    return _checkpoint(_chosen(path, config), config, model_only=config.initial_load_model_only)


def _is_of_folder(config: CheckpointConfig) -> bool:
    """Whether `load_step` is one of `folder`'s: a step of another folder was the start of what is there."""
    path, shared = config.initial_load_path, config.shared_folder
    return path is None or (shared is not None and Path(path).expanduser().resolve() == shared.resolve())


def _check_free(config: CheckpointConfig, folder: Path, steps: dict[int, Path]) -> None:
    """Whether a run that loads what is asked for can save into the folder later."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"folder={config.folder!r}: {existing} is not a folder that can be written to")
    if config.exports and (folder / HF_FOLDER).exists():
        raise ValueError(
            f"last_save_in_hf=True: {folder / HF_FOLDER} is there already, of a run that ended; move it away"
        )
    later = [step for step in steps if LATEST < config.load_step < step]
    if _is_of_folder(config) and config.load_step in steps and later:
        raise ValueError(
            f"load_step={config.load_step}: {folder} holds later steps too ({_listed(later)}), which this "
            "run would come to again; move them away, or load with initial_load_path into another folder"
        )


def _hugging_face(path: Path, config: CheckpointConfig) -> LoadSource:
    if config.load_step != LATEST:
        raise ValueError(f"load_step={config.load_step} with initial_load_in_hf=True: it is one folder")
    if config.exclude_from_loading:
        raise ValueError(
            f"exclude_from_loading={config.exclude_from_loading} with initial_load_in_hf=True: is for "
            "checkpoints only"
        )
    return LoadSource(path=path, model_only=True, in_hf=True, position=None)


def _chosen(path: Path, config: CheckpointConfig) -> Path:
    """`initial_load_path` itself where it is a checkpoint, else the one of `load_step` in it."""
    if is_checkpoint(path):
        if config.load_step != LATEST:
            raise ValueError(
                f"load_step={config.load_step}: initial_load_path={path} is one checkpoint, not a folder of "
                "them"
            )
        return path
    if steps := saved_steps(path):
        return _step_of(steps, config.load_step, folder=path)
    hint = "; it looks like a Hugging Face folder: set initial_load_in_hf"
    raise ValueError(
        f"initial_load_path={path}: neither a checkpoint nor a folder of step-<n>"
        f"{hint if (path / 'config.json').is_file() else ''}"
    )


def _step_of(steps: dict[int, Path], load_step: int, *, folder: Path) -> Path:
    step = max(steps) if load_step == LATEST else load_step
    if step not in steps:
        raise ValueError(f"load_step={load_step}: {folder} has no such step, it has {_listed(steps)}")
    return steps[step]


def _checkpoint(path: Path, config: CheckpointConfig, *, model_only: bool) -> LoadSource:
    check_small_files(path)
    state = read_state(path)
    if state.model_only and not model_only:
        raise ValueError(
            f"{path} holds the model alone (last_save_model_only), so it cannot be continued; load an "
            "earlier step, or start from it with initial_load_model_only"
        )
    continues = not model_only and not excluded(DATALOADER, config.exclude_from_loading)
    position = state.position if continues else None
    started_from = None if model_only else state.started_from
    return LoadSource(
        path=path, model_only=model_only, in_hf=False, position=position, started_from=started_from
    )


def _listed(steps: Iterable[int]) -> str:
    return ", ".join(str(step) for step in steps)
