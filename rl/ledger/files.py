"""Files of a ledger: one Parquet file a step, whose name has its digest.

    ledger/000003-8f0c....parquet     {"version": 1, "step": 3, "previous": "41d2...", ...}

A row is a turn of a scored rollout, with all of its tokens as lists (`schema`). What is not of
turns, such as rewards and the trainer's sums, is JSON in the file's metadata. `previous` is the
digest of the file before, so that no file can be edited, removed or put in without a trace.

pyarrow is imported when it is needed: it takes a quarter of a second.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.utils.files import open_regular, read_regular, replace_file

VERSION = 1
METADATA = b"relay"
DIGEST_LETTERS = 32
_NAME = re.compile(r"(\d{6,})-([0-9a-f]{32})\.parquet")
FLOATS = ("logprobs", "advantages", "trainer_logprobs", "trainer_advantages")
OPTIONAL = ("proximal_logprobs", "reference_logprobs")
"""Columns of runs with several minibatches, and with a KL in the reward."""
GIVEN = "given_logprobs"
"""Column of steps of a Tinker session whose client gives other logprobs than were sampled."""
TINKER = "tinker"
"""Kind of the ledger of a model that a Tinker client trains; a run's has none."""


class LedgerError(ValueError):
    """A ledger that cannot be read."""


FOREIGN = (
    ValueError, LookupError, TypeError, AttributeError, ArithmeticError, ImportError, RuntimeError,
)  # fmt: skip
"""Errors of reading a file that is whole, as its name says, but not as a run writes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerFile:
    """A file of a ledger, by its name."""

    path: Path
    step: int
    digest: str


def list_files(folder: Path) -> list[LedgerFile]:
    """Return the files of a ledger in the order of their steps."""
    found = []
    for path in sorted(folder.glob("*.parquet")):
        name = _NAME.fullmatch(path.name)
        if name is not None:
            found.append(LedgerFile(path=path, step=int(name[1]), digest=name[2]))
    return sorted(found, key=lambda file: file.step)


def compute_digest(content: bytes) -> str:
    """Return the digest by which a file is named."""
    return hashlib.sha256(content).hexdigest()[:DIGEST_LETTERS]


def make_schema(*, optional: tuple[str, ...]) -> Any:
    """Return the columns of a file."""
    import pyarrow as pa

    name = pa.dictionary(pa.int32(), pa.string())
    columns = [
        # Places in the batch: of the group, and of the scored rollout in it.
        ("group", pa.int32()),
        ("member", pa.int32()),
        # Of the turn in its rollout, and of the turn before it; -1 for none.
        ("turn", pa.int32()),
        ("parent", pa.int32()),
        ("role", name),
        ("trained", pa.bool_()),
        ("cut_off", pa.bool_()),
        # Optimizer step of the batch, and row of the rollout, that train the turn; -1 for none.
        ("minibatch", pa.int32()),
        ("row", pa.int32()),
        ("generator", name),
        ("request", pa.string()),
        ("receipt", pa.binary(8)),
        ("reward", pa.float64()),
        ("prompt_ids", pa.dictionary(pa.int32(), pa.binary())),
        ("token_ids", pa.list_(pa.int32())),
        ("versions", pa.list_(pa.int32())),
        ("mask", pa.list_(pa.int8())),
        *((column, pa.list_(pa.float32())) for column in (*FLOATS, *optional)),
    ]
    return pa.schema(columns)


def write(folder: Path, table: Any, *, step: int, facts: Mapping[str, Any]) -> LedgerFile:
    """Write a step's file atomically; `facts` become its metadata. Raises OSError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Strict JSON, which any program can read.
    # A loss may be infinite, which is no reason to end a run: the check names it.
    text = json.dumps({"version": VERSION, "step": step, **facts})
    table = table.replace_schema_metadata({METADATA: text.encode()})
    floats = [name for name in table.column_names if name in (*FLOATS, *OPTIONAL, GIVEN)]
    # Bytes of floats in streams of their own compress by a fifth more than floats in a row do.
    encoding = {f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in floats}
    by_dictionary = [
        "role", "generator", "prompt_ids",
        "versions.list.element", "mask.list.element", "token_ids.list.element",
    ]  # fmt: skip
    buffer = pa.BufferOutputStream()
    pq.write_table(
        table, buffer, compression="zstd", use_dictionary=by_dictionary, column_encoding=encoding,
        write_statistics=False,
    )  # fmt: skip
    # In memory first: the name is the digest of the whole.
    content = buffer.getvalue().to_pybytes()
    digest = compute_digest(content)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{step:06}-{digest}.parquet"
    with replace_file(path) as temporary:
        temporary.write_bytes(content)
    return LedgerFile(path=path, step=step, digest=digest)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepRecord:
    """What a ledger has of a step."""

    file: LedgerFile
    facts: Mapping[str, Any]
    table: Any


def read(file: LedgerFile) -> StepRecord:
    """Read a file; raise LedgerError if it is damaged, not the named one, or of another version."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    content = read_regular(file.path)
    # Before it is parsed: what is not the named content may be anything.
    found = compute_digest(content)
    if found != file.digest:
        raise LedgerError(
            f"{file.path.name}: its content has the digest {found}: it was edited or cut off"
        )
    try:
        # Threads of Arrow abort a process that ends while they still start; `read_table` has some.
        table = pq.ParquetFile(pa.BufferReader(content)).read(use_threads=False)
        facts = json.loads(table.schema.metadata[METADATA])
    except (pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise LedgerError(f"{file.path.name} is no file of a ledger: {error}") from None
    if facts.get("version") != VERSION:
        raise LedgerError(
            f"{file.path.name} is of version {facts.get('version')!r} of the ledger: this program "
            f"reads version {VERSION}"
        )
    return StepRecord(file=file, facts=facts, table=table)


def read_columns(file: LedgerFile, names: Sequence[str]) -> dict[str, list[Any]]:
    """Return some columns of a file by name; raise LedgerError if it is damaged.

    Quick, because the rest is not read; so the digest is not checked either.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Mapped, because Arrow reads files of Python in a thread.
        with open_regular(file.path) as content:
            mapped = mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ)
        columns = pq.ParquetFile(pa.BufferReader(mapped))
        table = columns.read(columns=list(names), use_threads=False)
        return {name: table[name].to_pylist() for name in names}
    except (pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise LedgerError(f"it is no file of a ledger: {error}") from None


def read_all(folder: Path) -> Iterator[StepRecord]:
    """Yield the steps of a ledger one after another; raises LedgerError as `read`."""
    return map(read, list_files(folder))
