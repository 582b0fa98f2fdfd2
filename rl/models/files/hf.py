"""Hugging Face folders: config.json, tokenizer files, safetensors in one file or in shards.

A folder's headers are read and checked when it is opened; tensors are read one at a time. An
adapter (`rl.models.adapter`) translates between a family's parameters and its tensors.
"""

from __future__ import annotations

import math
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from rl.config.json import find_differences, to_dict
from rl.models.adapter import DecoderAdapter
from rl.models.decoder import find_persistent_buffers
from rl.models.files.block_fp8 import (
    FP8,
    check_scales,
    dequantize,
    is_scale,
    read_fp8_block,
    scale_of,
)
from rl.models.files.folder_check import (
    INDEX_FILE,
    SINGLE_FILE,
    check_model_folder,
    check_not_pointer,
)
from rl.models.files.tokenizer import (
    build_byte_tokenizer,
    check_tokenizer_files,
    list_tokenizer_files,
    write_json,
)
from rl.models.spec import ModelSpec, spec_from_hf
from rl.utils.files import publish_folder, read_json_object

_TOKEN_ID_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_IGNORED_ENDINGS = (".rotary_emb.inv_freq",)
"""Endings of buffers that old versions of transformers saved."""
_DTYPES = ("F64", "F32", "F16", "BF16", FP8)
"""Dtypes of weights in a safetensors header."""
_QUANTIZED = re.compile(
    r"\.(qweight|qzeros|g_idx|absmax|quant_map|weight_packed|scales|SCB|[\w.]*quant_state)\b"
)
"""Names of tensors that AWQ, GPTQ, bitsandbytes and compressed-tensors add."""
_FREE_FIELDS = ("init_std", "rope.max_positions", "local_rope.max_positions")
"""Fields of a model's config that change no result of given weights; the folder's count."""


