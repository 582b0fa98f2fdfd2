"""Programs and whole runs on the null device (tools/null_gpu), as tests with the marker `rehearsal`
start them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.observability.metrics import read_metrics
from tools.null_gpu.counters import Counters, read_folder
from tools.null_gpu.device import NullGpu

ROOT = Path(__file__).parents[2]
ONE_ALL_REDUCE = {
    "VLLM_SKIP_P2P_CHECK": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
"""Settings by which vLLM sums with a kernel of its own; the other takes memory that the null device
does not have.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsed:
    """A program that ended."""

    status: int | str
    """Exit status, or "killed" if the time limit was reached."""
    output: str
    """Standard output."""
    errors: str
    """Standard error."""
    counters: list[Counters]
    """Those of each process that used a device."""

    @property
    def result(self) -> Any:
        """The last line of standard output, read as JSON."""
        assert self.status == 0, self.describe()
        return json.loads(self.output.strip().splitlines()[-1])

    @property
    def violations(self) -> list[str]:
        """Calls that a capture does not allow, of all processes."""
        return [
            call
            for one in self.counters
            for call in one.calls
            if call.startswith("capture violation")
        ]

    def of_role(self, role: str) -> list[Counters]:
        """Return the counters of a role's processes, by rank."""
        return [one for one in self.counters if one.role == role]

    def describe(self) -> str:
        return f"status {self.status}\n{self.output[-6000:]}\n{self.errors[-6000:]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsedRun(Rehearsed):
    """A whole run that ended."""

    folder: Path

    @property
    def steps(self) -> list[dict[str, float]]:
        return [row for row in read_metrics(self.folder / "metrics.jsonl") if "reward/mean" in row]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """Starter of programs on the null device; each call counts anew."""

    gpu: NullGpu
    folder: Path
    """Folder for counters and runs."""

    def python(
        self,
        *arguments: str,
        settings: Mapping[str, object] | None = None,
        env: Mapping[str, str] | None = None,
        limit_s: float = 240,
    ) -> Rehearsed:
        """Run Python until it ends within `limit_s`, e.g. `python("-c", code, settings={"DEVICES":
        2})`.
        """
        return Rehearsed(**self._run(arguments, settings=settings, env=env, limit_s=limit_s))

    def train(
        self,
        *options: str,
        settings: Mapping[str, object] | None = None,
        env: Mapping[str, str] | None = None,
        limit_s: float = 480,
    ) -> RehearsedRun:
        """Run `rl.train` with these options until it ends within `limit_s`."""
        run = ("-m", "rl.train", *options, "--dump_folder", str(self.folder), "--name", "run")
        ended = self._run(run, settings=settings, env=env, limit_s=limit_s)
        return RehearsedRun(**ended, folder=self.folder / "run")

    def _run(
        self,
        arguments: tuple[str, ...],
        *,
        settings: Mapping[str, object] | None,
        env: Mapping[str, str] | None,
        limit_s: float,
    ) -> dict[str, Any]:
        counters = self.folder / f"counters-{len(list(self.folder.glob('counters-*')))}"
        counters.mkdir(parents=True)
        process = subprocess.Popen(
            [self.gpu.python, *arguments],
            cwd=ROOT,
            env=self.gpu.environment(settings, counters=counters) | dict(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        status: int | str = "killed"
        try:
            output, errors = process.communicate(timeout=limit_s)
            status = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate(
                timeout=60
            )  # actors that lose their controller end as well
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return {
            "status": status,
            "output": output,
            "errors": errors,
            "counters": read_folder(counters),
        }
