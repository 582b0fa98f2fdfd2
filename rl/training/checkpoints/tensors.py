"""Tensors of a checkpoint: their names, whether they fit a run, reading and writing.

The controller checks that a checkpoint fits on a model without memory before a run starts; the
trainer checks it again on loading. torch.distributed.checkpoint reads and writes.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
import torch.futures
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from rl.distributed.sharding import unwrap
from rl.models.converter import ModelConverters
from rl.models.decoder import find_persistent_buffers
from rl.models.files.tokenizer import TokenizerFingerprint
from rl.training.checkpoints.files import METADATA, RANDOM, SavedState
from rl.training.checkpoints.metadata import SavedTensors, read_saved_tensors
from rl.training.optimizer import Optimizer

MODEL, OPTIMIZER, REFERENCE = "model", "optimizer", "reference"
"""First part of the name of every saved tensor."""
TRAIN_STATE, DATALOADER, TOKENIZER, PROBLEMS = "train_state", "dataloader", "tokenizer", "problems"
"""Names in `exclude_from_loading`, besides `RANDOM`, that stand for no tensor."""

Shapes = Mapping[str, tuple[int, ...]]


def collect_model_tensors(model: nn.Module, *, prefix: str = MODEL) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by their names in a checkpoint, without copying."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"{prefix}.{name}"] = unwrap(parameter.data)
    for name, buffer in find_persistent_buffers(model).items():
        tensors[f"{prefix}.{name}"] = buffer
    return tensors


def collect_optimizer_tensors(
    trained: Mapping[str, nn.Parameter], optimizer: Optimizer
) -> dict[str, Tensor]:
    """Return the optimizer's state by its names in a checkpoint, without copying."""
    states = optimizer.state_tensors()
    tensors: dict[str, Tensor] = {}
    for name, parameter in trained.items():
        for key, tensor in states[parameter].items():
            tensors[f"{OPTIMIZER}.{name}.{key}"] = tensor
    return tensors


def select_own_exclusions(patterns: Iterable[str], *, model_only: bool) -> tuple[str, ...]:
    """Return what a run may leave out of its own checkpoint: what is compared, or unreadable."""
    parts = (TOKENIZER,) if model_only else (TOKENIZER, RANDOM)
    return tuple(part for part in parts if is_excluded(part, patterns))