class HFFolder:
    """A Hugging Face folder whose files are complete; with `tokenizer`, those of the tokenizer too.

    Opening a folder reads headers alone: `read_parameters` reads the tensors.

    Raises:
        ValueError: naming the folder, file or tensor that is missing, or the file that is
            truncated.

    Example:
        >>> folder = HFFolder("SmolLM2-135M", tokenizer=True)
        >>> folder.shapes["model.layers.0.self_attn.q_proj.weight"]
        (576, 576)
        >>> spec = folder.spec()
        >>> adapter = spec.adapter(spec.model)
        >>> name, tensor = next(read_parameters(folder, adapter, ["embed_tokens.weight"]))
    """

    def __init__(self, path: str | Path, *, tokenizer: bool = False) -> None:
        self.path = Path(path)
        check_model_folder(self.path)
        try:
            self.config: dict[str, Any] = read_hf_config(self.path)
        except ValueError as error:
            if str(self.path) in str(error):
                raise
            raise ValueError(f"{self.path}: {error}") from error
        self.fp8_block = read_fp8_block(read_json_object(self.path / "config.json"))
        """Rows and columns that share a scale in a block-scaled FP8 checkpoint, or None."""
        if tokenizer:
            check_tokenizer_files(self.path)
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Shape of every tensor in the folder."""
        self.files: dict[str, Path] = {}
        """File of every tensor, and of the scales of FP8 weights."""
        self._read_headers()

    def _read_headers(self) -> None:
        """Fill `shapes` and `files`; raise ValueError for files that do not fit together."""
        weight_map: dict[str, str] = {}
        if (self.path / INDEX_FILE).exists():
            weight_map = _read_weight_map(self.path / INDEX_FILE)
            _check_one_source(self.path, weight_map)

        dtypes: dict[str, str] = {}
        for name in sorted(set(weight_map.values())) if weight_map else [SINGLE_FILE]:
            file = self.path / name
            if not file.is_file():
                reason = f"which {INDEX_FILE} lists" if weight_map else f"and so is {INDEX_FILE}"
                raise ValueError(f"weights file {file} is missing, {reason}")
            check_not_pointer(file)
            header = _read_header(file)
            duplicates = sorted(header.keys() & self.files.keys())
            if duplicates:
                other = self.files[duplicates[0]]
                raise ValueError(
                    f"tensor {duplicates[0]} is in both {other} and {file.name}: remove one of them"
                )
            for tensor, (shape, dtype) in header.items():
                self.shapes[tensor], dtypes[tensor] = shape, dtype
                self.files[tensor] = file

        # After all headers, so that the message can tell a quantized model by its other tensors.
        self._check_dtypes(dtypes)
        for tensor, name in weight_map.items():
            if self.files.get(tensor) != self.path / name:
                raise ValueError(
                    f"tensor {tensor} is missing from {self.path / name}, where {INDEX_FILE} has it"
                )
        try:
            check_scales(self.shapes, dtypes, block=self.fp8_block)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error
        if self.fp8_block is not None:
            # The scales are part of reading a weight, not tensors of the model.
            self.shapes = {name: shape for name, shape in self.shapes.items() if not is_scale(name)}

    def _check_dtypes(self, dtypes: Mapping[str, str]) -> None:
        for tensor, dtype in dtypes.items():
            if dtype not in _DTYPES:
                hint = ""
                if _QUANTIZED.search(" ".join(dtypes)):
                    hint = " (the model is quantized: give it without quantization)"
                raise ValueError(
                    f"{self.files[tensor]}: tensor {tensor} is of {dtype}: must be of "
                    f"{', '.join(_DTYPES)}{hint}"
                )

    def spec(
        self, *, expected: ModelSpec | None = None, otherwise: str = "choose a folder of that model"
    ) -> ModelSpec:
        """Return the spec that config.json describes.

        Args:
            expected: spec that it must be, but for `_FREE_FIELDS`; None allows every model.
            otherwise: end of the message about a model that is not the expected one.

        Raises:
            ValueError: names the folder and the unsupported field, or all fields that differ.
        """
        is_same_family = expected is not None and expected.name == self.config.get("model_type")
        # A family from outside may have an adapter of its own for a known `model_type`.
        adapter = expected.adapter if expected is not None and is_same_family else None
        try:
            spec = spec_from_hf(self.config, flavor=self.path.name, adapter=adapter)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error
        if expected is None:
            return spec

        fields: dict[str, tuple[Any, Any]] = {"model_type": (expected.name, spec.name)}
        if is_same_family:
            fields = find_differences(to_dict(spec.model), to_dict(expected.model))
        problems: list[str] = []
        for name, (old, new) in fields.items():
            if name not in _FREE_FIELDS and not _are_close(old, new):
                problems.append(f"{name}={new!r}, not {old!r}")
        if problems:
            raise ValueError(
                f"{self.path}: a checkpoint of another architecture or size than {expected.name} "
                f"{expected.flavor}: config.json has {'; '.join(problems)}: {otherwise}"
            )
        return replace(expected, model=spec.model)

    def check(
        self, model: nn.Module, adapter: DecoderAdapter, *, names: Collection[str] | None = None
    ) -> None:
        """Raise ValueError, naming the first difference, unless the tensors fit the model.

        The model may be on the meta device or sharded. A folder of a tied model may contain an
        output head equal to its embedding, and any folder the model's persistent buffers. `names`
        restricts the check to some parameters.
        """
        needed: dict[str, tuple[int, ...]] = {}
        for name, parameter in model.named_parameters():
            if names is None or name in names:
                # Meta tensors: the adapter computes shapes without memory.
                whole = torch.empty(parameter.shape, device="meta")
                for hf_name, tensor in adapter.to_hf(name, whole).items():
                    needed[hf_name] = tuple(tensor.shape)
        for hf_name in needed:
            if hf_name not in self.shapes:
                raise ValueError(
                    f"{self.path}: tensor {hf_name} is missing{self._explain_missing(hf_name)}"
                )
        # After the check of missing tensors: a folder may lack the buffers.
        for name, buffer in find_hf_buffers(model, adapter).items():
            needed |= dict.fromkeys(adapter.hf_names(name), tuple(buffer.shape))

        for hf_name, shape in self.shapes.items():
            if hf_name.endswith(_IGNORED_ENDINGS) or shape == needed.get(hf_name):
                continue
            other = "a checkpoint of another architecture or size"
            if hf_name in needed:
                raise ValueError(
                    f"{self.path}: tensor {hf_name} has shape {list(shape)}, the model needs "
                    f"{list(needed[hf_name])}: {other}"
                )
            if hf_name != _HEAD:
                raise ValueError(
                    f"{self.path}: tensor {hf_name} has no place in the model: {other}"
                )
            if not torch.equal(self._read_stored(_HEAD), self._read_stored(_EMBEDDING)):
                raise ValueError(
                    f"{self.path}: config.json has tie_word_embeddings=true, but {_HEAD} differs "
                    f"from {_EMBEDDING}: set tie_word_embeddings to false to use both, or remove "
                    "the tensor that is not meant"
                )

    def _explain_missing(self, missing: str) -> str:
        """Return what a folder without one of the model's tensors may be, or an empty text."""
        for name in self.shapes:
            if name.endswith(f".{missing}") or missing == f"model.{name}":
                return (
                    f", but there is {name}: save the language model itself, and no wrapper or "
                    "part of it"
                )
        return ""

    def _read_stored(self, name: str) -> Tensor:
        """Return a tensor as it is stored."""
        with safe_open(self.files[name], framework="pt") as handle:
            tensor: Tensor = handle.get_tensor(name)
            return tensor

    def list_present(self, names: Iterable[str], adapter: DecoderAdapter) -> list[str]:
        """Return the parameters whose tensors are all in the folder."""
        return [name for name in names if self.files.keys() >= set(adapter.hf_names(name))]


