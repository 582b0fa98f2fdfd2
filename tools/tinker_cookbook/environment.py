"""`.venv-cookbook`: the cookbook with what its recipes import, apart from `.venv`.

The two cannot share one: the cookbook asks for another transformers than vLLM. Its package comes without its
dependencies, because those include tml-renderers for other models, whose versions that it takes have no build
for Python 3.11; what the recipes of `recipes.py` import is listed here instead.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from tools.setup import state
from tools.setup.installer import LOG, Pip, Progress, install_cpu_torch, make_venv
from tools.setup.python import dotted
from tools.setup.run import hold_lock

FOLDER = ".venv-cookbook"
TORCH = "torch==2.13.0+cpu"
"""The recipes compute nothing with it that a GPU would speed up."""
COOKBOOK = "tinker-cookbook==0.6.1"
PACKAGES = (
    "tinker==0.38.0",
    "chz==0.4.0",
    "blobfile==3.3.0",
    "transformers==4.57.6",
    "datasets>=5,<6",
    "cloudpickle>=3,<4",
    "pillow>=12",
    "pylatexenc>=2.10,<3",
    "rich>=14",
    "sympy>=1.13",
    "termcolor>=3,<4",
    "tqdm>=4.67",
)


def environment_key(version: str) -> str:
    """Changes with what is installed, and for which Python."""
    text = json.dumps([TORCH, COOKBOOK, PACKAGES, version])
    return hashlib.sha256(text.encode()).hexdigest()


def is_in_place(venv: Path, *, key: str) -> bool:
    """Whether the last installation was completed, is of this key, and nothing was taken away since."""
    installed = state.read_installed(state.find_site_packages(venv))
    return state.is_complete(venv, key=key, groups=(), flavour="cpu", installed=installed)


def set_up(root: Path) -> Path:
    """The environment's Python, after installing what is missing; an interrupted call is taken up again.

    Raises:
        InstallError: from the first step that does not succeed.
        Refusal: the environment's Python is gone or of another version; or another call has held it for an
            hour.
    """
    venv = root / FOLDER
    key = environment_key(dotted(sys.version_info[:2]))
    python = venv / "bin" / "python"
    if is_in_place(venv, key=key):
        return python
    with hold_lock(root / f"{FOLDER}.lock"):
        if is_in_place(venv, key=key):
            return python
        # Gone until all is there again, so that no other call takes a half-done one for done.
        state.stamp_path(venv).unlink(missing_ok=True)
        _install(venv)
        installed = state.read_installed(state.find_site_packages(venv))
        state.write_stamp(venv, key=key, groups=(), installed=installed)
    return python


def _install(venv: Path) -> None:
    progress = Progress()
    print(f"the cookbook's environment, {venv}", flush=True)
    make_venv(venv, progress=progress)
    pip = Pip(python=venv / "bin" / "python", log=venv / LOG, progress=progress)
    progress.say(TORCH)
    install_cpu_torch(TORCH, pip=pip, venv=venv, progress=progress)
    progress.say("the official client, transformers and the rest")
    pip.install(TORCH, *PACKAGES)
    progress.say(COOKBOOK)
    pip.install("--no-deps", COOKBOOK)
    progress.say("ready")
