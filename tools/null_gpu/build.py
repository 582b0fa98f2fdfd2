"""Build the null device for an environment that holds the GPU builds.

Three libraries are compiled: one that is preloaded and stands in for the CUDA runtime, cuBLAS and
NCCL, the driver (libcuda.so.1), and NVML. What csrc/ does not define is filled with stubs that
succeed.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from tools.null_gpu.device import NullGpu

SOURCES = Path(__file__).parent / "csrc"
RUNTIME = ("settings", "counters", "device", "memory", "copies", "streams", "launches", "libraries")
IMPORTED = re.compile(r"^((__)?cuda[A-Z]|cublas|nccl[A-Z])")
"""Names of functions that the preloaded library has to define."""


def build(gpu: NullGpu) -> None:
    """Compile the libraries unless they are there and made from the same sources; raise ValueError
    if it cannot.
    """
    include = gpu.site_packages / "nvidia/cu13/include"
    if not (include / "cuda_runtime_api.h").exists():
        raise ValueError(
            f"{gpu.venv} has no headers of CUDA 13 ({include}): it is not an environment with the "
            "GPU builds. Create one with `RELAY_DEVICE=gpu python3 tools/setup_env.py`"
        )
    for program in ("gcc", "nm"):
        if not shutil.which(program):
            raise ValueError(
                f"the null device needs {program}, which is not on PATH: install gcc and binutils"
            )
    sources = [*sorted(SOURCES.iterdir()), Path(__file__)]
    key = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()
    stamp = gpu.folder / "built-from"
    if stamp.exists() and stamp.read_text() == key:
        return
    work = gpu.folder / "objects"
    shutil.rmtree(work, ignore_errors=True)
    for folder in (work, gpu.libraries):
        folder.mkdir(parents=True, exist_ok=True)

    def compile_all(names: Iterable[str]) -> list[Path]:
        return [
            _compile(SOURCES / f"{name}.c", work / f"{name}.o", include=include) for name in names
        ]

    runtime = compile_all(RUNTIME)
    wanted = {name for name in _imported(gpu.site_packages) if IMPORTED.match(name)}
    stubs = _stubs(wanted - _defined(runtime), work / "runtime_stubs.c", counted=True)
    _link(gpu.preloaded, [*runtime, stubs])

    driver = compile_all(["driver"])
    stubs = _stubs(
        _driver_functions(include / "cuda.h") - _defined(driver), work / "driver_stubs.c"
    )
    _link(
        gpu.libraries / "libcuda.so.1",
        [*driver, stubs],
        f"-L{gpu.libraries}",
        "-lnullgpu",
        "-Wl,-rpath,$ORIGIN",
    )
    link = gpu.libraries / "libcuda.so"  # Triton links its launchers against this name
    link.unlink(missing_ok=True)
    link.symlink_to("libcuda.so.1")
    _link(gpu.libraries / "libnvidia-ml.so.1", [*compile_all(["nvml"]), work / "settings.o"])
    stamp.write_text(key)


def _compile(source: Path, target: Path, *, include: Path | None = None) -> Path:
    options = ["-O1", "-fPIC", "-Wall", "-Werror", "-Wno-format-truncation"]
    _run(
        "gcc",
        *options,
        *([f"-I{include}"] if include else []),
        "-c",
        "-o",
        str(target),
        str(source),
    )
    return target


def _link(target: Path, objects: list[Path], *options: str) -> None:
    """Write the library beside its place and rename it: a running process may have it mapped."""
    partial = target.with_suffix(".part")
    name = f"-Wl,-soname,{target.name}"
    _run(
        "gcc",
        "-shared",
        "-o",
        str(partial),
        *map(str, objects),
        *options,
        name,
        "-ldl",
        "-lpthread",
    )
    partial.replace(target)


def _imported(site_packages: Path) -> set[str]:
    """Return the names of functions that the libraries of torch and vllm take from others."""
    libraries = [*site_packages.glob("torch/lib/*.so*"), *site_packages.glob("vllm/**/*.so")]
    table = _run("nm", "-D", "--undefined-only", *map(str, libraries))
    return {
        line.split()[-1].partition("@")[0] for line in table.splitlines() if line.startswith(" ")
    }


def _defined(objects: list[Path]) -> set[str]:
    lines = _run("nm", "--defined-only", "--extern-only", *map(str, objects)).splitlines()
    return {line.split()[-1] for line in lines if " " in line}


def _driver_functions(header: Path) -> set[str]:
    """Return the functions that cuda.h declares, under the names that a library has to define."""
    text = header.read_text()
    declared = set(re.findall(r"CUresult\s+CUDAAPI\s+(cu[A-Z]\w*)\s*\(", text))
    return declared | set(
        re.findall(r"#define\s+cu[A-Z]\w*\s+(cu[A-Z]\w+)\s*$", text, re.MULTILINE)
    )


def _stubs(names: set[str], source: Path, *, counted: bool = False) -> Path:
    count = 'null_gpu_count("{0}"); ' if counted else ""
    lines = [f"int {{0}}(void) {{{{ {count}return 0; }}}}".format(name) for name in sorted(names)]
    source.write_text("\n".join(["void null_gpu_count(const char *);", *lines, ""]))
    return _compile(source, source.with_suffix(".o"))


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise ValueError(f"{' '.join(command)[:500]} failed:\n{done.stderr}")
    return done.stdout
