"""Check of a GGUF file's header, before the package `gguf` reads it.

The package trusts every count: an array that claims 2^40 numbers keeps it busy for ever, whatever
the file's size.

    magic, version, number of tensors, number of settings
    settings    name, type, value; an array has the type and number of its values first
    tensors     name, number of dimensions, dimensions, type, offset
    data        from the next multiple of the alignment on
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any

MAX_VALUES = 1 << 22
"""Values of all arrays together; the largest vocabularies have 2^18 tokens and 2^19 merges."""
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value by its type: integers, floats and booleans."""
_STRING, _ARRAY, _UINT32 = 8, 9, 4
_MAX_DIMS = 4
_MIN_SETTING, _MIN_TENSOR = 13, 32
"""Bytes of the shortest setting, and of the shortest description of a tensor."""


def check_gguf_header(file: Path) -> None:
    """Raise ValueError, naming the first count or length that does not fit into the file."""
    if not file.stat().st_size:
        raise ValueError("it is empty")
    # Mapped, because a file may be larger than the memory, and only its begin is read.
    with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _Header(data).check()


class _Header:
    """Position in the header of a file; each method checks one part and moves on to the next."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0
        """Bytes read so far."""
        self._order = "<"
        """Byte order, as in `struct`."""
        self._num_values = 0

    def check(self) -> None:
        """Read the whole header; raise ValueError for the first part that cannot be."""
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self._skip(4, 1, "the header")
        # A version is small, so zeros are the upper bytes of a big-endian file.
        if self._data[4:6] == b"\0\0":
            self._order = ">"
        self._read_number("I", "version")
        num_tensors = self._read_number("Q", "number of tensors")
        num_settings = self._read_number("Q", "number of settings")

        self._check_fits(num_settings, _MIN_SETTING, "settings")
        alignment = 32
        for _ in range(num_settings):
            name = self._read_text("a setting's name")
            value = self._read_setting(name)
            if name == "general.alignment":
                alignment = value
        if not alignment or alignment & (alignment - 1):
            raise ValueError(f"general.alignment={alignment}: must be a power of 2")

        self._check_fits(num_tensors, _MIN_TENSOR, "tensors")
        tensors = [self._read_tensor() for _ in range(num_tensors)]
        # Offsets count from the end of the header, which is known only now.
        begin = -(-self._at // alignment) * alignment
        for name, offset, num_bytes in tensors:
            if begin + offset + num_bytes > len(self._data):
                raise ValueError(
                    f"tensor {name!r} ends at byte {begin + offset + num_bytes}, beyond the file's "
                    f"{len(self._data)}: the file is truncated"
                )

    def _read_setting(self, name: str) -> Any:
        """Return the value of a setting that is one number of 32 bits, and None for others."""
        kind = self._read_number("I", f"type of {name!r}")
        if kind == _UINT32:
            return self._read_number("I", repr(name))
        if kind == _STRING:
            self._read_text(repr(name))
        elif kind == _ARRAY:
            element = self._read_number("I", f"type of {name!r}")
            count = self._read_number("Q", f"length of {name!r}")
            # All arrays count together: many long arrays are as slow as one that is too long.
            self._num_values += count
            if self._num_values > MAX_VALUES:
                raise ValueError(
                    f"{name!r} has {count} values: all arrays must have at most {MAX_VALUES} "
                    "together"
                )
            if element == _STRING:
                self._check_fits(count, 8, f"texts of {name!r}")
                for _ in range(count):
                    self._read_text(f"a text of {name!r}")
            else:
                self._skip(self._get_size(element, name), count, f"values of {name!r}")
        else:
            self._skip(self._get_size(kind, name), 1, f"value of {name!r}")
        return None

    def _get_size(self, kind: int, name: str) -> int:
        if kind not in _SIZES:
            raise ValueError(f"{name!r} is of type {kind}, which is not supported")
        return _SIZES[kind]

    def _read_tensor(self) -> tuple[str, int, int]:
        """Return name, offset and number of bytes of a tensor."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self._read_text("a tensor's name")
        num_dims = self._read_number("I", f"number of dimensions of {name!r}")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise ValueError(
                f"tensor {name!r} has {num_dims} dimensions: must be from 1 to {_MAX_DIMS}"
            )
        dims = [self._read_number("Q", f"dimensions of {name!r}") for _ in range(num_dims)]
        kind = self._read_number("I", f"type of {name!r}")
        offset = self._read_number("Q", f"offset of {name!r}")
        if kind not in list(GGMLQuantizationType):
            raise ValueError(f"tensor {name!r} is of type {kind}, which is not supported")
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if dims[0] % block:
            raise ValueError(
                f"tensor {name!r} of shape {dims[::-1]}: rows must be multiples of {block}"
            )
        return name, offset, math.prod(dims) // block * size

    def _read_text(self, what: str) -> str:
        length = self._read_number("Q", f"length of {what}")
        begin = self._at
        self._skip(1, length, what)
        return self._data[begin : self._at].decode("utf-8", errors="replace")[:100]

    def _read_number(self, kind: str, what: str) -> int:
        begin, size = self._at, struct.calcsize(f"<{kind}")
        self._skip(size, 1, what)
        number: int = struct.unpack(self._order + kind, self._data[begin : self._at])[0]
        return number

    def _check_fits(self, count: int, size: int, what: str) -> None:
        if count * size > len(self._data) - self._at:
            raise ValueError(f"{what}: {count} do not fit into the file's {len(self._data)} bytes")

    def _skip(self, size: int, count: int, what: str) -> None:
        self._check_fits(count, size, what)
        self._at += size * count
