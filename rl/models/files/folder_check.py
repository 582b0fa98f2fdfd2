"""Checks of a folder that somebody gives as a model's: what it is, and whether its files lie in it.

A folder from elsewhere may hold links to any file of this machine, whose text would become the
prompt and the export.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatch
from pathlib import Path

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
CHAT_TEMPLATES = "additional_chat_templates"
"""Folder of further chat templates, in a model's folder."""
_TEXTS = (
    "*.json",
    "*.jinja",
    "merges.txt",
    "vocab.txt",
    "*.model",
    "*.model.v*",
    "*.gguf",
    "*.tiktoken",
)
_WEIGHTS = "*.safetensors"
"""Files that relay, transformers or vLLM read."""
_POINTER = b"version https://git-lfs.github.com/spec/"
_MAX_POINTER_BYTES = 1024
_ARCHIVES = {
    b"PK\3\4": "a zip archive",
    b"\x1f\x8b": "a compressed archive",  # gzip
    b"BZh": "a compressed archive",  # bzip2
    b"\xfd7zXZ": "a compressed archive",
    b"\x28\xb5\x2f\xfd": "a compressed archive",  # zstandard
}
"""Kinds of archives by the first bytes of a file."""

_CONVERT = (
    "open it with transformers where you trust it, and save it: "
    "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other)"
)
_KINDS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("*.distcp", "step-[0-9]*"),
        "a checkpoint of a run, or a folder of them: give the exported model, hf/ beside the "
        "steps, or load the checkpoint with trainer.checkpoint.initial_load_path",
    ),
    (
        ("zero_to_fp32.py", "global_step[0-9]*", "pytorch_model_fsdp_[0-9]*", "mp_rank_*"),
        "a sharded checkpoint of another trainer: write a folder of safetensors with its own tool "
        "(zero_to_fp32.py, `accelerate merge-weights`)",
    ),
    (
        ("model_index.json",),
        "a pipeline of diffusers, which makes images: give the folder of a language model",
    ),
    (
        ("[0-9]_Pooling", "sentence_bert_config.json"),
        "a model of sentence-transformers, which has no output head and writes no text: give the "
        "folder of a language model",
    ),
    (
        (ADAPTER_CONFIG, "adapter_model.*"),
        "a PEFT adapter without the model it belongs to: give the model's folder here, and the "
        "adapter's as initial_adapter of the LoRA converter",
    ),
    (
        ("*.gguf",),
        "a folder of GGUF files: give one of the files as hf_assets_path, which converts it",
    ),
    (
        ("consolidated*", "params.json", "tekken.json"),
        "a model in the format of its maker (consolidated.*, params.json): give the folder in "
        "Hugging Face's format, with config.json and model.safetensors",
    ),
    (
        ("openvino_model*", "*.mlpackage", "*.engine"),
        "a compiled model, which cannot be trained: give its safetensors",
    ),
    (
        ("pytorch_model*.bin", "pytorch_model*.bin.index.json", "*.bin", "*.pt", "*.pth", "*.ckpt"),
        f"a model with weights in pickles, which can run code and are not read: {_CONVERT}",
    ),
    (("tf_model*", "*.h5"), f"a model with weights of TensorFlow: {_CONVERT}"),
    (("flax_model*", "*.msgpack"), f"a model with weights of Flax: {_CONVERT}"),
    (("*.onnx", "onnx"), "a model exported to ONNX, which cannot be trained: give its safetensors"),
    (
        ("*.npz", "*.ot", "*.tflite", "*.mlmodel", "*.nemo"),
        "a model in a format that is not read: give safetensors",
    ),
)
"""Names of files that tell the kind of a folder, and the advice for it; the first match counts."""
_NO_LANGUAGE_MODELS = _KINDS[2:4]
_NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state")
"""Begins of files that transformers' Trainer writes beside weights, with the same endings."""


def check_links(folder: Path) -> None:
    """Raise ValueError for a link that leaves the folder, or a pipe or device in place of a file.

    The folder itself may be a link, and so may safetensors, from which nothing but tensors is read.
    In the hub's cache, links lead to the `blobs` of the same model.
    """
    real = Path(os.path.realpath(folder))
    roots = [real]
    for path in (real, *real.parents):
        if path.parent.name == "snapshots":
            roots.append(path.parents[1] / "blobs")

    templates = folder / CHAT_TEMPLATES
    try:
        files = [file for file in folder.iterdir() if _matches(file.name, (*_TEXTS, _WEIGHTS))]
        if templates.is_dir() or templates.is_symlink():
            files += [templates, *templates.glob("*")]
    except OSError as error:
        raise ValueError(f"{folder} cannot be read: {error.strerror}") from error
    for file in files:
        target = Path(os.path.realpath(file))
        is_inside = any(target.is_relative_to(root) for root in roots)
        if not is_inside and not fnmatch(file.name, _WEIGHTS):
            raise ValueError(
                f"{file} is a link that leaves its folder, to {target}: only safetensors may lie "
                "elsewhere: if the link is meant, put a copy of the file in its place"
            )
        if not target.exists():
            raise ValueError(
                f"{file} is a link to {target}, which does not exist: the folder is not complete"
            )
        if not (target.is_file() or target.is_dir()):
            raise ValueError(f"{file} is a pipe or a device: must be a file")


