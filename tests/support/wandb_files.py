"""Rows of an offline W&B run, read from its file of protobuf records in LevelDB's log format."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 32768
HEAD = 7
"""Length in bytes of a file's header, and of the header of each piece of a record: checksum, length, kind."""
FULL, FIRST, MIDDLE, LAST = range(1, 5)


def history(folder: Path) -> list[dict[str, Any]]:
    """Return all rows of the runs in a folder, oldest run first."""
    files = sorted(folder.glob("offline-run-*/run-*.wandb"))
    return [row for file in files for row in _rows(file)]


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    from wandb.proto.wandb_internal_pb2 import Record

    for data in _records(file.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {
                (item.key or ".".join(item.nested_key)): _value(item)
                for item in items
                if not (item.key or item.nested_key[0]).startswith("_")
            }


def _value(item: Any) -> Any:
    return json.loads(item.value_json)


def _records(data: bytes) -> Iterator[bytes]:
    assert data[:4] == b":W&B"
    at, parts = HEAD, b""
    while at + HEAD <= len(data):
        if BLOCK - at % BLOCK < HEAD:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEAD])
        parts += data[at + HEAD : at + HEAD + length]
        at += HEAD + length
        if kind in (FULL, LAST):
            yield parts
            parts = b""
