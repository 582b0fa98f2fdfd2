"""Models of the Hugging Face hub: downloaded into the cache that all its programs share (HF_HOME).

The first request has a deadline and no retries, so that a machine without a network learns it at
once; then the cache alone is asked. HF_HUB_OFFLINE, HF_ENDPOINT and the login of `hf auth login`
are those of the hub's own library.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rl.models.files.folder_check import CHAT_TEMPLATES
from rl.models.files.hf import read_hf_config
from rl.models.spec import spec_from_hf
from rl.utils.proxies import find_proxy

TIMEOUT_S = 10.0
"""Longest wait for the hub's first answer."""
SETTINGS, WEIGHTS = ("*.json", "*.jinja", "merges.txt"), "*.safetensors"
"""Files of a model that are downloaded, and that must be in the cache."""
MORE = ("vocab.txt", "tokenizer.model", "tokenizer.model.v3")
TEMPLATES = f"{CHAT_TEMPLATES}/*.jinja"
"""Files that are downloaded too; a model that was cached without them is taken as it is."""
OTHER_FORMATS = ("*/*", "consolidated*")
"""Files that are left out: subfolders and `consolidated` hold the weights in other formats."""


def fetch_from_hub(name: str, *, revision: str | None, downloads: bool) -> Path | None:
    """Return the folder of a model in the cache, after a download of missing files.

    Args:
        downloads: False asks the cache alone, and returns None for a model that is not there.

    Raises:
        ValueError: the model or revision does not exist, may not be read, or cannot be reached and
            is not cached.
    """
    from huggingface_hub import HfApi, snapshot_download

    # Asked first and once: downloads retry, so a machine without a network would wait for long.
    problem: Exception | None = None
    files: list[str] = []
    try:
        if downloads:
            info = HfApi().model_info(name, revision=revision, timeout=TIMEOUT_S)
            files = [file.rfilename for file in info.siblings or ()]
    except Exception as error:  # noqa: BLE001 - a network request
        problem = error

    def fetch(*patterns: str, ignored: Sequence[str] = OTHER_FORMATS) -> Path:
        try:
            folder = snapshot_download(
                name,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(ignored),
                local_files_only=problem is not None or not downloads,
            )
        except Exception as error:  # noqa: BLE001 - a network request
            raise ValueError(_describe_failure(name, revision, problem or error)) from (
                problem or error
            )
        return Path(folder)

    if downloads and problem is None:
        _check_files(name, revision, files)
        settings = fetch(*SETTINGS)
        try:
            spec_from_hf(read_hf_config(settings))  # before gigabytes of a model that is refused
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if any(fnmatch(file, TEMPLATES) for file in files):
            fetch(TEMPLATES, ignored=())
        return fetch(*SETTINGS, *MORE, WEIGHTS)

    try:
        folder = fetch(*SETTINGS, WEIGHTS)
    except ValueError:
        if downloads:
            raise
        return None
    if any(folder.glob(WEIGHTS)):  # other programs may have fetched the tokenizer alone
        return folder
    if problem is None:
        return None
    raise ValueError(_describe_failure(name, revision, problem)) from problem


def find_hub_name(folder: str | Path) -> tuple[str, str] | None:
    """Return name and commit of a model whose folder is in the hub's cache, None for any other.

    Example:
        >>> find_hub_name("/cache/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de2")
        ('Qwen/Qwen3-0.6B', 'c1899de2')
    """
    commit, snapshots, model = (Path(folder).name, *(p.name for p in Path(folder).parents[:2]))
    kind, *parts = model.split("--")
    # The hub allows no "--" in names, so the parts are those of the name.
    if kind != "models" or not 1 <= len(parts) <= 2 or snapshots != "snapshots":
        return None
    return "/".join(parts), commit


