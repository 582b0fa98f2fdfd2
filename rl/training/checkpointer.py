"""Checkpoints of a run: whole or absent, in the background where wanted, the latest few kept.

Every rank makes one and calls the same methods in the same order.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rl.atomic_folder import publish, remove, remove_leftovers, temporary_folder
from rl.config.configurable import Configurable
from rl.distributed.first_rank import on_first_rank
from rl.distributed.seeds import random_states, restore_random_states
from rl.models.converters.peft_folder import is_peft_folder
from rl.models.hf import HFFolder
from rl.training import checkpoint
from rl.training.checkpoint_config import RANDOM, TRAIN_STATE, CheckpointConfig, excluded
from rl.training.checkpoint_files import (
    FileSum,
    SavedState,
    check_contents,
    check_sizes,
    is_checkpoint,
    read_state,
    saved_steps,
    write_description,
)
from rl.training.checkpoint_match import Destination, matching_tensors
from rl.training.errors import CheckpointError
from rl.training.optimizer import Optimizer
from rl.training.policy import Policy

logger = logging.getLogger(__name__)


class Checkpointer(Configurable):
    """Saves and loads one model in training. One save is under way at a time."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointConfig):
        pass

    def __init__(self, *, config: Config, policy: Policy, optimizer: Optimizer) -> None:
        """Raises ValueError for page-locked memory without a GPU, or fields that contradict each other."""
        config.check()
        check_device(config, has_gpu=policy.device.type == "cuda")
        self.config = config
        self.policy = policy
        self.optimizer = optimizer
        mesh = policy.mesh
        self._group: dist.ProcessGroup | None = None
        """Of its own: a background save talks while training does."""
        if mesh is not None:
            backend = "gloo" if policy.device.type == "cuda" else None  # On a CPU as the others.
            self._group = dist.new_group(backend=backend, timeout=timedelta(seconds=config.timeout_s))
        layout = "1" if mesh is None else "x".join(str(size) for size in mesh.shape)
        self._random_name = f"{RANDOM}.{layout}.{self._rank}"
        """Random states are those of a place in a layout; another layout keeps its own."""
        self._staging = checkpoint.Staging(pinned=config.async_mode == "async_with_pinned_mem")
        self._background: _Background | None = None

    def save(
        self,
        folder: str | Path,
        state: SavedState,
        *,
        wait: bool = True,
        attachments: Mapping[str, bytes] | None = None,
    ) -> None:
        """Let `folder` appear, whole; where it is a `step-<n>`, remove all but the latest few beside it.

        A save that is under way is waited for, and its error raised, first.

        Args:
            folder: on a file system that all ranks see.
            state: what is kept beside the tensors, and whether they are the model's alone; what the policy
                knows of its weights is added here.
            wait: until it is there. False returns as soon as what is written cannot change any
                more, if `async_mode` says so.
            attachments: further files, by name; the first rank writes them.

        Raises:
            FileExistsError: `folder` is already there.
            CheckpointError: it could not be written; nothing of it remains.
        """
        self.wait()
        started = time.perf_counter()
        path = Path(folder).absolute()
        state = replace(
            state,
            converters=self.policy.converters.saved_settings(),
            base_model=self.policy.base_model,
        )
        with ExitStack() as stack:
            partial = self._begin(path, stack)
            tensors = self._tensors(model_only=state.model_only)
            blobs = {} if state.model_only else {self._random_name: random_states()}
            write = functools.partial(
                self._write,
                path,
                partial,
                {**tensors, **blobs},
                state=state,
                attachments=attachments or {},
                started=started,
            )
            if wait or self.config.async_mode == "disabled":
                write(staged=None)
            else:
                staged = self._staging.copy(tensors)
                self._background = _Background(path, functools.partial(write, staged=staged), stack.pop_all())
                logger.info("%s: training goes on after %.3g s", path, time.perf_counter() - started)

    def wait(self) -> None:
        """Wait for a background save, at most `timeout_s`.

        Raises:
            CheckpointError: it failed, or has not ended.
        """
        background, self._background = self._background, None
        if background is not None and not background.wait(self.config.timeout_s):
            self._background = background
            raise CheckpointError(
                f"checkpoint {background.path} is not written after checkpoint.timeout_s="
                f"{self.config.timeout_s:g}"
            )

    def load(
        self,
        folder: str | Path,
        *,
        policy_version: int,
        model_only: bool = False,
        exclude: Sequence[str] | None = None,
    ) -> int:
        """Restore in place what `save` wrote, in this or another layout; the policy version to go on with.

        A folder of Hugging Face is the weights alone, one of PEFT the adapters alone.
        Random states are restored in the layout that saved them; in another each rank keeps its own.

        Args:
            policy_version: the present one, which stays where `train_state` is excluded.
            model_only: take the weights, forget the optimizer's state, start at version 0.
            exclude: what stays as it is; None takes `exclude_from_loading`.

        Raises:
            DamagedCheckpointError: names the file that is missing, truncated or corrupted; all is as it was.
            ValueError: says what `matching_tensors` does.
            CheckpointError: it could not be read.
        """
        self.wait()
        path = Path(folder).absolute()
        if not is_checkpoint(path):
            if is_peft_folder(path):
                self.policy.lora.load_peft(path)
            else:
                self.policy.load_hf(HFFolder(folder))
            self.optimizer.reset()
            return 0
        exclude = self.config.exclude_from_loading if exclude is None else tuple(exclude)
        self._verify(path)
        saved_state = read_state(path)
        if saved_state.model_only and not model_only:
            raise ValueError(f"checkpoint {path} holds the model alone: load it with model_only")
        into = Destination(tensors=self._tensors(model_only=model_only), converters=self.policy.converters)
        tensors = matching_tensors(path, saved_state, into, model_only=model_only, exclude=exclude)
        state: dict[str, Any] = dict(tensors)
        has_random = self._random_name in checkpoint.saved_names(path)
        if not model_only and has_random and not excluded(RANDOM, exclude):
            state[self._random_name] = None
        with _as_checkpoint_error(f"checkpoint {path} could not be read"):
            checkpoint.read_tensors(path, state, group=self._group)
        prefix = f"{checkpoint.MODEL}."
        loaded = {name.removeprefix(prefix) for name in tensors if name.startswith(prefix)}
        self.policy.weights_restored(loaded, base_model=saved_state.base_model)
        if states := state.get(self._random_name):
            restore_random_states(states)
        if model_only:
            self.optimizer.reset()
            return 0
        return policy_version if excluded(TRAIN_STATE, exclude) else saved_state.policy_version

    def load_weights(self, folder: str | Path, policy: Policy) -> None:
        """The weights alone, of a checkpoint or a folder of Hugging Face, into another policy of this layout.

        Raises:
            ValueError, CheckpointError: as `load`.
        """
        self.wait()
        path = Path(folder).absolute()
        if not is_checkpoint(path):
            policy.load_hf(HFFolder(path))
            return
        self._verify(path)
        saved_state = read_state(path)
        into = Destination(tensors=checkpoint.model_tensors(policy.model), converters=policy.converters)
        tensors = matching_tensors(path, saved_state, into, model_only=True, exclude=())
        with _as_checkpoint_error(f"checkpoint {path} could not be read"):
            checkpoint.read_tensors(path, dict(tensors), group=self._group)
        names = {name.removeprefix(f"{checkpoint.MODEL}.") for name in tensors}
        policy.weights_restored(names, base_model=saved_state.base_model)

    def close(self) -> None:
        """Wait for a background save, as `wait` does."""
        self.wait()

    @property
    def _rank(self) -> int:
        return 0 if self._group is None else dist.get_rank(self._group)

    def _tensors(self, *, model_only: bool) -> dict[str, Tensor]:
        tensors = checkpoint.model_tensors(self.policy.model)
        if model_only:
            return tensors
        return tensors | checkpoint.optimizer_tensors(self.policy.trained_parameters, self.optimizer)

    def _begin(self, path: Path, stack: ExitStack) -> Path:
        """A folder for all ranks to write into, kept until `stack` closes on the first."""

        def make(_: Sequence[None]) -> Path:
            if path.exists():
                raise FileExistsError(f"checkpoint {path} already exists")
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(path.parent)
            return stack.enter_context(temporary_folder(path))

        with _as_checkpoint_error(_not_written(path)):
            return on_first_rank(make, None, group=self._group)

    def _write(
        self,
        path: Path,
        partial: Path,
        content: Mapping[str, Tensor | bytes],
        *,
        state: SavedState,
        attachments: Mapping[str, bytes],
        started: float,
        staged: Mapping[str, Tensor] | None,
    ) -> None:
        def finish(sums_of_ranks: Sequence[dict[str, FileSum]]) -> int:
            sums = {name: file for sums in sums_of_ranks for name, file in sums.items()}
            write_description(partial, state, sums, attachments)
            publish(partial, path)
            _keep_latest(path, self.config.keep_latest_k)
            return sum(file.num_bytes for file in sums.values())

        with _as_checkpoint_error(_not_written(path)):
            sums = checkpoint.write_tensors(partial, content, staged=staged, group=self._group)
            num_bytes = on_first_rank(finish, sums, group=self._group)
        logger.info("%s: %.3g GB in %.3g s", path, num_bytes / 1e9, time.perf_counter() - started)

    def _verify(self, path: Path) -> None:
        """Raise an error, on every rank, if a file is not what was written; the ranks share the reading."""
        problem: Exception | None = None
        try:
            sums = check_sizes(path)
            num_ranks = 1 if self._group is None else dist.get_world_size(self._group)
            check_contents(path, sums, sorted(sums)[self._rank :: num_ranks])
        except (ValueError, OSError) as error:
            problem = error if isinstance(error, ValueError) else ValueError(str(error))

        def raise_first(problems: Sequence[Exception | None]) -> None:
            for found in filter(None, problems):
                raise found

        on_first_rank(raise_first, problem, group=self._group)


