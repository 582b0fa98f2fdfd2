"""The state of `.venv`: what is in it, and whether the last set-up was completed.

The stamp `.venv/relay-setup.json` says what the last complete set-up was for and left behind. It is
what makes a second call do nothing, and what shows that a package was taken away since.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tools.setup.machine import UNWANTED_ON_CPU, Flavour
from tools.setup.python import SUPPORTED, Refusal, dotted


def find_site_packages(venv: Path) -> Path | None:
    """None when there is no environment yet.

    Raises:
        Refusal: when it is of an unsupported version, or its Python is gone.
    """
    folders = [path.parent for path in venv.glob("lib/python3.*/site-packages")]
    if not folders:
        return None
    names = sorted(path.name for path in folders)
    python = venv / "bin" / "python"
    dead = python.is_symlink() and not python.exists()
    if dead or len(names) > 1 or names[0] not in {"python" + dotted(v) for v in SUPPORTED}:
        state = "is gone" if dead else "is not 3.11 or 3.12"
        raise Refusal(
            f"{venv} was made by {' and '.join(names)}, which {state}. "
            "Remove it (make clean-venv) and run again."
        )
    return folders[0] / "site-packages"


def read_installed(site_packages: Path | None) -> dict[str, str]:
    """Version of every distribution, by normalised name. Only names are read, so it takes milliseconds."""
    if site_packages is None:
        return {}
    stems = (path.name.removesuffix(".dist-info") for path in site_packages.glob("*.dist-info"))
    pairs = (stem.rpartition("-") for stem in stems)
    return {name.lower().replace("_", "-").replace(".", "-"): version for name, _, version in pairs}


def make_key(*, project: dict[str, Any], scripts: bytes, python: str, flavour: Flavour, root: str) -> str:
    """Changes with whatever would change the installation; a linter's setting does not."""
    tables = [project.get("build-system"), project.get("project"), project.get("tool", {}).get("setuptools")]
    text = json.dumps([tables, python, flavour, root], sort_keys=True)
    return hashlib.sha256(text.encode() + scripts).hexdigest()


def stamp_path(venv: Path) -> Path:
    return venv / "relay-setup.json"


def write_stamp(venv: Path, *, key: str, groups: Iterable[str], installed: dict[str, str]) -> None:
    partial = stamp_path(venv).with_suffix(".part")
    stamp = {"key": key, "groups": sorted(groups), "installed": installed}
    partial.write_text(json.dumps(stamp, indent=1), encoding="utf-8")
    partial.replace(stamp_path(venv))


def read_stamp(venv: Path) -> dict[str, Any]:
    """Empty when no set-up was completed."""
    try:
        stamp: dict[str, Any] = json.loads(stamp_path(venv).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return stamp


def is_complete(
    venv: Path, *, key: str, groups: Iterable[str], flavour: Flavour, installed: dict[str, str]
) -> bool:
    """Whether the last complete set-up covers `groups` and all that it left is still there."""
    stamp = read_stamp(venv)
    if not stamp or stamp["key"] != key or not set(groups) <= set(stamp["groups"]):
        return False
    if flavour == "cpu" and any(name in installed for name in UNWANTED_ON_CPU):
        return False
    return (venv / "bin" / "python").exists() and stamp["installed"].items() <= installed.items()
