"""The changes that processes on the null device make to relay's modules (tools/null_gpu/site)."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "tools" / "null_gpu" / "site"


@pytest.mark.medium
def test_the_modules_that_are_changed_have_what_is_changed():
    """A class that moves elsewhere would end every process of a rehearsal at its import."""
    names = runpy.run_path(str(SITE / "sitecustomize.py"))["HELP"]
    own = [name for name in names if name.startswith("rl.")]
    assert own
    paths = os.pathsep.join(map(str, (SITE, ROOT)))
    environment = {**os.environ, "PYTHONPATH": paths, "NULL_GPU_LIBRARY": "none"}
    code = f"import {', '.join(own)}, sys; sys.exit('Helper' not in str(sys.meta_path[0]))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
