"""The null device of an environment: where its libraries are, and the variables of a process that
runs on it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HELP = Path(__file__).parent / "site"
"""Folder of a sitecustomize.py with what a run needs where kernels do nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NullGpu:
    """A machine with NVIDIA GPUs that is not there."""

    venv: Path
    """Environment with the GPU builds of torch and vllm."""
    folder: Path = ROOT / "build" / "null-gpu"
    """Folder of what is built, and of the kernels that Triton compiles."""

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        found = sorted(self.venv.glob("lib/python3.*/site-packages"))
        if not found:
            raise ValueError(
                f"{self.venv} is no environment; `make gpu-rehearsal` creates .venv-gpu"
            )
        return found[0]

    @property
    def libraries(self) -> Path:
        return self.folder / "lib"

    @property
    def preloaded(self) -> Path:
        return self.libraries / "libnullgpu.so"

    def environment(
        self, settings: Mapping[str, object] | None = None, *, counters: Path | None = None
    ) -> dict[str, str]:
        """Return this process's variables with those of a process on the null device.

        `settings` are variables of the null device without their prefix, such as {"DEVICES": 2};
        docs/gpu.md lists them. Processes leave their counters in the folder `counters`.
        """
        own = {f"NULL_GPU_{name}": str(value) for name, value in (settings or {}).items()}
        if counters is not None:
            own["NULL_GPU_COUNTERS"] = str(counters)
        paths = {"LD_LIBRARY_PATH": [self.libraries], "PYTHONPATH": [HELP, ROOT]}
        inherited = os.environ
        joined = {
            name: os.pathsep.join([*map(str, first), *filter(None, [inherited.get(name)])])
            for name, first in paths.items()
        }
        return {
            "NULL_GPU_ZERO_READS": "1",
            "TRITON_CACHE_DIR": str(self.folder / "triton"),
            **inherited,
            **joined,
            "LD_PRELOAD": str(self.preloaded),
            "NULL_GPU_LIBRARY": str(self.preloaded),
            "TRITON_LIBCUDA_PATH": str(self.libraries),
            "VLLM_NCCL_SO_PATH": str(self.preloaded),
            **own,
        }
