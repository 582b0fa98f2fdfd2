"""Hugging Face folders: config.json, tokenizer files, safetensors whole or in shards.

A folder's headers are read and checked when it is opened; tensors are read one at a time.
Nothing here knows a model family: an adapter (`rl.models.spec`) translates.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from rl.atomic_folder import appearing_folder
from rl.models.buffers import persistent_buffers
from rl.models.spec import StateDictAdapter
from rl.models.tokenizer import TOKENIZER_FILES, check_tokenizer_files

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_TOKEN_ID_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_IGNORED_ENDINGS = (".rotary_emb.inv_freq",)
"""Buffers that old versions of transformers saved."""


class HFFolder:
    """A folder whose files are all there and whole.

    Args:
        tokenizer: whether the tokenizer's files must be there too.

    Raises:
        ValueError: naming the folder, file or tensor that is missing, or the file that is not whole.
    """

    def __init__(self, path: str | Path, *, tokenizer: bool = False) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ValueError(f"Hugging Face folder {self.path} does not exist")
        self.config: dict[str, Any] = read_json_object(self.path / "config.json")
        if tokenizer:
            check_tokenizer_files(self.path)
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Of every tensor in the folder."""
        self.files: dict[str, Path] = {}
        """Which file each tensor is in."""
        self._read_headers()

    def _read_headers(self) -> None:
        weight_map: dict[str, str] = {}
        if (self.path / INDEX_FILE).exists():
            weight_map = _read_weight_map(self.path / INDEX_FILE)
        names = sorted(set(weight_map.values())) if weight_map else [SINGLE_FILE]
        for file in (self.path / name for name in names):
            if not file.exists():
                listed = f", which {INDEX_FILE} lists" if weight_map else f", and so is {INDEX_FILE}"
                raise ValueError(f"weights file {file} is missing{listed}")
            shapes = _read_header(file)
            self.shapes |= shapes
            self.files |= dict.fromkeys(shapes, file)
        for tensor, name in weight_map.items():
            if self.files.get(tensor) != self.path / name:
                raise ValueError(
                    f"tensor {tensor} is missing from {self.path / name}, where {INDEX_FILE} has it"
                )

    def check(
        self, model: nn.Module, adapter: StateDictAdapter, *, names: Collection[str] | None = None
    ) -> None:
        """Whether the tensors are exactly those that the model's parameters are made of.

        `model` may be on the meta device or sharded. A tied model may come with an output head, any
        model with tensors of its persistent buffers.

        Args:
            names: of the parameters that count; None counts all.

        Raises:
            ValueError: naming the first tensor that is missing, of another shape, or unknown.
        """
        known = {"lm_head.weight"}
        for name, parameter in model.named_parameters():
            if names is not None and name not in names:
                continue
            meta = torch.empty(parameter.shape, device="meta")
            for hf_name, tensor in adapter.to_hf(name, meta).items():
                known.add(hf_name)
                self._check_tensor(hf_name, tuple(tensor.shape))
        for name, buffer in hf_buffers(model, adapter).items():
            for hf_name in adapter.hf_names(name):
                known.add(hf_name)
                if hf_name in self.shapes:
                    self._check_tensor(hf_name, tuple(buffer.shape))
        for hf_name in self.shapes:
            if hf_name not in known and not hf_name.endswith(_IGNORED_ENDINGS):
                raise ValueError(
                    f"{self.path}: tensor {hf_name} has no place in the model: "
                    "a checkpoint of another architecture or size"
                )

    def present(self, names: Iterable[str], adapter: StateDictAdapter) -> list[str]:
        """Those of our `names` that the folder has all tensors of."""
        return [name for name in names if all(hf_name in self.files for hf_name in adapter.hf_names(name))]

    def _check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self.shapes:
            raise ValueError(f"{self.path}: tensor {name} is missing")
        if self.shapes[name] != shape:
            raise ValueError(
                f"{self.path}: tensor {name} has shape {list(self.shapes[name])}, the model needs "
                f"{list(shape)}: a checkpoint of another architecture or size"
            )


def read_parameters(
    folder: HFFolder, adapter: StateDictAdapter, names: Iterable[str]
) -> Iterator[tuple[str, Tensor]]:
    """Our parameters, whole, on the CPU and in the file's dtype, one at a time in the order of `names`."""
    with ExitStack() as stack:
        handles: dict[Path, Any] = {}
        for name in names:
            tensors = []
            for hf_name in adapter.hf_names(name):
                if hf_name not in folder.files:
                    raise ValueError(f"{folder.path}: tensor {hf_name} is missing")
                file = folder.files[hf_name]
                if file not in handles:
                    handles[file] = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
                tensors.append(handles[file].get_tensor(hf_name))
            yield name, adapter.from_hf(name, tensors)


