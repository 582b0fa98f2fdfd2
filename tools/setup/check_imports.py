"""Import what a run needs, in the new environment, and say of each failure what to do.

`.venv/bin/python tools/setup/check_imports.py cpu|gpu [GROUP ...]`; status 1 when anything fails.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence

ANY_FAILURE = (Exception, SystemExit)
"""An import runs other people's code, so it may raise anything; this script's work is to name it."""


class UnusableError(Exception):
    """Imports, and still cannot be used; the message says what to do."""


HINTS = (
    (
        "torchvision::nms",
        "a CUDA build of torchvision stands beside PyTorch's CPU build: "
        ".venv/bin/python -m pip uninstall torchvision torchaudio torchcodec",
    ),
    (
        "cannot open shared object file",
        "a library of the system is missing: install the package that holds the file named here "
        "(Debian and Ubuntu: libnuma1 for libnuma.so.1, libgomp1 for libgomp.so.1)",
    ),
    ("GLIBC", "this Linux is older than the builds: use one with glibc 2.35 or newer, or a container of one"),
    ("No module named", "remove .venv (make clean-venv) and run again; if that fails too, report it"),
)


def find_hint(error: str) -> str:
    """What to do about an import that failed with `error`."""
    for symptom, hint in HINTS:
        if symptom in error:
            return hint
    return "remove .venv (make clean-venv) and run again; if it stays, report it with the lines above"


def check_torch(flavour: str) -> None:
    import torch

    if flavour == "gpu" and not torch.cuda.is_available():
        raise UnusableError(
            f"PyTorch {torch.__version__} sees no GPU (torch.cuda.is_available() is False): compare the "
            f"driver's CUDA version (nvidia-smi) with PyTorch's ({torch.version.cuda}), or choose the CPU "
            "with RELAY_DEVICE=cpu"
        )
    if not torch.distributed.is_available():
        raise UnusableError(
            f"PyTorch {torch.__version__} was built without torch.distributed: use another build"
        )


def check_system_tools(flavour: str) -> None:
    """What is run, not imported: an engine asks for it only when it starts, and fails obscurely."""
    if flavour == "cpu" and not shutil.which("lscpu"):
        raise UnusableError(
            "vLLM reads the processor's layout from lscpu, which is not on PATH: install util-linux"
        )
    if flavour == "gpu" and not (shutil.which("gcc") or shutil.which("clang")):
        raise UnusableError("Triton compiles with gcc, which is not on PATH: install gcc and python3-dev")


def check_transformers(_: str) -> None:
    from transformers import Qwen3ForCausalLM  # noqa: F401 - names are imported only when asked for


def check_vllm(_: str) -> None:
    from vllm import LLM  # noqa: F401


def check_monarch(_: str) -> None:
    from monarch.actor import this_host  # noqa: F401


def check_torchstore(_: str) -> None:
    """Through the module that adapts it, which refuses versions it was not made for."""
    import rl.weights.monarch_compat  # noqa: F401


def check_small_parts(_: str) -> None:
    for name in ("tyro", "safetensors", "rich", "matplotlib", "jinja2", "pygtrie", "rl", "losses"):
        importlib.import_module(name)


def check_test(_: str) -> None:
    for name in (
        "pytest",
        "pytest_timeout",
        "xdist",
        "mypy",
        "ruff",
        "torchao.float8",
        "peft",
        "math_verify",
        "kubernetes",
        "nbclient",
        "ipykernel",
        "schemathesis",
    ):
        importlib.import_module(name)


def check_float8(_: str) -> None:
    importlib.import_module("torchao.float8")


def check_trl(_: str) -> None:
    from trl import GRPOTrainer  # noqa: F401


def check_tasks(_: str) -> None:
    for name in ("datasets", "math_verify", "reasoning_gym", "verifiers.v1"):
        importlib.import_module(name)


def check_report(_: str) -> None:
    importlib.import_module("playwright.sync_api")


def check_tinker(_: str) -> None:
    for name in ("tinker", "tinker.proto.tinker_public_pb2", "fastapi", "uvicorn"):
        importlib.import_module(name)


def check_sinks(_: str) -> None:
    for name in ("torch.utils.tensorboard", "wandb", "trackio.sqlite_storage"):
        importlib.import_module(name)


CHECKS: dict[str, Callable[[str], None]] = {
    "tools of the system": check_system_tools,
    "torch": check_torch,
    "transformers": check_transformers,
    "vllm": check_vllm,
    "monarch": check_monarch,
    "torchstore": check_torchstore,
    "the smaller parts": check_small_parts,
}
GROUP_CHECKS: dict[str, Callable[[str], None]] = {
    "float8": check_float8,
    "report": check_report,
    "sinks": check_sinks,
    "tasks": check_tasks,
    "test": check_test,
    "tinker": check_tinker,
    "trl": check_trl,
}


def main(argv: Sequence[str]) -> int:
    flavour, *groups = argv
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
    warnings.simplefilter("ignore")
    status = 0
    for name, check in {**CHECKS, **{g: GROUP_CHECKS[g] for g in groups if g in GROUP_CHECKS}}.items():
        print(f"             {name} ...", end="", flush=True)
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                check(flavour)
        except UnusableError as error:
            status = 1
            print(f" not usable\n  {error}", flush=True)
        except ANY_FAILURE as error:
            status = 1
            text = f"{type(error).__name__}: {error}"
            print(f" does not import\n  {text}\n  What to do: {find_hint(text)}", flush=True)
        else:
            print(" ok", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
