"""What a checkpoint is on the disk, besides its tensors. Needs no PyTorch.

    checkpoints/
        step-10/
            __0_0.distcp  __1_0.distcp  .metadata    tensors, by torch.distributed.checkpoint
            state.json                               `SavedState`
            loop.pickle                              an attachment: the rest of the loop's state
            manifest.json                            size and checksum of each of the others
        hf/                                          a Hugging Face folder

A folder gets its name when all of it is on the disk, so whatever is under a name was whole once.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from rl.models.tokenizer_print import TokenizerPrint, read_tokenizer_print
from rl.types import LoopPosition

FORMAT = 1
MANIFEST, STATE = "manifest.json", "state.json"
TENSORS_SUFFIX, METADATA = ".distcp", ".metadata"
"""Of the large files, and the name of the one that says what is where in them."""
HF_FOLDER = "hf"
"""Beside the steps: the last weights as a Hugging Face folder."""
ADAPTER_FOLDER = "adapter"
"""Beside the steps: the last adapters of LoRA, in PEFT's format."""

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_CHUNK_BYTES = 1 << 20


DAMAGED = ".damaged"
"""Ends the name of a checkpoint that was set aside."""


class DamagedCheckpointError(ValueError):
    """A file of a checkpoint is missing, or not what was written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedState:
    """What a checkpoint knows besides tensors and random states."""

    policy_version: int
    model_only: bool
    """Without optimizer and random states: to start from, not to continue."""
    position: LoopPosition | None
    """Of the loop that saved; None where none did."""
    converters: dict[str, dict[str, Any]] | None = None
    """Settings of the trainer's converters that the meaning of the weights depends on, as
    `ModelConverters.saved_settings`; None where a version saved that did not note them."""
    base_model: str | None = None
    """Hugging Face folder that the frozen weights came from, as `Policy.base_model`."""
    started_from: str | None = None
    """The folder of the weights that training started from, or the seed that they were drawn from, as
    `StartingWeights.origin`; None: not one folder, or a version saved that did not note it."""
    tokenizer: TokenizerPrint | None = None
    """Of the run; None: it had none, or a version saved that did not note it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSum:
    """A file as it was written."""

    num_bytes: int
    crc32: int


def step_folder(folder: str | Path, step: int) -> Path:
    """Where a run keeps the checkpoint of a step."""
    return Path(folder) / f"step-{step}"


def saved_steps(folder: str | Path) -> dict[int, Path]:
    """Checkpoints of a folder by step, in order; none where there is no such folder."""
    folder = Path(folder)
    if not folder.is_dir():
        return {}
    found = [(match, path) for path in folder.iterdir() if (match := _STEP.fullmatch(path.name))]
    return dict(sorted((int(match[1]), path) for match, path in found if path.is_dir()))


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, which nothing loads then, nor keeps from being saved again."""
    names = (f"{folder.name}{DAMAGED}{f'-{number}' if number > 1 else ''}" for number in count(1))
    free = next(path for path in map(folder.with_name, names) if not path.exists())
    return folder.rename(free)


def damaged_folders(folder: str | Path) -> list[Path]:
    """Checkpoints that were `set_aside` here."""
    return sorted(Path(folder).glob(f"*{DAMAGED}*"))


def is_checkpoint(folder: str | Path) -> bool:
    """Whether the folder holds tensors of this project, not of Hugging Face."""
    return any((Path(folder) / name).is_file() for name in (MANIFEST, STATE))


def write_description(
    folder: Path,
    state: SavedState,
    sums: Mapping[str, FileSum],
    attachments: Mapping[str, bytes] | None = None,
) -> None:
    """Add attachments, state and manifest to a folder; `sums` are those of its other files.

    Raises:
        ValueError: an attachment has the name of another file, or that of a path.
    """
    files = dict(sums)
    for name, content in (attachments or {}).items():
        _check_name(name, taken={*sums, STATE, MANIFEST})
        (folder / name).write_bytes(content)
        files[name] = FileSum(num_bytes=len(content), crc32=zlib.crc32(content))
    described = {"format": FORMAT, **dataclasses.asdict(state)}
    (folder / STATE).write_text(json.dumps(described, indent=2) + "\n")
    files[STATE] = sum_of_file(folder / STATE)
    manifest = {name: dataclasses.asdict(files[name]) for name in sorted(files)}
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": manifest}, indent=2) + "\n")


def read_state(folder: str | Path) -> SavedState:
    """What `write_description` got.

    Raises:
        DamagedCheckpointError: names the file, and what is wrong with it.
        ValueError: another version of the code wrote it.
    """
    file = Path(folder) / STATE
    content = _read_json(file)
    try:
        position = content["position"]
        return SavedState(
            policy_version=int(content["policy_version"]),
            model_only=bool(content["model_only"]),
            position=None if position is None else _position(position),
            converters=_settings(content.get("converters")),
            base_model=_text(content.get("base_model")),
            started_from=_text(content.get("started_from")),
            tokenizer=read_tokenizer_print(content.get("tokenizer")),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if _is_as_written(file):
            raise ValueError(
                f"checkpoint file {file} was written by another version of this project: {error!r}"
            ) from error
        raise DamagedCheckpointError(f"checkpoint file {file} is corrupted: {error!r}") from error


def _is_as_written(file: Path) -> bool:
    """Whether a file has the checksum that its manifest notes."""
    try:
        return _read_manifest(file.parent).get(file.name) == sum_of_file(file)
    except (ValueError, OSError):
        return False


def check_sizes(folder: str | Path) -> dict[str, FileSum]:
    """What the manifest lists, each file there and of its size.

    Raises:
        DamagedCheckpointError: names the first file that is missing, truncated, or one that the manifest
            should list.
    """
    path = Path(folder)
    with _reading(path / MANIFEST):
        sums = _read_manifest(path)
    tensors = {file.name for file in path.iterdir() if file.name.endswith((TENSORS_SUFFIX, METADATA))}
    for name in sorted({STATE, *tensors}):
        if name not in sums:
            raise DamagedCheckpointError(
                f"checkpoint file {path / MANIFEST} is corrupted: it does not list {name}"
            )
    for name, written in sums.items():
        file = path / name
        if not file.is_file():
            raise DamagedCheckpointError(f"checkpoint file {file} is missing")
        num_bytes = file.stat().st_size
        if num_bytes != written.num_bytes:
            what = "truncated" if num_bytes < written.num_bytes else "corrupted"
            raise DamagedCheckpointError(
                f"checkpoint file {file} is {what}: it has {num_bytes} bytes, {written.num_bytes} were "
                "written"
            )
    return sums


def check_contents(folder: str | Path, sums: Mapping[str, FileSum], names: Iterable[str]) -> None:
    """Read the files `names` and compare their checksums.

    Raises:
        DamagedCheckpointError: names the first file that is not what was written, or that the disk cannot
            give back.
        ValueError: names a file that may not be read.
    """
    for name in names:
        file = Path(folder) / name
        with _reading(file):
            found = sum_of_file(file)
        if found != sums[name]:
            raise DamagedCheckpointError(
                f"checkpoint file {file} is corrupted: its crc32 is {found.crc32:08x}, "
                f"{sums[name].crc32:08x} was written"
            )


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """What a disk cannot give back is damaged; what may not be read is somebody's setting."""
    try:
        yield
    except OSError as error:
        kind = DamagedCheckpointError if error.errno == errno.EIO else ValueError
        raise kind(f"checkpoint file {file} cannot be read: {error.strerror or error}") from error


