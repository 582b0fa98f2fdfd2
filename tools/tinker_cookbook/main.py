"""The cookbook's recipes, unmodified, against this project's server: `make tinker-cookbook`.

Installs the cookbook into an environment of its own, makes a tiny base model, starts a server, runs the recipes one
after another, and prints which promises each kept. Exit status: 0 all promises kept, 1 one broken, 2 the
environment, the model or the server is unavailable, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rl.utils.compat import exit_process
from tools.setup_env import Environment, InstallError, Refusal
from tools.tinker_cookbook.model import CACHE, ROOT, WarmStart, WarmStartError, make_base_model
from tools.tinker_cookbook.recipes import Evidence, Finding, Recipe, all_recipes, chosen, read_rows

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
    "pillow>=12",
    "pylatexenc>=2.10,<3",
    "rich>=14",
    "sympy>=1.13",
    "termcolor>=3,<4",
    "tqdm>=4.67",
)
"""Imports of the recipes. The cookbook comes without its dependencies: tml-renderers, which these recipes do not
use, has no build for Python 3.11 in the versions that it accepts."""
EXAMPLE_DATA = Path("tinker_cookbook/example_data/conversations.jsonl")
API_KEY = "tml-local-cookbook-run"
OFFLINE = {
    "TINKER_API_KEY": API_KEY,
    "TINKER_TELEMETRY": "0",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}
START_S, END_S, ANSWER_S, POLL_S = 180.0, 45.0, 30.0, 0.05
TIMED_OUT = -1000
"""Status of a process that was ended at its deadline."""


class ProcessError(Exception):
    """A process ended too early or did not start in time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    recipe: str
    time_s: float
    findings: tuple[Finding, ...]

    @property
    def holds(self) -> bool:
        return all(finding.holds for finding in self.findings)


@dataclass(frozen=True, kw_only=True, slots=True)
class Runner:
    """Runs recipes against one server."""

    python: Path
    """Interpreter of the cookbook's environment."""
    model: Path
    """Folder of the base model, and its name."""
    url: str
    folder: Path
    """Folder of the recipes' logs and results."""
    deadline_s: float
    """Longest run of one recipe."""

    def command(self, recipe: Recipe) -> list[str]:
        """Return the command that a user would type; it resumes a run that an earlier process left."""
        arguments = {
            **recipe.arguments,
            "model_name": self.model,
            "log_path": self.folder / recipe.name / "run",
            "behavior_if_log_dir_exists": "resume",
        }
        module = f"tinker_cookbook.recipes.{recipe.module}"
        return [str(self.python), "-m", module, *(f"{name}={value}" for name, value in arguments.items())]

    def run(self, recipe: Recipe) -> Outcome:
        print(f"{recipe.name} ...", flush=True)
        started = time.monotonic()
        (self.folder / recipe.name).mkdir(parents=True)
        kills = [None] if recipe.kill_after is None else [recipe.kill_after, None]
        statuses = tuple(
            self._process(recipe, number=number, deadline=started + self.deadline_s, kill_after=kill_after)
            for number, kill_after in enumerate(kills, start=1)
        )
        log = self._log(recipe, len(statuses))
        evidence = Evidence(
            statuses=statuses,
            rows=read_rows(self.folder / recipe.name / "run" / "metrics.jsonl"),
            checkpoints=self._checkpoints(recipe),
            log=log.read_text(encoding="utf-8", errors="replace"),
            kept=self._server_checkpoints(),
        )
        findings = tuple(check(evidence) for check in recipe.checks)
        outcome = Outcome(recipe=recipe.name, time_s=time.monotonic() - started, findings=findings)
        print(f"{recipe.name}: {outcome.time_s:.0f} s, {'kept' if outcome.holds else 'NOT KEPT'}", flush=True)
        if statuses[-1] != 0:
            print(log_end(log), flush=True)
        return outcome

    def _process(self, recipe: Recipe, *, number: int, deadline: float, kill_after: int | None) -> int:
        """Run one process and return its exit status, negative after a signal."""
        environment = {**OFFLINE, "TINKER_BASE_URL": self.url}
        cwd = self.folder / recipe.name
        with running(
            self.command(recipe), log=self._log(recipe, number), cwd=cwd, environment=environment
        ) as it:
            while it.poll() is None:
                if time.monotonic() > deadline:
                    return TIMED_OUT
                if kill_after is not None and len(self._checkpoints(recipe)) >= kill_after:
                    kill(it)
                time.sleep(POLL_S)
            return it.returncode

    def _log(self, recipe: Recipe, number: int) -> Path:
        return self.folder / recipe.name / f"process-{number}.log"

    def _checkpoints(self, recipe: Recipe) -> tuple[Mapping[str, object], ...]:
        return read_rows(self.folder / recipe.name / "run" / "checkpoints.jsonl")

    def _server_checkpoints(self) -> tuple[str, ...]:
        url = f"{self.url}/api/v1/checkpoints?limit=1000"
        request = urllib.request.Request(url, headers={"X-API-Key": API_KEY})
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return tuple(checkpoint["tinker_path"] for checkpoint in json.load(answer)["checkpoints"])


