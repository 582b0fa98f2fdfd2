"""Checkpoints of a policy with its optimizer, over torch.distributed.checkpoint.

A checkpoint appears atomically: all ranks write into a hidden folder, and the first rank adds the
manifest and renames the folder when every rank is done. Each rank writes one file; a checkpoint
opens in any layout.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from rl.config.configurable import Configurable
from rl.distributed.collectives import run_on_all_ranks, run_on_first_rank
from rl.models.files.folder_check import has_weights
from rl.models.files.hf import HFFolder
from rl.models.files.peft import is_peft_folder
from rl.models.files.tokenizer import compute_fingerprint
from rl.training.checkpoints.config import CheckpointConfig
from rl.training.checkpoints.files import (
    RANDOM,
    FileSum,
    SavedState,
    check_files,
    is_checkpoint,
    keep_latest,
    read_state,
    sum_of_file,
    write_description,
)
from rl.training.checkpoints.random_states import (
    name_random_file,
    pack_random_states,
    read_random_states,
)
from rl.training.checkpoints.tensors import (
    MODEL,
    REFERENCE,
    TRAIN_STATE,
    check_tokenizer,
    collect_model_tensors,
    collect_optimizer_tensors,
    is_excluded,
    match_tensors,
    read_tensors,
    write_tensors,
)
from rl.training.failures import CheckpointError, wrap_checkpoint_errors
from rl.training.optimizer import Optimizer
from rl.training.policy import Policy
from rl.training.reference import ReferencePolicy
from rl.types import LoopPosition
from rl.utils.files import publish_folder
from rl.utils.processes import process_states, restore_process_states

logger = logging.getLogger(__name__)


class Checkpointer(Configurable):
    """Saves and loads a policy in training; at most one save is in progress.

    Every rank has a checkpointer and calls the same methods in the same order.

    Example:
        checkpointer.save("checkpoints/step-40", policy_version=40, position=position, wait=False)
        ...                                   # training continues with step 41
        checkpointer.wait()                   # the folder checkpoints/step-40 is there
        version = checkpointer.load("checkpoints/step-40", policy_version=0)  # 40
    """

    Config: TypeAlias = CheckpointConfig

    def __init__(
        self,
        *,
        config: CheckpointConfig,
        policy: Policy,
        optimizer: Optimizer,
        reference: ReferencePolicy | None = None,
        assets: str | None = None,
    ) -> None:
        """`assets` is the folder of the tokenizer, which checkpoints record; None without one."""
        self.config = config
        self.policy = policy
        self.optimizer = optimizer
        self.reference = reference
        self._tokenizer = None if assets is None else compute_fingerprint(assets)
        # Background saves communicate while training does, so they have a process group of their
        # own.
        self._group: dist.ProcessGroup | None = None
        mesh = policy.mesh
        if mesh is not None:
            backend = "gloo" if policy.device.type == "cuda" else None
            self._group = dist.new_group(
                backend=backend, timeout=timedelta(seconds=config.timeout_s)
            )
        self._rank = 0 if mesh is None else dist.get_rank()
        layout = "1" if mesh is None else "x".join(str(size) for size in mesh.shape)
        self._random_file = name_random_file(layout=layout, rank=self._rank)

        self._pinned_stager: DefaultStager | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: tuple[Path, Future[None]] | None = None
        """Folder of the background save, and its end."""

    def save(
        self,
        folder: str | Path,
        *,
        policy_version: int,
        position: LoopPosition | None = None,
        model_only: bool = False,
        wait: bool = True,
    ) -> None:
        """Write a checkpoint.

        If its folder is named `step-<n>`, all but the latest few beside it are removed. A save in
        progress is waited for first, and its error raised.

        Args:
            folder: path on a file system that all ranks share.
            wait: False returns as soon as the weights may change again, if `async_mode` allows it.

        Raises:
            FileExistsError: the folder exists.
            CheckpointError: the checkpoint could not be written; nothing of it remains.
        """
        self.wait()
        started = time.perf_counter()
        path = Path(folder).absolute()
        saved = SavedState(
            policy_version=policy_version,
            model_only=model_only,
            position=position,
            converters=self.policy.converters.saved_settings(),
            base_model=self.policy.base_model,
            tokenizer=self._tokenizer,
        )

        # Random states are taken here, in the caller's thread, as the step left them.
        tensors = self.tensors(model_only=model_only)
        more = {} if model_only else {self._random_file: pack_random_states(process_states())}
        if wait or self.config.async_mode == "disabled":
            self._write(path, tensors, more, saved)
            return

        # Once the copy is there, the next step may change the weights.
        done = self._thread.submit(self._write_behind, path, self._copy(tensors), more, saved)
        self._pending = (path, done)
        logger.info("%s: training continues after %.3g s", path, time.perf_counter() - started)

    def wait(self) -> None:
        """Wait for the background save.

        Raises CheckpointError if it failed, or is in progress after `timeout_s`.
        """
        if self._pending is None:
            return
        path, done = self._pending
        try:
            done.exception(self.config.timeout_s)
        except TimeoutError:
            raise CheckpointError(
                f"checkpoint {path} is not written after "
                f"checkpoint.timeout_s={self.config.timeout_s:g}"
            ) from None
        self._pending = None
        done.result()

    def load(
        self,
        folder: str | Path,
        *,
        policy_version: int,
        model_only: bool = False,
        exclude: Sequence[str] | None = None,
    ) -> int:
        """Restore a checkpoint of any layout in place; return the policy version to continue with.

        A Hugging Face folder sets the weights, a PEFT folder the adapters; both start at version 0.
        Where the policy starts at version 0, the reference policy takes the same weights; otherwise
        it takes its own from the checkpoint.

        Args:
            policy_version: current version, which stays if `train_state` is excluded.
            model_only: load only the weights, reset the optimizer, and start at version 0.
            exclude: patterns that keep their state; None takes `exclude_from_loading`.

        Raises:
            DamagedCheckpointError: a file is missing, truncated or corrupted; nothing was loaded.
            ValueError: the checkpoint does not fit the run (`rl.training.checkpoints.tensors`).
            CheckpointError: the checkpoint could not be read.
        """
        self.wait()
        path = Path(folder).absolute()
        if not is_checkpoint(path):
            self._load_weights(path)
            return 0
        exclude = self.config.exclude_from_loading if exclude is None else tuple(exclude)

        # All checks come before the first tensor is read: a refused checkpoint changes nothing.
        saved = self._read_checked_state(path)
        tensors = self._match_tensors(path, saved, model_only=model_only, exclude=exclude)
        random = None
        if not (model_only or is_excluded(RANDOM, exclude)):
            random = run_on_all_ranks(
                partial(read_random_states, path / self._random_file), group=self._group
            )

        with wrap_checkpoint_errors(f"checkpoint {path} could not be read"):
            read_tensors(path, tensors, group=self._group)
        self.policy.mark_restored(_select_names(tensors, MODEL), base_model=saved.base_model)
        if self.reference is not None:
            self.reference.policy.mark_restored(_select_names(tensors, REFERENCE), base_model=None)

        # Last, so that nothing here draws numbers after it.
        if random is not None:
            restore_process_states(random)
        if model_only:
            self._start_anew()
            return 0
        return policy_version if is_excluded(TRAIN_STATE, exclude) else saved.policy_version

    def _match_tensors(
        self, path: Path, saved: SavedState, *, model_only: bool, exclude: Sequence[str]
    ) -> dict[str, Tensor]:
        """Return the tensors to fill from a checkpoint; raises ValueError if it does not fit."""
        if saved.model_only and not model_only:
            raise ValueError(f"checkpoint {path} holds only the model: load it with model_only")
        check_tokenizer(
            path, saved.tokenizer, self._tokenizer, model_only=model_only, exclude=exclude
        )
        into = self.tensors(model_only=model_only)
        return match_tensors(
            path,
            saved,
            into=into,
            elsewhere=self._list_elsewhere(into),
            converters=self.policy.converters,
            exclude=exclude,
        )

    def _load_weights(self, path: Path) -> None:
        if is_peft_folder(path) and not has_weights(path):
            self.policy.lora.load_peft(path)
        else:
            self.policy.load_hf(HFFolder(path))
        self._start_anew()

    def tensors(self, *, model_only: bool = False) -> dict[str, Tensor]:
        """Return what a checkpoint holds of this rank, without copying."""
        tensors = collect_model_tensors(self.policy.model)
        if not model_only:
            tensors |= collect_optimizer_tensors(self.policy.trained_parameters, self.optimizer)
            # The run's folder keeps the first weights nowhere else.
            if self.reference is not None:
                tensors |= collect_model_tensors(self.reference.policy.model, prefix=REFERENCE)
        return tensors

    def _list_elsewhere(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that only other ranks of a pipeline have."""
        pipeline = self.policy.pipeline
        if pipeline is None:
            return {}

        here = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        elsewhere: dict[str, tuple[int, ...]] = {}
        for shapes in pipeline.gather_from_all(here):
            elsewhere |= {name: shape for name, shape in shapes.items() if name not in here}
        return elsewhere

    def close(self) -> None:
        """Wait for the background save and free page-locked memory."""
        self.wait()
        self._thread.shutdown()
        if self._pinned_stager is not None:
            self._pinned_stager.close()
            self._pinned_stager = None

    def _copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a copy in host memory; page-locked memory is kept for the next save."""
        pinned = self.config.async_mode == "async_with_pinned_mem"
        stager = self._pinned_stager or DefaultStager(
            StagingOptions(
                use_pinned_memory=pinned,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=pinned,
            )
        )
        if pinned:
            self._pinned_stager = stager
        copied = stager.stage(dict(tensors))
        assert isinstance(copied, dict)
        return copied

    def _write(
        self,
        path: Path,
        tensors: Mapping[str, Tensor],
        more: Mapping[str, bytes],
        saved: SavedState,
    ) -> None:
        """Write a checkpoint; every rank returns, or raises, when the folder has its name."""
        started = time.perf_counter()
        not_written = f"checkpoint {path} was not written, earlier checkpoints are unchanged"
        with ExitStack() as hidden, wrap_checkpoint_errors(not_written):
            folder = run_on_first_rank(
                lambda _: hidden.enter_context(publish_folder(path)), None, group=self._group
            )
            files = write_tensors(folder, tensors, more=more, group=self._group)
            sums = {file.name: sum_of_file(file) for file in files}

            def complete(sums_of_ranks: Sequence[dict[str, FileSum]]) -> None:
                all_sums: dict[str, FileSum] = {}
                for sums_of_rank in sums_of_ranks:
                    all_sums |= sums_of_rank
                write_description(folder, saved, all_sums)
                hidden.close()  # Gives the folder its name.
                keep_latest(path, self.config.keep_latest_k)

            run_on_first_rank(complete, sums, group=self._group)
        num_bytes = sum(file.num_bytes for file in sums.values())
        logger.info("%s: %.3g GB in %.3g s", path, num_bytes / 1e9, time.perf_counter() - started)

    def _write_behind(self, *args: Any) -> None:
        """Write, and log an error at once; the next call raises it."""
        try:
            self._write(*args)
        except Exception as error:
            logger.error("background save failed: %s", error)
            raise

    def _read_checked_state(self, path: Path) -> SavedState:
        """Check every file, each rank its share of them, and return the saved state."""
        # Checksums read the whole checkpoint once, as fast as all ranks together can.
        num_ranks = 1 if self._group is None else dist.get_world_size(self._group)
        share = slice(self._rank, None, num_ranks)
        run_on_all_ranks(partial(check_files, path, tensors=True, share=share), group=self._group)
        return read_state(path)

    def _start_anew(self) -> None:
        self.optimizer.reset()
        if self.reference is not None:
            self.reference.follow(self.policy)


def _select_names(tensors: Mapping[str, Tensor], part: str) -> set[str]:
    """Return the names of a part's tensors, without the part."""
    prefix = f"{part}."
    return {name.removeprefix(prefix) for name in tensors if name.startswith(prefix)}