def check_device(config: CheckpointConfig, *, has_gpu: bool) -> None:
    """Raise ValueError for page-locked memory on a machine that cannot lock it."""
    if config.async_mode == "async_with_pinned_mem" and not has_gpu:
        raise ValueError(
            "async_mode='async_with_pinned_mem': page-locked memory needs a GPU; without one use 'async'"
        )


class _Background:
    """A thread that writes one checkpoint."""

    def __init__(self, path: Path, write: Callable[[], None], resources: ExitStack) -> None:
        self.path = path
        self._done: Future[None] = Future()
        # A daemon: one that hangs does not keep its process alive.
        threading.Thread(
            target=self._run, args=(write, resources), name=f"checkpoint {path.name}", daemon=True
        ).start()

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within that time; raises what it raised."""
        try:
            self._done.exception(timeout_s)
        except TimeoutError:
            return False
        self._done.result()
        return True

    def _run(self, write: Callable[[], None], resources: ExitStack) -> None:
        try:
            with resources:
                write()
        except BaseException as error:  # noqa: BLE001 - raised by the next call
            logger.error("%s", error)
            self._done.set_exception(error)
        else:
            self._done.set_result(None)


def _keep_latest(path: Path, k: int) -> None:
    """Remove all but the latest k steps beside a new one; step 0, the seed, stays."""
    steps = saved_steps(path.parent)
    if not k or path not in steps.values():
        return
    for step, folder in list(steps.items())[:-k]:
        if step == 0:
            continue
        try:
            remove(folder)
        except OSError as error:
            logger.warning("checkpoint %s could not be removed: %s", folder, error)


def _not_written(path: Path) -> str:
    return f"checkpoint {path} was not written, earlier ones are as they were"


@contextmanager
def _as_checkpoint_error(what: str) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{what}: {error}") from error