def check_small_files(folder: str | Path) -> None:
    """All that can be checked quickly: `check_sizes`, and the contents of what is no file of tensors.

    Raises:
        DamagedCheckpointError: as both.
    """
    sums = check_sizes(folder)
    check_contents(folder, sums, [name for name in sums if not name.endswith(TENSORS_SUFFIX)])


def sum_of_file(file: Path) -> FileSum:
    """By reading it."""
    crc32 = num_bytes = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            crc32 = zlib.crc32(chunk, crc32)
            num_bytes += len(chunk)
    return FileSum(num_bytes=num_bytes, crc32=crc32)


def _read_manifest(folder: Path) -> dict[str, FileSum]:
    content = _read_json(folder / MANIFEST)
    try:
        return {
            str(name): FileSum(num_bytes=int(entry["num_bytes"]), crc32=int(entry["crc32"]))
            for name, entry in content["files"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedCheckpointError(
            f"checkpoint file {folder / MANIFEST} is corrupted: {error!r}"
        ) from error


def _check_name(name: str, *, taken: Collection[str]) -> None:
    of_tensors = name.endswith((TENSORS_SUFFIX, METADATA))
    if name in taken or of_tensors or name in ("", ".", "..") or Path(name).name != name:
        raise ValueError(
            f"attachment {name!r}: must be a file's name that the checkpoint has no other use for"
        )


def _position(value: dict[str, Any]) -> LoopPosition:
    return LoopPosition(**value | {"outstanding": tuple(map(int, value.get("outstanding", ())))})


def _settings(value: Any) -> dict[str, dict[str, Any]] | None:
    if value is None:
        return None
    return {str(name): dict(settings) for name, settings in value.items()}


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise DamagedCheckpointError(
            f"checkpoint file {file} is missing: {file.parent} is no checkpoint, or not whole"
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DamagedCheckpointError(f"checkpoint file {file} is corrupted: {error}") from error
    if not isinstance(content, dict):
        raise DamagedCheckpointError(
            f"checkpoint file {file} is corrupted: it holds a {type(content).__name__}"
        )
    found = content.get("format")
    if found == FORMAT:
        return content
    # Another version writes another format into both files; damage is in one of them.
    other = file.with_name(STATE if file.name == MANIFEST else MANIFEST)
    if f'"format": {FORMAT},' in _text_of(other):
        raise DamagedCheckpointError(f"checkpoint file {file} is corrupted: it has format {found!r}")
    raise ValueError(f"checkpoint file {file} has format {found!r}; this version reads {FORMAT}")


def _text_of(file: Path) -> str:
    """Empty where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