# Processes


@contextlib.contextmanager
def running(
    argv: Sequence[str], *, log: Path, cwd: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process with its output appended to `log`; end it with its whole process group."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=END_S)
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=END_S)


def log_end(log: Path, *, num_lines: int = 20) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:]
    return "\n".join([*(f"  | {line}" for line in lines), f"  whole log: {log}"])


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Run a server on a free port and yield its URL.

    Raises:
        ProcessError: the server does not start, or ends by itself.
    """
    log = folder / "server.log"
    argv = [
        sys.executable, "-m", "rl.tinker.server", "--module", "tools.tinker_cookbook.model",
        "--config", "cookbook", "--storage_folder", str(folder / "storage"),
    ]  # fmt: skip
    with running(argv, log=log, cwd=ROOT, environment={"PYTHONPATH": str(ROOT)}) as process:
        yield wait_for_url(process, log=log, deadline_s=START_S)
        if process.poll() is not None:
            raise ProcessError(f"the server ended by itself with status {process.returncode}: {log}")


def wait_for_url(process: subprocess.Popen[bytes], *, log: Path, deadline_s: float) -> str:
    deadline = time.monotonic() + deadline_s
    pattern = re.compile(r"^serving the Tinker API at (\S+)$", re.MULTILINE)
    while (found := pattern.search(log.read_text(errors="replace"))) is None:
        if process.poll() is not None:
            raise ProcessError(f"the server ended with status {process.returncode}\n{log_end(log)}")
        if time.monotonic() > deadline:
            raise ProcessError(f"the server did not start within {deadline_s:g} s\n{log_end(log)}")
        time.sleep(POLL_S)
    return found[1]


# Program


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


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a table with one row per promise."""
    rows = [("recipe", "s", "promise", "kept", "seen")]
    for outcome in outcomes:
        for i, finding in enumerate(outcome.findings):
            head = (outcome.recipe, f"{outcome.time_s:.0f}") if i == 0 else ("", "")
            rows.append((*head, finding.promise, "yes" if finding.holds else "NO", finding.seen))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]).rstrip()
        for row in rows
    )


def run_all(args: argparse.Namespace) -> int:
    python = set_up(ROOT).python
    (site_packages,) = (ROOT / VENV / "lib").glob("python*/site-packages")
    recipes = chosen(all_recipes(site_packages / EXAMPLE_DATA), args.only)
    model = make_base_model(WarmStart(), log=lambda text: print(text, flush=True))
    folder = CACHE / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with serving(folder) as url:
        print(f"server at {url}; logs and results in {folder}", flush=True)
        runner = Runner(python=python, model=model, url=url, folder=folder, deadline_s=args.deadline_s)
        outcomes = [runner.run(recipe) for recipe in recipes]
    print(f"\n{table(outcomes)}", flush=True)
    results = json.dumps([asdict(outcome) for outcome in outcomes], indent=1)
    (folder / "results.json").write_text(results + "\n", encoding="utf-8")
    return 0 if all(outcome.holds for outcome in outcomes) else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make tinker-cookbook", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="RECIPE", help="names of recipes to run")
    parser.add_argument("--deadline_s", type=float, default=600.0, help="longest run of one recipe")
    args = parser.parse_args(argv)
    # An exception, so that running processes are ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return run_all(args)
    except (InstallError, Refusal, WarmStartError, ProcessError, ValueError) as error:
        print(f"tinker-cookbook: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ntinker-cookbook: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    exit_process(main())
