"""The file `.metadata` of a checkpoint, read without running anything that it names.

torch.distributed.checkpoint pickles the names, sizes and places of all tensors into it. A pickle
may name any function to be called, so the file is read into records without behaviour, which are
then checked and translated.
"""

from __future__ import annotations

import pickle
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from rl.training.checkpoints.files import METADATA, RANDOM, DamagedCheckpointError
from rl.training.compat import UNPICKLER_METHODS, PythonUnpickler, StorageInfo

_OF_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = frozenset(
    {
        (_OF_METADATA, "Metadata"),
        (_OF_METADATA, "MetadataIndex"),
        (_OF_METADATA, "TensorStorageMetadata"),
        (_OF_METADATA, "BytesStorageMetadata"),
        (_OF_METADATA, "ChunkStorageMetadata"),
        (_OF_METADATA, "TensorProperties"),
        (_OF_METADATA, "StorageMeta"),
        (_OF_METADATA, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
    }
)
"""Classes and functions that the file of an honest checkpoint names, besides `torch.Size` and
dtypes.
"""
_LOAD = UNPICKLER_METHODS
"""Methods by code of a pickle."""
_UNUSED_CODES = (
    pickle.DICT + pickle.EMPTY_SET + pickle.ADDITEMS + pickle.FROZENSET + pickle.BYTEARRAY8
)
"""Codes of a pickle, not used by checkpoints, that hash content or take memory before there is any.
"""
_DATA_FILE = re.compile(r"__\d+_\d+\.distcp")
_MALFORMED = (
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    ImportError,
    IndexError,
    KeyError,
    MemoryError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)
"""What an unpickler raises for content that is no pickle, or one of other objects."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensors:
    """What a checkpoint holds."""

    metadata: Metadata
    """Names, sizes and places of the tensors, and of nothing else."""
    pickled: tuple[str, ...]
    """Names of random states, which checkpoints of older versions hold as pickles."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor by name."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, entry in self.metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                shapes[name] = tuple(entry.size)
        return shapes


def read_saved_tensors(folder: str | Path) -> SavedTensors:
    """Read what a checkpoint holds.

    Raises:
        DamagedCheckpointError: the file is missing, or not what a checkpoint has.
        ValueError: the file names a class that no checkpoint needs; nothing of the file has run.
    """
    file = Path(folder) / METADATA
    try:
        content = file.read_bytes() if file.is_file() else None
    except OSError as error:
        raise ValueError(f"checkpoint file {file} cannot be read: {error.strerror}") from error
    if content is None:
        raise DamagedCheckpointError(f"checkpoint file {file} is missing")
    unpickler = _Unpickler(content, file=file)
    try:
        return _translate(unpickler.load())
    except _ForeignClassError:
        raise
    except _MALFORMED as error:
        raise DamagedCheckpointError(
            f"checkpoint file {file} is corrupted: {type(error).__name__}: {error}"
        ) from error


class _ForeignClassError(ValueError):
    """A class or function that no checkpoint needs."""


class _Record:
    """Fields of one object in the file; a class of records stands for each class of the file."""

    fields: Any = None

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, fields: Any) -> None:
        self.fields = fields


