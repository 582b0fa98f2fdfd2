"""The cookbook's recipes, unmodified, against this project's server: `make tinker-cookbook`.

Installs the cookbook into an environment of its own, makes a tiny base model or opens SmolLM2,
starts a server, runs the recipes one after another, and prints which promises each kept. Exit
status: 0 all promises kept, 1 one broken, 2 the environment, the model or the server is
unavailable, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rl.tinker.backend import TinkerBackend
from rl.tinker.base_model import BaseModelFolder
from rl.tinker.http_server import ServerThread
from rl.tinker.local import LocalTinkerBackend, make_backend
from rl.utils.compat import exit_process
from rl.utils.proxies import make_loopback_exemption
from tools.setup_env import Environment, InstallError, Refusal
from tools.tinker_cookbook.capture import make_capture_recipe, read_captured
from tools.tinker_cookbook.model import make_base_model
from tools.tinker_cookbook.recipes import (
    Evidence,
    Finding,
    Recipe,
    all_recipes,
    chosen,
    read_rows,
    smollm2_recipes,
)
from tools.tinker_cookbook.served import RecordingBackend, SampleLog

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "outputs" / "tinker_cookbook"
VENV = ".venv-cookbook"
"""Apart from `.venv`, because the cookbook needs another version of transformers than vLLM."""
TORCH, COOKBOOK = "torch==2.13.0+cpu", "tinker-cookbook==0.6.1"
PACKAGES = (
    "tinker==0.38.0",
    "chz==0.4.0",
    "blobfile==3.3.0",
    "transformers==4.57.6",
    "datasets>=5,<6",
    "cloudpickle>=3,<4",
    "aiohttp>=3.9",
    "openai>=3,<4",
    "anthropic>=2,<3",
    "pillow>=12",
    "pylatexenc>=2.10,<3",
    "rich>=14",
    "sympy>=1.13",
    "termcolor>=3,<4",
    "tqdm>=4.67",
)
"""Imports of the recipes. The cookbook comes without its dependencies: tml-renderers, which these
recipes do not use, has no build for Python 3.11 in the versions that it accepts."""
EXAMPLE_DATA = Path("tinker_cookbook/example_data/conversations.jsonl")
OFFLINE = {
    "TINKER_TELEMETRY": "0",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}
END_S, POLL_S = 45.0, 0.05
TIMED_OUT = -1000
"""Status of a process that was ended at its deadline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Runner:
    """Runs recipes against one server."""

    python: Path
    """Interpreter of the cookbook's environment."""
    model: str
    """Name of the base model: the folder of its tokenizer."""
    server: Mapping[str, str]
    """Environment variables that name the server and the key."""
    folder: Path
    """Folder of the recipes' logs and results."""
    deadline_s: float
    """Longest run of one recipe."""
    samples: SampleLog | None = None
    """Log of the server's samples; None keeps none."""

    def command(self, recipe: Recipe) -> list[str]:
        """Return the command that a user would type; it resumes a run that an earlier process
        left.
        """
        arguments = {
            **recipe.arguments,
            "model_name": self.model,
            "log_path": self.folder / recipe.name / "run",
            "behavior_if_log_dir_exists": "resume",
        }
        return [
            str(self.python),
            *recipe.program,
            *(f"{name}={value}" for name, value in arguments.items()),
        ]

    def run(self, recipe: Recipe) -> list[Finding]:
        """Run a recipe and print which promises it kept."""
        print(f"{recipe.name} ...", flush=True)
        started, folder = time.monotonic(), self.folder / recipe.name
        folder.mkdir(parents=True)
        log = folder / "process.log"
        if self.samples is not None:
            self.samples.take()  # Those of the recipe before are not asked for any more.
        statuses = []
        for kill_after in [None] if recipe.kill_after is None else [recipe.kill_after, None]:
            start_of_log = log.stat().st_size if log.exists() else 0
            statuses.append(self._process(recipe, log, started + self.deadline_s, kill_after))
        evidence = Evidence(
            statuses=tuple(statuses),
            rows=read_rows(folder / "run" / "metrics.jsonl"),
            checkpoints=read_rows(folder / "run" / "checkpoints.jsonl"),
            log=log.read_bytes()[start_of_log:].decode(errors="replace"),
            captured=read_captured(folder / "run"),
            served=() if self.samples is None else self.samples.take(),
        )
        findings = [check(evidence) for check in recipe.checks]
        print(f"{recipe.name}: {time.monotonic() - started:.0f} s, log {log}")
        for finding in findings:
            print(
                f"  {'kept' if finding.holds else 'NOT KEPT'}: {finding.promise} ({finding.seen})",
                flush=True,
            )
        return findings

    def _process(self, recipe: Recipe, log: Path, deadline: float, kill_after: int | None) -> int:
        """Run one process and return its exit status, negative after a signal; end its whole
        process group.
        """
        with log.open("ab") as output:
            process = subprocess.Popen(
                self.command(recipe),
                cwd=log.parent,
                env={**os.environ, **make_loopback_exemption(os.environ), **OFFLINE, **self.server},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        checkpoints = log.parent / "run" / "checkpoints.jsonl"
        try:
            while process.poll() is None:
                if time.monotonic() > deadline:
                    return TIMED_OUT
                if kill_after is not None and len(read_rows(checkpoints)) >= kill_after:
                    process.kill()
                    return process.wait(END_S)
                time.sleep(POLL_S)
            return process.returncode
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(END_S)


def set_up(root: Path) -> Environment:
    """Install what is missing of the cookbook's environment.

    Raises:
        InstallError: an installation step failed.
        Refusal: the environment cannot be created with this Python.
    """
    key = hashlib.sha256(json.dumps([TORCH, COOKBOOK, PACKAGES, sys.version]).encode()).hexdigest()
    environment = Environment(root / VENV)
    with (root / f"{VENV}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second call waits for the first
        if not environment.is_complete(key, groups=[]):
            print(f"the cookbook's environment, {environment.venv}", flush=True)
            environment.create()
            environment.install_torch(TORCH)
            environment.install(TORCH, *PACKAGES)
            environment.install("--no-deps", COOKBOOK)
            environment.finish(key, groups=[])
    return environment


def run_all(names: Sequence[str], *, model: str, deadline_s: float) -> int:
    python = set_up(ROOT).python
    if model == "smollm2":
        recipes = chosen(smollm2_recipes(), names)
        backend: TinkerBackend = make_backend(model)
        samples = None
    else:
        (site_packages,) = (ROOT / VENV / "lib").glob("python*/site-packages")
        whole = (*all_recipes(site_packages / EXAMPLE_DATA), make_capture_recipe())
        recipes = chosen(whole, names)
        samples = SampleLog()
        base = BaseModelFolder.Config(folder=str(make_base_model(CACHE)))
        backend = RecordingBackend(config=LocalTinkerBackend.Config(base=base), samples=samples)
    folder = CACHE / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    server = ServerThread(backend, storage_folder=folder / "storage")
    try:
        address = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.api_key}
        runner = Runner(
            python=python,
            model=backend.base_model.name,
            server=address,
            folder=folder,
            deadline_s=deadline_s,
            samples=samples,
        )
        findings = {recipe.name: runner.run(recipe) for recipe in recipes}
    finally:
        server.close()
    results = {name: [asdict(finding) for finding in found] for name, found in findings.items()}
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(finding.holds for found in findings.values() for finding in found) else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make tinker-cookbook", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="RECIPE", help="names of recipes to run"
    )
    parser.add_argument("--model", choices=("tiny", "smollm2"), default="tiny", help="base model")
    parser.add_argument(
        "--deadline_s", type=float, default=1800.0, help="longest run of one recipe"
    )
    args = parser.parse_args(argv)
    return run_command(lambda: run_all(args.only, model=args.model, deadline_s=args.deadline_s))


def run_command(run: Callable[[], int]) -> int:
    """Return the exit status of `run`, also if it is refused or interrupted."""
    # An exception, so that running processes are ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return run()
    except (InstallError, Refusal, ValueError) as error:
        print(f"tinker-cookbook: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ntinker-cookbook: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    exit_process(main())
