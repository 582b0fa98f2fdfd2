"""Resolve pyproject.toml into tools/constraints-cpu.txt and tools/constraints-gpu.txt: `make
constraints`.

The files hold names and versions only, so that any index serves them. Both are resolved for Python
3.11 on x86_64 Linux, the older of the two supported Pythons.
"""

from __future__ import annotations

import subprocess

from tools.setup_env import ROOT, TORCH, VENVS, Environment, read_project

PLATFORM = ("--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28")
PLAIN = ("--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links")
COMPILE = ("pip", "compile", "--quiet", "--upgrade", *PLATFORM, *PLAIN)


def resolve(device: str) -> None:
    """Write the constraints of one device, all optional groups included."""
    groups = sorted(set(read_project()["optional-dependencies"]) - set(VENVS) | {device})
    extras = [argument for group in groups for argument in ("--extra", group)]
    environment = Environment(ROOT / ".venv")
    settings = environment.uv_settings()
    if device == "gpu":
        settings.pop("UV_FIND_LINKS", None)  # local CPU builds would be preferred
    output = ROOT / "tools" / f"constraints-{device}.txt"
    torch = TORCH + ("+cpu" if device == "cpu" else "")
    subprocess.run(
        [ROOT / ".venv/bin/uv", *COMPILE, *extras, "--constraint", "-", "--output-file", output,
            "pyproject.toml"],
        input=torch, env=settings, cwd=ROOT, check=True, text=True, stdout=subprocess.DEVNULL,
        timeout=600,
    )  # fmt: skip


if __name__ == "__main__":
    for device in VENVS:
        resolve(device)
