"""The null device for tests with the marker `rehearsal`; they run in the environment with the GPU
builds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.rehearsal import Rehearsal
from tools.null_gpu.build import build
from tools.null_gpu.device import NullGpu


@pytest.fixture(scope="session")
def null_gpu() -> NullGpu:
    """The null device, built for the environment of this Python."""
    gpu = NullGpu(venv=Path(sys.prefix))
    build(gpu)
    return gpu


@pytest.fixture
def rehearsal(null_gpu: NullGpu, tmp_path: Path) -> Rehearsal:
    return Rehearsal(gpu=null_gpu, folder=tmp_path)


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """Counts by model, as golden.json holds them. A test that counts otherwise prints its own."""
    return json.loads(Path(__file__).with_name("golden.json").read_text())
