"""Whether a checkpoint holds the tensors of a model and its optimizer, and if not, what the difference is.

Asked before a run starts, of a model without memory, and again by the trainer that loads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rl.models.converters.converter import ModelConverters
from rl.training.checkpoint import MODEL, OPTIMIZER, saved_names
from rl.training.checkpoint_config import DATALOADER, RANDOM, TOKENIZER, TRAIN_STATE, excluded
from rl.training.checkpoint_files import SavedState

_OPTIMIZERS = {"momentum_buffer": "Muon", "exp_avg": "Adam or AdamW"}
"""By a tensor that only their state has; Muon's is beside one of AdamW."""
_EXPERTS = ".experts."
"""In the names of what only a mixture has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Destination:
    """What a checkpoint is loaded into."""

    tensors: Mapping[str, Tensor]
    """Of the converted model and its optimizer, as `rl.training.checkpoint` names them; perhaps on the
    meta device."""
    converters: ModelConverters
    """Of the model."""


Shapes = Mapping[str, tuple[int, ...]]


def matching_tensors(
    path: Path, saved: SavedState, into: Destination, *, model_only: bool, exclude: Sequence[str]
) -> dict[str, Tensor]:
    """The tensors of `into` that are loaded: all but the excluded, each saved in its shape, and no others.

    Raises:
        ValueError: names the first that is not so with its shapes, what the checkpoint was made with and what
            to do; or what `exclude` names that is not there.
    """
    needed = {name: tuple(tensor.shape) for name, tensor in into.tensors.items()}
    there = {
        name: shape
        for name, shape in saved_names(path).items()
        if shape is not None and not (model_only and excluded(name, (OPTIMIZER,)))
    }
    _check_exclusions(path, [*needed, *there], model_only=model_only, exclude=exclude)
    depending = _depending_on(into.converters, _part({**needed, **there}, MODEL))
    needed, there = (
        {name: shape for name, shape in shapes.items() if not excluded(name, exclude)}
        for shapes in (needed, there)
    )
    if not all(excluded(name, exclude) for name in depending):
        _check_converters(
            path, saved, into.converters, needed=_part(needed, MODEL), there=_part(there, MODEL)
        )
    _check_model(path, needed=_part(needed, MODEL), there=_part(there, MODEL))
    _check_optimizer(path, needed=_part(needed, OPTIMIZER), there=_part(there, OPTIMIZER))
    return {name: into.tensors[name] for name in needed}


def _check_exclusions(path: Path, names: list[str], *, model_only: bool, exclude: Sequence[str]) -> None:
    others = (TOKENIZER,) if model_only else (TRAIN_STATE, RANDOM, DATALOADER, TOKENIZER)
    for pattern in exclude:
        if not any(excluded(name, (pattern,)) for name in (*names, *others)):
            raise ValueError(
                f"exclude_from_loading: {pattern!r} names nothing that would be loaded from {path}; there "
                f"are {', '.join((*others, *names[:3]))} ..."
            )


def _depending_on(converters: ModelConverters, names: Iterable[str]) -> list[str]:
    """The tensors whose meaning may depend on converters: what they added or, if that is nothing, all."""
    plain = {f"{MODEL}.{name}" for name in (*converters.plain_names, *converters.plain_buffers)}
    return [name for name in names if name not in plain] or list(names)


def _check_converters(
    path: Path, saved: SavedState, converters: ModelConverters, *, needed: Shapes, there: Shapes
) -> None:
    ours, theirs = converters.saved_settings(), saved.converters
    if ours == (theirs or {}):
        return
    advice = (
        "; give the run the same converters, or start from the other's weights as a Hugging Face folder, "
        "merged, with initial_load_in_hf"
    )
    if theirs is None:
        raise ValueError(
            f"checkpoint {path} does not say with which converters it was made, this run has "
            f"{_described(ours)}{advice}"
        )
    problem = next(_mismatches(needed, there), None)
    first = "" if problem is None else f"; {problem}"
    raise ValueError(f"checkpoint {path} was made with {_difference(theirs, ours)}{first}{advice}")


def _check_model(path: Path, *, needed: Shapes, there: Shapes) -> None:
    for problem in _mismatches(needed, there):
        difference = "another architecture or size"
        if _has_experts(there) != _has_experts(needed):
            has, has_not = "a mixture of experts", "a dense model"
            saved, ours = (has, has_not) if _has_experts(there) else (has_not, has)
            difference = f"another architecture, {saved}, and this run's is {ours}"
        raise ValueError(
            f"checkpoint {path}: {problem}: a checkpoint of {difference}; choose the config that it was made "
            "with, or name in exclude_from_loading what is to stay as it is"
        )


def _check_optimizer(path: Path, *, needed: Shapes, there: Shapes) -> None:
    for problem in _mismatches(needed, there):
        saved, ours = _optimizer_of(there), _optimizer_of(needed)
        difference = (
            f"it was made with {saved}, this run has {ours}"
            if saved != ours
            else f"{saved} stepped other parameters than this run's does"
        )
        raise ValueError(
            f"checkpoint {path}: {problem}: {difference}; take the same optimizer.name and converters, "
            f"or add {OPTIMIZER} to exclude_from_loading, and its state starts anew"
        )


def _mismatches(needed: Shapes, there: Shapes) -> Iterator[str]:
    for name, shape in needed.items():
        if name not in there:
            yield f"tensor {name} is missing, the model needs it of shape {list(shape)}"
        elif there[name] != shape:
            yield f"tensor {name} has shape {list(there[name])}, the model needs {list(shape)}"
    for name, shape in there.items():
        if name not in needed:
            yield f"tensor {name} has no place in the model, its shape is {list(shape)}"


def _part(shapes: Shapes, part: str) -> Shapes:
    return {name: shape for name, shape in shapes.items() if excluded(name, (part,))}


def _has_experts(names: Iterable[str]) -> bool:
    return any(_EXPERTS in name for name in names)


def _optimizer_of(names: Iterable[str]) -> str:
    keys = {name.rpartition(".")[2] for name in names}
    if not keys:
        return "no optimizer state"
    known = (optimizer for key, optimizer in _OPTIMIZERS.items() if key in keys)
    return next(known, f"an optimizer whose state is {', '.join(sorted(keys))}")


def _difference(theirs: Mapping[str, Mapping[str, Any]], ours: Mapping[str, Mapping[str, Any]]) -> str:
    if theirs.keys() != ours.keys():
        return f"{_described(theirs)}, this run has {_described(ours)}"
    fields = [
        (f"{name}.{field}", theirs[name].get(field), ours[name].get(field))
        for name in theirs
        for field in {**theirs[name], **ours[name]}
    ]
    return ", ".join(f"{field}={saved}, this run has {own}" for field, saved, own in fields if saved != own)


def _described(converters: Mapping[str, Mapping[str, Any]]) -> str:
    described = (
        f"{name} ({', '.join(f'{field}={value}' for field, value in settings.items())})"
        for name, settings in converters.items()
    )
    return " and ".join(described) or "no converter that adds weights"
