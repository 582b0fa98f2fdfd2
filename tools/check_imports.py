"""Import what a run needs, and explain each failure: `.venv/bin/python -m tools.check_imports
cpu|gpu [GROUP ...]`.

The GPU builds are imported without a GPU as well: an image of a container is made where there is
none.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import shutil
import sys
import warnings
from collections.abc import Iterator

from tools.setup_env import MIN_DRIVER, has_gpu

CORE = (
    "torch.distributed", "transformers.models.qwen3", "vllm", "monarch.actor", "rl.weights.store",
    "tyro",
    "safetensors", "rich", "matplotlib", "jinja2", "numba", "datasets", "losses.types",
)  # fmt: skip
ROLES = (
    "actors.controller",
    "actors.trainer",
    "actors.vllm.core",
    "actors.generator",
    "actors.reward",
)
"""Modules that the processes of a run import. They need nothing beyond `CORE`; Python keeps their
compiled files.
"""
GROUPS = {
    "float8": ("torchao.float8",),
    "gguf": ("gguf",),
    "report": ("playwright.sync_api",),
    "smollm2": ("gguf",),
    "sinks": ("torch.utils.tensorboard", "wandb", "trackio.sqlite_storage", "prometheus_client"),
    "tasks": ("math_verify", "reasoning_gym", "verifiers.v1"),
    "test": ("pytest", "pytest_timeout", "xdist", "mypy", "ruff", "torchao.float8", "peft",
        "kubernetes", "nbclient",
             "ipykernel", "schemathesis"),
    "tinker": ("tinker", "fastapi", "uvicorn"),
    "torchstore": ("torchstore",),
    "trl": ("trl",),
}  # fmt: skip
HINTS = (
    ("torchvision::nms", "a CUDA build of torchvision stands beside PyTorch's CPU build: uninstall "
                         "torchvision"),
    ("cannot open shared object file", "a system library is missing: install the package that "
     "holds the named file (Debian and Ubuntu: libnuma1 for libnuma.so.1, libgomp1 for "
     "libgomp.so.1)"),
    ("GLIBC", "this Linux is older than the builds: use one with glibc 2.35 or newer, or a "
              "container of one"),
    ("", "run `make clean-venv` and try again; if the error stays, report it with the lines above"),
)  # fmt: skip


def find_problem(device: str) -> str | None:
    """Return why the imported packages cannot be used on this machine, or None."""
    import torch

    if device == "gpu" and not torch.cuda.is_available():
        if has_gpu():
            return (
                f"PyTorch {torch.__version__} sees no GPU: compare the driver's CUDA version "
                f"(nvidia-smi) with PyTorch's ({torch.version.cuda}), or choose the CPU with "
                "RELAY_DEVICE=cpu"
            )
        print(
            f"  no GPU answers on this machine; a run needs one, with driver {MIN_DRIVER} or newer",
            flush=True,
        )
    if device == "cpu" and not shutil.which("lscpu"):
        return (
            "vLLM reads the processor's layout from lscpu, which is not on PATH: install util-linux"
        )
    return None


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def main(device: str, *groups: str) -> int:
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
    warnings.simplefilter("ignore")
    failed = False
    for name in (*CORE, *(module for group in groups for module in GROUPS.get(group, ()))):
        try:
            with _silence():
                importlib.import_module(name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an import runs any code, and may raise anything
            failed = True
            text = f"{type(error).__name__}: {error}"
            hint = next(hint for symptom, hint in HINTS if symptom in text)
            print(f"  {name} does not import: {text}\n  What to do: {hint}", flush=True)
    for name in ROLES:
        # On a machine without a GPU, the GPU builds may refuse some of them.
        with contextlib.suppress(Exception), _silence():
            importlib.import_module(name)
    problem = None if failed else find_problem(device)
    if problem is not None:
        print(f"  {problem}", flush=True)
    return int(failed or problem is not None)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