def is_excluded(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a pattern is the name, a dotted prefix of it, or a glob that matches it.

    Example:
        excluded("model.norm.weight", ("model",))                  # True
        excluded("model.layers.3.norm.weight", ("model.*.norm*",)) # True
        excluded("model.normal", ("model.norm",))                  # False
    """
    return any(name == p or name.startswith(f"{p}.") or fnmatchcase(name, p) for p in patterns)


def match_tensors(
    path: Path,
    saved: SavedState,
    *,
    into: Mapping[str, Tensor],
    converters: ModelConverters,
    exclude: Sequence[str],
    elsewhere: Shapes = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Return the tensors of `into` to load: all that are not excluded, if names and shapes agree.

    Args:
        into: tensors of a converted model, its optimizer and its reference by the names that a
            checkpoint uses; they may be on the meta device. Parts of the checkpoint that are not in
            `into` are ignored.
        elsewhere: shapes of tensors that other ranks load.

    Raises:
        ValueError: a tensor is missing, surplus or of another shape, converters have other
            settings, random states are pickles, or a pattern in `exclude` matches nothing.
    """
    needed: Shapes = {name: tuple(tensor.shape) for name, tensor in into.items()} | dict(elsewhere)
    parts = {name.split(".")[0] for name in into}
    tensors = read_saved_tensors(path)
    others: tuple[str, ...] = (TOKENIZER,)
    # A run that takes only the weights compares nothing else.
    if parts != {MODEL}:
        _check_random_states(path, tensors, exclude=exclude)
        others = (TRAIN_STATE, RANDOM, DATALOADER, TOKENIZER, PROBLEMS)

    there: Shapes = {
        name: shape for name, shape in tensors.shapes.items() if name.split(".")[0] in parts
    }
    names = {**needed, **there}
    _check_exclusions(path, [*others, *names], exclude=exclude)

    needed, there = _drop_excluded(needed, exclude), _drop_excluded(there, exclude)
    differences = list(_find_converter_differences(saved, converters, names, exclude))
    differences += _find_tensor_differences(needed, there)
    if differences:
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise ValueError(
            f"checkpoint {path} does not fit this run: {'; '.join(differences[:3])}{more}. Give "
            "the run the model, converters and optimizer that it was made with, or add the parts "
            f"that keep their state ({MODEL}.<tensor>, {OPTIMIZER}, {REFERENCE}) to "
            "checkpoint.exclude_from_loading"
        )
    return {name: into[name] for name in needed if name in into}


def check_tokenizer(
    checkpoint: Path,
    saved: TokenizerFingerprint | None,
    present: TokenizerFingerprint | None,
    *,
    model_only: bool,
    exclude: Sequence[str],
) -> None:
    """Raise ValueError unless the run has the tokenizer that the checkpoint was trained with.

    A run that continues needs the same tokenizer and chat template; a run that takes only the
    weights needs the same token ids. An unknown tokenizer (None) is accepted.
    """
    if saved is None or present is None or is_excluded(TOKENIZER, exclude):
        return
    differences = saved.find_differences(present, tokens_alone=model_only)
    if differences:
        raise ValueError(
            f"checkpoint {checkpoint} was made with the tokenizer of {saved.folder}, this run has "
            f"{present.folder} ({', '.join(differences)} differs): give hf_assets_path a folder "
            f"with the checkpoint's tokenizer, or add {TOKENIZER} to "
            "checkpoint.exclude_from_loading"
        )


def _check_random_states(path: Path, tensors: SavedTensors, *, exclude: Sequence[str]) -> None:
    if tensors.pickled and not is_excluded(RANDOM, exclude):
        raise ValueError(
            f"checkpoint {path} is of an older version, which kept random states as pickles: they "
            f"are not read, as a pickle can run code; add {RANDOM} to "
            "checkpoint.exclude_from_loading to continue with fresh ones"
        )


def _drop_excluded(shapes: Shapes, exclude: Sequence[str]) -> Shapes:
    return {name: shape for name, shape in shapes.items() if not is_excluded(name, exclude)}


def _check_exclusions(path: Path, names: Sequence[str], *, exclude: Sequence[str]) -> None:
    """Raise ValueError for a pattern that excludes nothing, which is most likely misspelt."""
    for pattern in exclude:
        if not any(is_excluded(name, (pattern,)) for name in names):
            raise ValueError(
                f"exclude_from_loading: {pattern!r} names nothing that would be loaded from "
                f"{path}; valid names are {', '.join(names[:7])} ..."
            )


def _find_converter_differences(
    saved: SavedState, converters: ModelConverters, names: Iterable[str], exclude: Sequence[str]
) -> Iterator[str]:
    """Yield a difference in settings that change the meaning of a tensor that is loaded.

    Such tensors are those that converters added, or all if converters added none.
    """
    # Two adapters with different alpha have tensors of the same names and shapes.
    ours, theirs = converters.saved_settings(), saved.converters
    if ours == theirs:
        return

    plain = {f"{MODEL}.{name}" for name in (*converters.plain_names, *converters.plain_buffers)}
    of_model = [name for name in names if is_excluded(name, (MODEL,))]
    depending = [name for name in of_model if name not in plain] or of_model
    if not all(is_excluded(name, exclude) for name in depending):
        yield f"it was made with {_describe(theirs)}, this run has {_describe(ours)}"


def _find_tensor_differences(needed: Shapes, there: Shapes) -> Iterator[str]:
    for name, shape in needed.items():
        if name not in there:
            yield f"tensor {name} is missing, the run needs it with shape {list(shape)}"
        elif there[name] != shape:
            yield f"tensor {name} has shape {list(there[name])}, the run needs {list(shape)}"
    for name, shape in there.items():
        if name not in needed:
            yield f"tensor {name} of shape {list(shape)} has no place in the run"


def _describe(converters: Mapping[str, Mapping[str, Any]]) -> str:
    texts: list[str] = []
    for name, settings in converters.items():
        fields = ", ".join(f"{field}={value}" for field, value in settings.items())
        texts.append(f"{name} ({fields})")
    return " and ".join(texts) or "no converter that adds weights"


def write_tensors(
    folder: Path,
    state: Mapping[str, Tensor],
    *,
    more: Mapping[str, bytes],
    group: dist.ProcessGroup | None,
) -> list[Path]:
    """Write the tensors of all ranks and return this rank's files.

    Args:
        more: content of further files of this rank, by their names.

    Raises:
        OSError: of the first rank that failed, on every rank.
    """
    rank = 0 if group is None else dist.get_rank(group)
    with raise_plain_errors():
        state_dict_saver.save(
            dict(state),
            storage_writer=_Writer(folder, more),
            process_group=group,
            no_dist=group is None,
        )
    # Each rank sums its own files, so that no file is read by another host.
    files = [*folder.glob(f"__{rank}_*"), *(folder / name for name in more)]
    return [*files, folder / METADATA] if rank == 0 else files


def read_tensors(
    folder: Path, state: Mapping[str, Tensor], *, group: dist.ProcessGroup | None
) -> None:
    """Fill the tensors of `state` in place; raises ValueError for files that hold other data."""
    into: dict[str, Any] = dict(state)
    try:
        with raise_plain_errors():
            state_dict_loader.load(
                into, storage_reader=_Reader(folder), process_group=group, no_dist=group is None
            )
    except (
        pickle.UnpicklingError,
        AssertionError,
        AttributeError,
        EOFError,
        LookupError,
        TypeError,
    ) as error:
        # PyTorch reads the tensors with `weights_only`.
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"its files hold other data than {METADATA} says: {reason}") from error


@contextmanager
def raise_plain_errors() -> Iterator[None]:
    """Raise the first failed rank's own error on all ranks."""
    # The filter stays: removing it would race with other threads.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        cause.add_note(f"on rank {rank} of the trainer")
        raise cause from error


class _Reader(FileSystemReader):
    """Reader that runs nothing: only tensors are in the metadata.

    Other objects PyTorch would unpickle.
    """

    def read_metadata(self) -> Metadata:  # of the whole checkpoint only
        return read_saved_tensors(Path(self.path)).metadata


class _Writer(FileSystemWriter):
    """Writer of a rank's tensors and further files."""

    def __init__(self, folder: Path, more: Mapping[str, bytes]) -> None:
        super().__init__(folder)
        self._more = {folder / name: content for name, content in more.items()}

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        # Here, because an error of one rank is raised on all ranks.
        for file, content in self._more.items():
            file.write_bytes(content)
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:  # torch.save hides the disk's error.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise
