"""Packages that must not be imported: builds that do not fit PyTorch's.

A package index has torchvision, torchaudio and torchcodec for CUDA. vLLM asks for all three, and
beside the CPU build of PyTorch importing transformers then ends in "operator torchvision::nms does
not exist". Text models need none of them, so that builds which do not fit count as not installed.
"""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any

FOLLOWERS = ("torchvision", "torchaudio", "torchcodec")
"""Packages whose build must be that of PyTorch."""


def hide_unfit_builds() -> list[str]:
    """Make packages unimportable in this process whose build does not fit PyTorch's CPU build.

    Returns their names.
    """
    if _read_build("torch") != "cpu":
        return []
    hidden = []
    for name in FOLLOWERS:
        build = _read_build(name)
        if build is not None and build != "cpu" and name not in sys.modules:
            modules: dict[str, Any] = sys.modules
            # `import` fails, and `find_spec` finds nothing: libraries do without it.
            modules[name] = None
            hidden.append(name)
    return hidden


def _read_build(package: str) -> str | None:
    """Return the local part of a package's version, such as cpu or cu130; None if not installed."""
    try:
        return importlib.metadata.version(package).partition("+")[2]
    except importlib.metadata.PackageNotFoundError:
        return None