def check_not_pointer(file: Path) -> None:
    """Raise ValueError for a file that git-LFS has not replaced by its content."""
    try:
        if not file.is_file() or file.stat().st_size > _MAX_POINTER_BYTES:
            return
        with file.open("rb") as handle:
            begin = handle.read(len(_POINTER))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    if begin == _POINTER:
        raise ValueError(
            f"{file} is a pointer of git-LFS and not the file itself: run `git lfs pull` in "
            f"{file.parent}, or download the model with `hf download`"
        )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def has_weights(folder: Path) -> bool:
    """Return True if a folder has safetensors that transformers finds."""
    return (folder / SINGLE_FILE).exists() or (folder / INDEX_FILE).exists()


def check_model_folder(folder: Path) -> None:
    """Raise ValueError for anything but a folder of a model in safetensors.

    The message says what the path is and what to do.
    """
    if not folder.is_dir():
        raise ValueError(_describe_file(folder))
    check_links(folder)
    for name in ("config.json", SINGLE_FILE, INDEX_FILE):
        check_not_pointer(folder / name)
    names = [file.name for file in folder.iterdir()]
    if (folder / "config.json").exists() and has_weights(folder):
        _check_unambiguous(folder, names)
        return

    # From here on the folder is refused; the most specific advice comes first.
    if not names:
        raise ValueError(
            f"{folder} is empty: must be a Hugging Face folder, with config.json and safetensors"
        )
    if {"blobs", "snapshots"} <= {*names}:
        commits = sorted(path.name for path in (folder / "snapshots").iterdir())
        raise ValueError(
            f"{folder} is the hub's cache of a model: give its name, or one of the folders in "
            f"{folder / 'snapshots'} ({', '.join(commits[:3])})"
        )
    kind = _identify_kind(names)
    if kind is not None:
        raise ValueError(f"{folder} is {kind}")
    models_inside = sorted([*folder.glob("*/config.json"), *folder.glob("*/*/config.json")])
    if models_inside:
        raise ValueError(
            f"{folder} is not a model's folder, but contains one: give {models_inside[0].parent}"
        )
    if not (folder / "config.json").exists():
        content = "weights" if has_weights(folder) else f"{len(names)} files, such as {min(names)}"
        raise ValueError(
            f"file {folder / 'config.json'} is missing: the folder has {content}, and must be a "
            "Hugging Face folder"
        )
    shards = sorted(name for name in names if name.endswith(".safetensors"))
    if shards:
        raise ValueError(
            f"weights file {folder / SINGLE_FILE} is missing, and so is {INDEX_FILE}: there is "
            f"{shards[0]}, but nothing says which tensors are in which file: download the index "
            "too, or rename a single file"
        )
    raise ValueError(
        f"weights file {folder / SINGLE_FILE} is missing, and so is {INDEX_FILE}: the folder has a "
        "config.json and no weights: download the model's safetensors too"
    )


def _check_unambiguous(folder: Path, names: Collection[str]) -> None:
    """Raise ValueError for a folder that other programs take for something else."""
    for name in names:
        if name.startswith("adapter_model."):
            raise ValueError(
                f"{folder} holds the weights of a model and of an adapter ({name}), and other "
                "programs may read the other one: move one of them into a folder of its own"
            )
    kind = _identify_kind(names, _NO_LANGUAGE_MODELS)
    if kind is not None:
        raise ValueError(f"{folder} is {kind}")


def _identify_kind(
    names: Collection[str], kinds: Sequence[tuple[tuple[str, ...], str]] = _KINDS
) -> str | None:
    """Return what a folder is and what to do, or None if its files do not say it."""
    usable = [name for name in names if not name.startswith(_NO_WEIGHTS)]
    for patterns, advice in kinds:
        if any(_matches(name, patterns) for name in usable):
            return advice
    return None


def _describe_file(path: Path) -> str:
    """Return what is wrong with a path that is no folder."""
    if path.is_symlink() and not path.exists():
        return (
            f"Hugging Face folder {path} is a link to {os.path.realpath(path)}, which does not "
            "exist"
        )
    if not path.exists():
        return f"Hugging Face folder {path} does not exist"
    if not path.is_file():
        return f"{path} is a pipe or a device: must be a Hugging Face folder"
    try:
        with path.open("rb") as handle:
            begin = handle.read(512)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    for magic, archive in _ARCHIVES.items():
        # PyTorch's files are zip archives too.
        if begin.startswith(magic) and not re.search(r"\.(bin|pt|pth|ckpt)$", path.name):
            return f"{path} is {archive}: unpack it, and give the folder"
    # The format's mark is not at the begin, but in the header of the first file inside.
    if begin[257:262] == b"ustar":
        return f"{path} is a tar archive: unpack it, and give the folder"
    if begin.startswith(b"GGUF"):
        return f"{path} is a GGUF file: its name must end in .gguf"
    return (
        f"{path} is a file: must be the Hugging Face folder that it is in, here "
        f"{path.absolute().parent}"
    )