class _Unpickler(PythonUnpickler):
    """Unpickler that makes records of known classes, and refuses all others.

    The one in Python: only there keys can be checked before they are hashed, which takes for ever
    for tuples that hold one tuple twice, which holds another twice, and so on.
    """

    dispatch: ClassVar[Any] = {
        code: load for code, load in _LOAD.items() if code not in _UNUSED_CODES
    }
    stack: list[Any]

    def __init__(self, content: bytes, *, file: Path) -> None:
        super().__init__(BytesIO(content))
        self._file = file
        # Made anew for each file: a pickle may set attributes of the classes that it gets.
        self._records = {names: type(names[1], (_Record,), {}) for names in _RECORDS}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._records:
            return self._records[module, name]
        # The only values that are used as they are: they have no behaviour that a file can reach.
        if module == "torch" and name.isidentifier():
            value = getattr(torch, name, None)
            if value is torch.Size or isinstance(value, torch.dtype):
                return value
        raise _ForeignClassError(
            f"checkpoint file {self._file} names {f'{module}.{name}'[:200]!r}, which a checkpoint "
            "has no use for and which is not run: it was damaged, or made to attack you; load no "
            "file of its folder"
        )

    def _set_item(self) -> None:
        # On the stack of a pickle a key lies below its value.
        _check_keys(self.stack[-2:-1])
        _LOAD[pickle.SETITEM[0]](self)

    def _set_items(self) -> None:
        # Keys and values alternate.
        _check_keys(self.stack[::2])
        _LOAD[pickle.SETITEMS[0]](self)

    dispatch |= {pickle.SETITEM[0]: _set_item, pickle.SETITEMS[0]: _set_items}

    def persistent_load(self, _: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to an object outside of the file")


def _check_keys(keys: Sequence[Any]) -> None:
    """Raise TypeError for a key whose hash may take for ever."""
    for key in keys:
        if not isinstance(key, str | _Record):
            raise TypeError(f"a key is a {type(key).__name__}")


def _translate(content: Any) -> SavedTensors:
    """Return what the records describe; raise one of `_MALFORMED` for anything else."""
    fields = _get_fields(content, "Metadata")
    tensors: dict[str, STORAGE_TYPES] = {}
    pickled: dict[str, None] = {}
    for name, entry in _check_dict(fields["state_dict_metadata"]).items():
        # Of random states in an old checkpoint only the names are kept, for a message.
        if type(entry).__name__ == "BytesStorageMetadata" and _check_text(name).startswith(
            f"{RANDOM}."
        ):
            pickled[name] = None
        else:
            tensors[_check_text(name)] = _translate_tensor(entry)

    places: dict[MetadataIndex, StorageInfo] = {}
    for index, place in _check_dict(fields["storage_data"]).items():
        of_index = _get_fields(index, "MetadataIndex")
        name = _check_text(of_index["fqn"])
        if name not in pickled:
            offset = of_index.get("offset")
            of_tensor = MetadataIndex(name, None if offset is None else _check_size(offset))
            places[of_tensor] = _translate_place(place)
    return SavedTensors(
        metadata=Metadata(state_dict_metadata=tensors, storage_data=places), pickled=tuple(pickled)
    )


def _translate_tensor(entry: Any) -> TensorStorageMetadata:
    fields = _get_fields(entry, "TensorStorageMetadata")
    properties = fields["properties"]
    _check_kind(properties, "TensorProperties")
    # Pickled as a tuple that begins with the dtype; the rest says how the tensor lay in memory.
    dtype, *_ = properties.fields
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{type(dtype).__name__} in place of a dtype")
    chunks = []
    for chunk in fields["chunks"]:
        of_chunk = _get_fields(chunk, "ChunkStorageMetadata")
        chunks.append(
            ChunkStorageMetadata(
                offsets=_check_size(of_chunk["offsets"]), sizes=_check_size(of_chunk["sizes"])
            )
        )
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype), size=_check_size(fields["size"]), chunks=chunks
    )


def _translate_place(entry: Any) -> StorageInfo:
    """Return where a piece of a tensor lies: in a file beside `.metadata`, as it is."""
    fields = _get_fields(entry, "_StorageInfo")
    name, offset, length = fields["relative_path"], fields["offset"], fields["length"]
    # A path would let a checkpoint read any file that the trainer may read.
    if not _DATA_FILE.fullmatch(_check_text(name)):
        raise ValueError(f"a tensor is in {name[:200]!r}, which is no file of a checkpoint")
    if fields.get("transform_descriptors"):
        raise ValueError(f"{name} is compressed or changed in another way")
    (offset, length) = _check_size((offset, length))
    return StorageInfo(relative_path=name, offset=offset, length=length)


def _check_kind(value: Any, kind: str) -> None:
    if not isinstance(value, _Record) or type(value).__name__ != kind:
        raise TypeError(f"{type(value).__name__} in place of {kind}")


def _get_fields(value: Any, kind: str) -> dict[str, Any]:
    _check_kind(value, kind)
    return _check_dict(value.fields)


def _check_dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{type(value).__name__} in place of dict")
    return value


def _check_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} in place of str")
    return value


def _check_size(value: Any) -> torch.Size:
    # By type and not by isinstance, as True and False are instances of int.
    if not isinstance(value, tuple) or not all(
        type(number) is int and number >= 0 for number in value
    ):
        raise TypeError("a size is not a tuple of numbers from 0 up")
    return torch.Size(value)