def read_hub_config(name: str, *, revision: str | None) -> dict[str, Any]:
    """Return config.json of a model on the hub, of which nothing is kept.

    Raises ValueError as `fetch_from_hub`.
    """
    from huggingface_hub import hf_hub_download

    info = _ask(name, revision)  # once, as downloads retry
    _check_files(name, revision, [file.rfilename for file in info.siblings or ()])
    with tempfile.TemporaryDirectory() as folder:
        try:
            hf_hub_download(name, "config.json", revision=info.sha, local_dir=folder)
        except Exception as error:  # a network request
            raise ValueError(_describe_failure(name, revision, error)) from error
        return read_hf_config(folder)


def count_hub_bytes(name: str) -> int:
    """Return the bytes of a model's safetensors, from the cache or else as the hub tells them.

    Raises:
        ValueError: the model is not cached, and the hub does not tell.
    """
    folder = fetch_from_hub(name, revision=None, downloads=False)
    if folder is not None:
        return sum(file.stat().st_size for file in folder.glob(WEIGHTS))
    info = _ask(name, None, files_metadata=True)
    files = [file for file in info.siblings or () if fnmatch(file.rfilename, WEIGHTS)]
    # As of a download: other folders and formats of the same weights do not count.
    own = [file for file in files if not any(fnmatch(file.rfilename, p) for p in OTHER_FORMATS)]
    return sum(file.size or 0 for file in own)


def _ask(name: str, revision: str | None, *, files_metadata: bool = False) -> Any:
    """Return what the hub tells of a model; raises ValueError as `fetch_from_hub`."""
    from huggingface_hub import HfApi

    try:
        return HfApi().model_info(
            name, revision=revision, timeout=TIMEOUT_S, files_metadata=files_metadata
        )
    except Exception as error:  # a network request
        raise ValueError(_describe_failure(name, revision, error)) from error


def _check_files(name: str, revision: str | None, files: Sequence[str]) -> None:
    """Raise ValueError for a model whose weights are in another format, if its files are listed."""
    if not files:
        return
    gguf = None
    for file in files:
        if fnmatch(file, WEIGHTS) and not any(fnmatch(file, part) for part in OTHER_FORMATS):
            return
        if gguf is None and file.endswith(".gguf"):
            gguf = file

    message = f"{name} has no safetensors that transformers reads"
    if gguf is not None:
        download = f"hf download {name} {gguf}{_format_option(revision)}"
        message += f", but GGUF files: download one, `{download}`, and give its path"
    raise ValueError(message)


def _describe_failure(name: str, revision: str | None, error: Exception) -> str:
    """Return the message for a download that failed: what is wrong and what to do."""
    from huggingface_hub import HfApi, constants, errors

    hub = HfApi().endpoint
    # The narrower classes first: GatedRepoError is a RepositoryNotFoundError.
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{name}: the hub gives it to people with permission only: ask at {hub}/{name}, "
            "then `hf auth login`"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{name} is no folder here, and {hub} has no such model, or it is private: check the "
            "name, or log in with `hf auth login`"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        valid = _list_revisions(name)
        return f"{name}: hf_revision={revision!r} does not exist: must be {valid} or a commit"
    if isinstance(error, errors.OfflineModeIsEnabled):
        reason = "it is not downloaded, and HF_HUB_OFFLINE forbids that"
    else:
        proxy = find_proxy(hub)
        through = "" if proxy is None else f" through the proxy of {proxy}"
        first_line = (str(error).splitlines() or [""])[0]
        cause = f"{type(error).__name__}: {first_line}"
        reason = f"it cannot be downloaded from {hub}{through} ({cause})"
    download = f"hf download {name}{_format_option(revision)}"
    return (
        f"{name} is no folder here, and {reason}: run `{download}` where there is a network, and "
        f"give its folder or its cache (HF_HUB_CACHE, here {constants.HF_HUB_CACHE})"
    )


def _format_option(revision: str | None) -> str:
    return f" --revision {revision}" if revision else ""


def _list_revisions(name: str) -> str:
    """Return the branches and tags of a model, as words."""
    from huggingface_hub import HfApi

    try:
        refs = HfApi().list_repo_refs(name)
    except Exception:  # noqa: BLE001 - a network request
        return "a branch, a tag"
    return ", ".join(ref.name for ref in [*refs.branches, *refs.tags])