def read_json_object(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds; raises ValueError naming the file and what is wrong with it."""
    if not file.exists():
        raise ValueError(f"file {file} is missing")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"file {file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"file {file} holds {type(content).__name__}, not an object")
    return content


def hf_buffers(model: nn.Module, adapter: StateDictAdapter) -> dict[str, Tensor]:
    """The persistent buffers that a Hugging Face folder may have, by our names."""
    found = {}
    for name, buffer in persistent_buffers(model).items():
        with suppress(KeyError):  # of a buffer that the family's folders have no place for
            adapter.hf_names(name)
            found[name] = buffer
    return found


def write_hf_folder(
    path: str | Path,
    params: Iterable[tuple[str, Tensor]],
    adapter: StateDictAdapter,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int = 5 * 10**9,
    tokenizer_from: str | Path | None = None,
) -> None:
    """Write a folder that transformers and vLLM open; it appears whole or not at all.

    What processes that were killed while they wrote left beside `path` is removed first. At most
    about one shard is held in memory. Under several ranks it is called on one, with an iterator
    whose collectives the others step through at the same time.

    Args:
        params: our (name, whole tensor), one at a time.
        tokenizer_from: folder whose tokenizer files are copied, and whose config's token ids kept.

    Raises:
        FileExistsError: `path` is already there and not an empty folder.
    """
    with appearing_folder(path) as temporary:
        config = adapter.hf_config() | {"dtype": str(dtype).removeprefix("torch.")}
        if tokenizer_from is not None:
            _copy_tokenizer(Path(tokenizer_from), temporary)
            config |= _token_ids(Path(tokenizer_from))
        _write_json(temporary / "config.json", config)
        _write_shards(temporary, _hf_tensors(params, adapter, dtype), max_shard_bytes=max_shard_bytes)


def _hf_tensors(
    params: Iterable[tuple[str, Tensor]], adapter: StateDictAdapter, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in params:
        for hf_name, tensor in adapter.to_hf(name, parameter.detach()).items():
            yield hf_name, tensor.to(device="cpu", dtype=dtype).contiguous()


def _write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], *, max_shard_bytes: int) -> None:
    shards: list[dict[str, int]] = []
    """Bytes of each tensor of each file written."""
    pending: dict[str, Tensor] = {}

    def flush() -> None:
        save_file(pending, folder / f"{len(shards)}.part", metadata={"format": "pt"})
        shards.append({name: tensor.nbytes for name, tensor in pending.items()})
        pending.clear()

    for name, tensor in tensors:
        if pending and sum(x.nbytes for x in pending.values()) + tensor.nbytes > max_shard_bytes:
            flush()
        pending[name] = tensor
    flush()

    if len(shards) == 1:
        (folder / "0.part").rename(folder / SINGLE_FILE)
        return
    # The names state how many there are, which is known only now.
    weight_map: dict[str, str] = {}
    for i, sizes in enumerate(shards):
        file_name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{i}.part").rename(folder / file_name)
        weight_map |= dict.fromkeys(sizes, file_name)
    total_size = sum(sum(sizes.values()) for sizes in shards)
    _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total_size}, "weight_map": weight_map})


def _copy_tokenizer(source: Path, target: Path) -> None:
    check_tokenizer_files(source)
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


def _token_ids(folder: Path) -> dict[str, Any]:
    """Token ids for config.json: as the folder's own config.json has them, else its generation settings."""
    ids: dict[str, Any] = {}
    for name in ("generation_config.json", "config.json"):
        if (folder / name).exists():
            content = read_json_object(folder / name)
            ids |= {field: content[field] for field in _TOKEN_ID_FIELDS if content.get(field) is not None}
    return ids


def _read_header(file: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by tensor. The header is 8 bytes of length, then JSON that says where each tensor ends."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"weights file {file} is truncated: its {size} bytes do not hold its header")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise ValueError(f"weights file {file} is not a safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(
            f"weights file {file} is not a safetensors file: its header is a {type(header).__name__}, "
            "not an object"
        )
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    for name, entry in tensors.items():
        _check_header_entry(file, name, entry)
    expected = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    if size != expected:
        raise ValueError(f"weights file {file} is truncated: has {size} bytes, its header says {expected}")
    return {name: tuple(entry["shape"]) for name, entry in tensors.items()}


def _check_header_entry(file: Path, name: str, entry: Any) -> None:
    fields = entry if isinstance(entry, dict) else {}
    for field, is_long_enough in (("shape", lambda n: True), ("data_offsets", lambda n: n == 2)):
        numbers = fields.get(field)
        if not (
            isinstance(numbers, list)
            and is_long_enough(len(numbers))
            and all(type(number) is int and number >= 0 for number in numbers)
        ):
            raise ValueError(
                f"weights file {file} is not a safetensors file: its header has {field}={numbers!r} for "
                f"tensor {name}"
            )


def _read_weight_map(file: Path) -> dict[str, str]:
    """Name of the file that each tensor is in."""
    weight_map = read_json_object(file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"file {file} has no weight_map, an object of file names by tensor")
    return weight_map


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
