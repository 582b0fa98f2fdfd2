"""Compatibility of a checkpoint with the run that loads it: tensors, converters, tokenizer, reference policy.

The controller checks it on a model without memory before a run starts; the trainer checks it again on loading.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor

from rl.models.converter import ModelConverters
from rl.models.tokenizer import TokenizerFingerprint
from rl.training.checkpoint_files import SavedState
from rl.training.checkpoint_io import MODEL, OPTIMIZER, saved_names

TRAIN_STATE, RANDOM, DATALOADER, TOKENIZER = "train_state", "random", "dataloader", "tokenizer"
"""Names in `exclude_from_loading` that stand for no tensor."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Destination:
    """A converted model and its optimizer, into which a checkpoint is loaded."""

    tensors: Mapping[str, Tensor]
    """Tensors by the names that a checkpoint uses; they may be on the meta device."""
    converters: ModelConverters


def excluded(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a pattern is the name, a dotted prefix of the name, or a glob that matches the name."""
    return any(name == p or name.startswith(f"{p}.") or fnmatchcase(name, p) for p in patterns)


def matching_tensors(
    path: Path, saved: SavedState, into: Destination, *, model_only: bool, exclude: Sequence[str]
) -> dict[str, Tensor]:
    """Return the tensors of `into` to load: all that are not excluded, if names and shapes agree.

    Raises:
        ValueError: a tensor is missing, surplus or of another shape, converters have other settings, or a
            pattern in `exclude` matches nothing.
    """
    needed = {name: tuple(tensor.shape) for name, tensor in into.tensors.items()}
    there = {
        name: shape
        for name, shape in saved_names(path).items()
        if shape is not None and not (model_only and excluded(name, (OPTIMIZER,)))
    }
    names = {**needed, **there}
    _check_exclusions(path, list(names), model_only=model_only, exclude=exclude)
    needed, there = (
        {name: shape for name, shape in shapes.items() if not excluded(name, exclude)}
        for shapes in (needed, there)
    )
    differences = list(_converter_differences(saved, into.converters, names, exclude))
    differences += _tensor_differences(needed, there)
    if differences:
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise ValueError(
            f"checkpoint {path} does not fit this run: {'; '.join(differences[:3])}{more}. Give the run the "
            "model, converters and optimizer that it was made with, or add the parts that keep their state "
            f"({MODEL}.<tensor>, {OPTIMIZER}) to checkpoint.exclude_from_loading"
        )
    return {name: into.tensors[name] for name in needed}


def check_tokenizer(
    checkpoint: Path,
    saved: TokenizerFingerprint | None,
    present: TokenizerFingerprint | None,
    *,
    model_only: bool,
    exclude: Sequence[str],
) -> None:
    """Check that the run has the tokenizer that the checkpoint was trained with.

    A run that continues needs the same tokenizer and chat template; a run that takes only the weights needs
    the same token ids. An unknown tokenizer (None) is accepted.

    Raises:
        ValueError: the tokenizers differ.
    """
    if saved is None or present is None or excluded(TOKENIZER, exclude):
        return
    differences = saved.differences(present, tokens_alone=model_only)
    if differences:
        own = (
            "which has changed since" if saved.folder == present.folder else f"this run has {present.folder}"
        )
        raise ValueError(
            f"checkpoint {checkpoint} was made with the tokenizer of {saved.folder}, {own} "
            f"({', '.join(differences)} differs): give hf_assets_path a folder with the checkpoint's tokenizer "
            f"or, if the difference is intended, add {TOKENIZER} to checkpoint.exclude_from_loading"
        )


def reference_folder(
    noted: str | None, *, of: Path, present: str | None, exclude: Iterable[str]
) -> Path | None:
    """Return the folder of the reference policy's weights, or None if this run started from the same weights.

    Args:
        noted: start of the run that saved the checkpoint `of` (`SavedState.started_from`).
        present: start of this run.
        exclude: patterns that are not loaded from the checkpoint.

    Raises:
        ValueError: the weights are gone or unknown, or `exclude` keeps a part of the model.
    """
    if noted is not None and present in (noted, str(Path(noted).resolve())):
        return None
    if noted is not None and changes_weights(exclude):
        raise ValueError(
            f"exclude_from_loading={tuple(exclude)} with reference.enable=True: the reference policy is {noted}, "
            f"but part of the policy would stay as {present}: exclude no part of the model, or set "
            "reference.enable False"
        )
    if noted is None or not Path(noted).is_dir():
        problem = "several folders, which it does not name" if noted is None else f"{noted}, which is gone"
        raise ValueError(
            f"reference.enable=True: the run of {of} started from {problem}, so the reference policy's weights "
            "are unknown; start from the checkpoint with initial_load_model_only, which makes its weights the "
            "reference, or set reference.enable False"
        )
    return Path(noted)


def changes_weights(exclude: Iterable[str]) -> bool:
    """Return whether a pattern excludes a part of the model."""
    others = (OPTIMIZER, TRAIN_STATE, RANDOM, DATALOADER, TOKENIZER)
    return any(pattern.split(".")[0] not in others for pattern in exclude)


def _check_exclusions(path: Path, names: list[str], *, model_only: bool, exclude: Sequence[str]) -> None:
    others = (TOKENIZER,) if model_only else (TRAIN_STATE, RANDOM, DATALOADER, TOKENIZER)
    for pattern in exclude:
        if not any(excluded(name, (pattern,)) for name in (*names, *others)):
            raise ValueError(
                f"exclude_from_loading: {pattern!r} names nothing that would be loaded from {path}; valid "
                f"names are {', '.join((*others, *names[:3]))} ..."
            )


def _converter_differences(
    saved: SavedState, converters: ModelConverters, names: Iterable[str], exclude: Sequence[str]
) -> Iterator[str]:
    """Yield a difference in settings that change the meaning of a tensor that is loaded.

    Such tensors are those that converters added, or all if converters added none.
    """
    ours, theirs = converters.saved_settings(), saved.converters
    if ours == theirs:
        return
    plain = {f"{MODEL}.{name}" for name in (*converters.plain_names, *converters.plain_buffers)}
    of_model = [name for name in names if excluded(name, (MODEL,))]
    depending = [name for name in of_model if name not in plain] or of_model
    if not all(excluded(name, exclude) for name in depending):
        yield f"it was made with {_described(theirs)}, this run has {_described(ours)}"


def _tensor_differences(needed: Shapes, there: Shapes) -> Iterator[str]:
    for name, shape in needed.items():
        if name not in there:
            yield f"tensor {name} is missing, the run needs it with shape {list(shape)}"
        elif there[name] != shape:
            yield f"tensor {name} has shape {list(there[name])}, the run needs {list(shape)}"
    for name, shape in there.items():
        if name not in needed:
            yield f"tensor {name} of shape {list(shape)} has no place in the run"


def _described(converters: Mapping[str, Mapping[str, Any]]) -> str:
    described = (
        f"{name} ({', '.join(f'{field}={value}' for field, value in settings.items())})"
        for name, settings in converters.items()
    )
    return " and ".join(described) or "no converter that adds weights"
