"""The weights that training started from: where they are, and the reference policy that has them.

A checkpoint notes where they are, so that a run that is continued compares with the same reference policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rl.models.converters.peft_folder import is_peft_folder
from rl.models.hf import HFFolder
from rl.models.tokenizer_print import tokenizer_print
from rl.training.checkpoint_config import DATALOADER, RANDOM, TOKENIZER, TRAIN_STATE
from rl.training.checkpoint_files import (
    STATE,
    SavedState,
    check_contents,
    check_sizes,
    is_checkpoint,
    read_state,
)
from rl.training.checkpointer import Checkpointer
from rl.training.reference import ReferencePolicy
from rl.training.tokenizer_match import check_tokenizer
from rl.types import LoopPosition


class StartingWeights:
    """Loads checkpoints, and keeps the reference policy, where there is one, at the weights that the
    policy's training started from."""

    def __init__(
        self, folder: HFFolder | None, *, checkpointer: Checkpointer, reference: ReferencePolicy | None
    ) -> None:
        """`folder`: that the policy's weights are from; None: they were drawn from its seed."""
        seed = checkpointer.policy.training.seed
        self.origin: str | None = f"seed {seed}" if folder is None else str(folder.path.resolve())
        """None: the weights were not all from one folder."""
        self._tokenizer = None if folder is None else tokenizer_print(folder.path)
        self._checkpointer = checkpointer
        self._reference = reference

    def saved_state(
        self, policy_version: int, *, position: LoopPosition | None, model_only: bool
    ) -> SavedState:
        """Of the policy in training, for `Checkpointer.save`."""
        return SavedState(
            policy_version=policy_version,
            position=position,
            model_only=model_only,
            started_from=self.origin,
            tokenizer=self._tokenizer,
        )

    def load(
        self, folder: str, *, policy_version: int, model_only: bool, exclude: Sequence[str] | None
    ) -> int:
        """As `Checkpointer.load`, and the reference policy that goes with it.

        Raises:
            ValueError: beside what that raises, the tokenizer is another, the reference policy's weights are
                gone, or it is not known where they were; nothing was loaded.
        """
        config = self._checkpointer.config
        patterns = config.exclude_from_loading if exclude is None else tuple(exclude)
        continues = is_checkpoint(folder) and not model_only
        if is_checkpoint(folder):
            self._check_tokenizer(Path(folder).absolute(), model_only=model_only, exclude=patterns)
        if continues and self._reference is not None:
            self._load_reference(Path(folder).absolute(), patterns)
        version = self._checkpointer.load(
            folder, policy_version=policy_version, model_only=model_only, exclude=patterns
        )
        kept = is_checkpoint(folder) and changes_weights(patterns)
        if continues:
            noted = read_state(folder).started_from
            self.origin = noted if not kept or noted == self.origin else None
        else:
            self.origin = None if kept or is_peft_folder(Path(folder)) else str(Path(folder).resolve())
            if self._reference is not None:
                self._reference.follow(self._checkpointer.policy)
        return version

    def _check_tokenizer(self, checkpoint: Path, *, model_only: bool, exclude: Sequence[str]) -> None:
        check_contents(checkpoint, check_sizes(checkpoint), [STATE])
        saved = read_state(checkpoint).tokenizer
        check_tokenizer(checkpoint, saved, self._tokenizer, model_only=model_only, exclude=exclude)

    def _load_reference(self, checkpoint: Path, exclude: Sequence[str]) -> None:
        assert self._reference is not None
        noted = read_state(checkpoint).started_from
        if source := reference_folder(noted, of=checkpoint, present=self.origin, exclude=exclude):
            self._checkpointer.load_weights(source, self._reference.policy)


_NEW_COMPARISON = (
    "start from it with initial_load_model_only, which compares with the weights it has, or set "
    "reference.enable False"
)


def reference_folder(
    noted: str | None, *, of: Path, present: str | None, exclude: Iterable[str]
) -> Path | None:
    """The folder of the reference policy's weights, for a checkpoint that is continued; None: those that
    this run has started from.

    Args:
        noted: where the run that saved the checkpoint `of` started from.
        present: where this run has started from.
        exclude: what is not loaded from the checkpoint.

    Raises:
        ValueError: they are gone, or it is not known where they were.
    """
    if noted is None:
        raise ValueError(
            f"reference.enable=True: {of} does not name one folder that its run started from, whose weights "
            f"the reference policy has; {_NEW_COMPARISON}"
        )
    if present is not None and present in (noted, str(Path(noted).resolve())):
        return None
    started = f"the run of {of} started from {noted}, whose weights the reference policy has"
    if changes_weights(exclude):
        raise ValueError(
            f"exclude_from_loading={tuple(exclude)} with reference.enable=True: {started}, but part of the "
            f"policy would stay as this run starts, from {present}; exclude no part of the model, or set "
            "reference.enable False"
        )
    if not Path(noted).is_dir():
        raise ValueError(
            f"reference.enable=True: {started}, and which is not there; put it back, or {_NEW_COMPARISON}"
        )
    return Path(noted)


def changes_weights(exclude: Iterable[str]) -> bool:
    """Whether one of the patterns keeps part of the model, so that not all weights are the loaded ones."""
    others = ("optimizer", TRAIN_STATE, RANDOM, DATALOADER, TOKENIZER)
    return any(pattern.split(".")[0] not in others for pattern in exclude)
