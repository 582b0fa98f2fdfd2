"""Measurements in separate processes, so that each side imports, allocates and compiles on its own.

    with Worker(Side, threads=2, name="relay") as worker:
        seconds = worker.call("step")

The process calls `Side(name="relay")` and then the named methods of what this returned. Arguments and results are
JSON. Run as `python -m benchmarks.processes MODULE NAME JSON`, this module is such a process.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 1800


class Worker:
    """A process with one object, whose methods can be called."""

    def __init__(self, factory: Callable[..., Any] | str, *, threads: int, **arguments: Any) -> None:
        """Start the process.

        Args:
            factory: function or class of a module of this package, or `module:name`.
            threads: default number of compute threads of the process.
        """
        if callable(factory):
            module = factory.__module__
            if module == "__main__":
                module = sys.modules["__main__"].__spec__.name  # type: ignore[union-attr]
            factory = f"{module}:{factory.__name__}"
        self.name = f"{factory}({json.dumps(arguments)})"
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.processes", *factory.split(":"), json.dumps(arguments)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
        )

    def call(self, method: str, *arguments: Any) -> Any:
        """Return what the method returned.

        Raises:
            TimeoutError: no answer within `TIMEOUT_S`.
            RuntimeError: the process ended; with the last that it wrote.
        """
        questions, answers = self._process.stdin, self._process.stdout
        assert questions is not None
        assert answers is not None
        answer = b""
        try:
            questions.write(f"{json.dumps([method, *arguments])}\n".encode())
            if not select.select([answers], [], [], TIMEOUT_S)[0]:
                raise TimeoutError(f"{self.name}: no answer to {method} within {TIMEOUT_S} s")
            answer = answers.readline()
        except BrokenPipeError:
            pass
        if not answer:
            self._process.wait()
            self._errors.seek(0)
            written = self._errors.read().decode(errors="replace")
            raise RuntimeError(f"{self.name} ended with {self._process.returncode}:\n{written[-4000:]}")
        return json.loads(answer)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            assert pipe is not None
            pipe.close()


def medians_of_sides(
    function: Callable[..., dict[str, float]],
    sides: Mapping[str, Mapping[str, Any]],
    *,
    repeats: int,
    threads: int,
    **arguments: Any,
) -> dict[str, dict[str, float]]:
    """Call the function in new processes, alternating between sides; return the medians of its figures by side.

    Args:
        sides: arguments of each side; `arguments` are those of all.
    """
    measured: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for repeat in range(repeats):
        for side, of_side in sides.items():
            with Worker(function, threads=threads, num_threads=threads, **arguments, **of_side) as worker:
                measured[side].append(worker.call("copy"))  # of the dictionary that the function returned
            figures = ", ".join(f"{name} {value:.4g}" for name, value in measured[side][-1].items())
            print(f"repeat {repeat + 1}, {side}: {figures}", flush=True)
    return {
        side: {name: statistics.median(figures[name] for figures in of_side) for name in of_side[0]}
        for side, of_side in measured.items()
    }


def whole_run(folder: Path, name: str, *options: str, timeout_s: float) -> list[dict[str, float]]:
    """Run training as a user starts it and return its metrics in order.

    Raises:
        RuntimeError: it failed, with the end of what it printed.
    """
    # Imported here so that measured processes import only what they need.
    from rl.observability.metrics import read_metrics

    done = subprocess.run(
        [sys.executable, "-m", "rl.train", "--dump_folder", str(folder), "--name", name, *options],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    if done.returncode:
        raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    path = folder / name / "metrics.jsonl"
    return read_metrics(path) if path.exists() else []


def tiny_run(config: Any, *, assets: str, tokens: int, num_steps: int) -> list[dict[str, float]]:
    """Run a config of sum-digits with all its actors in this process, from given weights, without evaluations."""
    from rl.config.registry import ResolvedRun
    from rl.observability.metrics import read_metrics

    config.hf_assets_path, config.warmup = assets, None
    config.loop.num_steps = config.loop.max_empty_steps = num_steps  # random weights are never right
    config.loop.sampling.max_tokens = tokens
    config.loop.eval_every = 0
    with tempfile.TemporaryDirectory() as folder:
        config.dump_folder = folder
        run = ResolvedRun(module="sum_digits", function="tiny", config=config)
        return read_metrics(config.build(run=run).run() / "metrics.jsonl")


def tiny_assets(folder: Path) -> str:
    """Write random weights of the tiny model."""
    from rl.models.hf import write_random_model
    from rl.models.qwen3 import model_registry

    return str(write_random_model(folder / "model", spec=model_registry("tiny"), seed=0))


def main(module: str, name: str, arguments: str) -> None:
    """Make the object, and answer each line of standard input with a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps the output of libraries out of the answers
    made = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    for line in sys.stdin:
        method, *given = json.loads(line)
        print(json.dumps(getattr(made, method)(*given)), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