def read_parameters(
    folder: HFFolder, adapter: DecoderAdapter, names: Iterable[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole parameters on the CPU, one at a time in the order of `names`.

    They are in the file's dtype, or in float32 if that is FP8. Raises ValueError for a tensor with
    NaN or infinity.
    """
    with ExitStack() as stack:
        # Files stay open to the end: a parameter may consist of tensors of several files.
        handles: dict[Path, Any] = {}

        def read(name: str) -> Tensor:
            if name not in folder.files:
                raise ValueError(f"{folder.path}: tensor {name} is missing")
            file = folder.files[name]
            if file not in handles:
                handles[file] = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
            tensor: Tensor = handles[file].get_tensor(name)
            if folder.fp8_block is not None and scale_of(name) in folder.files:
                tensor = dequantize(tensor, read(scale_of(name)), block=folder.fp8_block)
            check_finite(name, tensor, file=file)
            return tensor

        for name in names:
            yield name, adapter.from_hf(name, [read(hf_name) for hf_name in adapter.hf_names(name)])


def _are_close(first: Any, second: Any) -> bool:
    """Return True for numbers that differ by their rounding to float32, which GGUF files have."""
    if not (isinstance(first, float) and isinstance(second, float)):
        return False
    return math.isclose(first, second, rel_tol=1e-6)


def check_finite(name: str, tensor: Tensor, *, file: Path) -> None:
    """Raise ValueError for a tensor with NaN or infinity."""
    if not tensor.numel():
        return
    # NaN and infinity show in the extremes, which take less time than a copy of the tensor.
    least, most = tensor.aminmax()
    if not (least.isfinite() and most.isfinite()):
        raise ValueError(
            f"{file}: tensor {name} has values that are NaN or infinite: the checkpoint has "
            "diverged"
        )


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """Return config.json without its quantization; raise ValueError for an unsupported kind."""
    config = read_json_object(Path(folder) / "config.json")
    read_fp8_block(config)
    return {field: value for field, value in config.items() if field != "quantization_config"}


def find_hf_buffers(model: nn.Module, adapter: DecoderAdapter) -> dict[str, Tensor]:
    """Return the persistent buffers that a Hugging Face folder may contain, by our names."""
    buffers: dict[str, Tensor] = {}
    for name, buffer in find_persistent_buffers(model).items():
        with suppress(KeyError):  # The family's folders have no place for the buffer.
            adapter.hf_names(name)
            buffers[name] = buffer
    return buffers


def write_hf_folder(
    path: str | Path,
    params: Iterable[tuple[str, Tensor]],
    adapter: DecoderAdapter,
    *,
    dtype: torch.dtype,
    buffers: Collection[str] = (),
    max_shard_bytes: int = 5 * 10**9,
    tokenizer_from: str | Path | None = None,
) -> None:
    """Write a folder that transformers and vLLM can open, atomically.

    Remains of processes killed while writing next to `path` are removed first. About one shard is
    held in memory at a time. With several ranks one rank calls this, with an iterator whose
    collectives the other ranks step through at the same time.

    Args:
        params: our names and whole tensors, one at a time.
        buffers: names of those that keep their own dtype.
        tokenizer_from: folder whose tokenizer files and token ids are copied.

    Raises:
        FileExistsError: if `path` exists and is not an empty folder.
    """

    def yield_tensors() -> Iterator[tuple[str, Tensor]]:
        for name, parameter in params:
            for hf_name, tensor in adapter.to_hf(name, parameter.detach()).items():
                stored = tensor.dtype if name in buffers else dtype
                yield hf_name, tensor.to(device="cpu", dtype=stored).contiguous()

    with publish_folder(path) as temporary:
        config = adapter.hf_config()
        # transformers before 4.56 reads `torch_dtype`, and float32 without it.
        config["dtype"] = config["torch_dtype"] = str(dtype).removeprefix("torch.")
        if tokenizer_from is not None:
            source = Path(tokenizer_from)
            check_tokenizer_files(source)
            for name in list_tokenizer_files(source):
                (temporary / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(source / name, temporary / name)
            config |= _read_token_ids(source)
        write_json(temporary / "config.json", config)
        _write_shards(temporary, yield_tensors(), max_shard_bytes=max_shard_bytes)


def write_random_model(folder: str | Path, *, spec: ModelSpec, seed: int) -> Path:
    """Write a random model with a tokenizer of bytes, unless the folder exists.

    The seed determines the weights. Two processes may call this at once: each writes its own copy,
    and the first to finish names the folder. Raises ValueError if the folder exists and does not
    hold a complete model of the spec.
    """
    folder = Path(folder)
    adapter = spec.adapter(spec.model)
    if not folder.exists():
        model = spec.model.build()
        model.init_weights(seed=seed)
        with tempfile.TemporaryDirectory() as tokenizer, suppress(FileExistsError):
            build_byte_tokenizer(tokenizer)
            params = model.named_parameters()
            write_hf_folder(folder, params, adapter, dtype=torch.float32, tokenizer_from=tokenizer)
    with torch.device("meta"):
        model = spec.model.build()
    HFFolder(folder, tokenizer=True).check(model, adapter)
    return folder


def _write_shards(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], *, max_shard_bytes: int
) -> None:
    shards: list[list[str]] = []
    """Names of the tensors in each file written."""
    pending: dict[str, Tensor] = {}
    pending_bytes = total_size = 0

    def flush() -> None:
        save_file(pending, folder / f"{len(shards)}.part", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        if pending and pending_bytes + tensor.nbytes > max_shard_bytes:
            flush()
            pending_bytes = 0
        pending[name] = tensor
        pending_bytes += tensor.nbytes
        total_size += tensor.nbytes
    flush()

    if len(shards) == 1:
        (folder / "0.part").rename(folder / SINGLE_FILE)
        return
    # The file names contain the number of shards, which is known only now.
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file_name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{i}.part").rename(folder / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    write_json(
        folder / INDEX_FILE, {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    )


def _read_token_ids(folder: Path) -> dict[str, Any]:
    """Return the token ids of the folder's config.json, or else of its generation settings."""
    ids: dict[str, Any] = {}
    for name in ("generation_config.json", "config.json"):
        if not (folder / name).exists():
            continue
        content = read_json_object(folder / name)
        for field in _TOKEN_ID_FIELDS:
            if content.get(field) is not None:
                ids[field] = content[field]
    return ids


def _read_header(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of each tensor in a safetensors file."""
    try:
        header: dict[str, tuple[tuple[int, ...], str]] = {}
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118
                # Names go into messages and logs.
                if not name.isprintable():
                    raise ValueError(
                        f"weights file {file} has a tensor {name[:100]!r}: no model has such a name"
                    )
                tensor = handle.get_slice(name)
                header[name] = tuple(tensor.get_shape()), tensor.get_dtype()
        return header
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"weights file {file} is truncated or not a safetensors file: {error}"
        ) from error


def _check_one_source(folder: Path, weight_map: dict[str, str]) -> None:
    """Raise ValueError for a file of all tensors beside an index of other files.

    transformers reads the file, vLLM what the index lists: they would hold different models.
    """
    listed = sorted(set(weight_map.values()))
    if (folder / SINGLE_FILE).exists() and listed != [SINGLE_FILE]:
        raise ValueError(
            f"{folder} has both {SINGLE_FILE} and {INDEX_FILE}, which lists "
            f"{', '.join(listed[:2])}: programs differ in what they read: remove the one that is "
            "not meant (in a copy of the hub's cache)"
        )


def _read_weight_map(file: Path) -> dict[str, str]:
    """Return the file name of each tensor."""
    weight_map = read_json_object(file).get("weight_map")
    message = f"file {file} has no weight_map, an object of file names by tensor"
    if not isinstance(weight_map, dict):
        raise ValueError(message)
    if not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(message)
    # A path would read a file of another folder, which nobody has checked.
    for tensor, name in weight_map.items():
        if not name or Path(name).name != name:
            raise ValueError(
                f"file {file} has tensor {tensor} in {name!r}: must be the name of a file beside it"
            )
    return weight_map
