"""Measurements in separate processes, so that each side imports, allocates and compiles on its own.

    with Worker("benchmarks.sides:Side", threads=2, name="relay") as worker:
        seconds = worker.call("step")

The process calls `Side(name="relay")` and then the named methods of what this returned.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 1800
WARM_UP_TIMEOUT_S = 900
EXIT_S = 10


class Worker:
    """A process with one object, whose methods can be called."""

    def __init__(
        self, factory: Callable[..., Any] | str, *, threads: int, **arguments: Any
    ) -> None:
        """Start the process.

        Args:
            factory: function or class, or its `module:name`.
            threads: default number of compute threads of the process.
        """
        self.name = f"{factory}({arguments})"
        # Read by the libraries that the process imports.
        os.environ |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, factory, arguments))
        self._process.start()
        theirs.close()

    def call(self, method: str, *arguments: Any) -> Any:
        """Return what the method returned.

        Raises:
            TimeoutError: no answer within `TIMEOUT_S`.
            RuntimeError: the process raised, or it ended.
        """
        try:
            self._pipe.send((method, arguments))
            if not self._pipe.poll(TIMEOUT_S):
                raise TimeoutError(f"{self.name}: no answer to {method} within {TIMEOUT_S} s")
            error, answer = self._pipe.recv()
        except (EOFError, BrokenPipeError):
            self._process.join()
            raise RuntimeError(f"{self.name} ended with {self._process.exitcode}") from None
        if error:
            raise RuntimeError(f"{self.name} raised\n{error}")
        return answer

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(EXIT_S)  # A killed process leaves semaphores, which Python then reports.
        self._process.kill()
        self._process.join()


def _serve(
    pipe: Connection, factory: Callable[..., Any] | str, arguments: Mapping[str, Any]
) -> None:
    """Make the object at the first call, and answer each call."""
    made: Any = None
    while True:
        try:
            method, given = pipe.recv()
        except EOFError:
            return
        try:
            if made is None:
                if isinstance(factory, str):
                    module, _, name = factory.partition(":")
                    made = getattr(importlib.import_module(module), name)(**arguments)
                else:
                    made = factory(**arguments)
            pipe.send((None, getattr(made, method)(*given)))
        except Exception:  # noqa: BLE001  (whatever it was, the parent raises it)
            pipe.send((traceback.format_exc(), None))


def step_options(description: str | None) -> argparse.ArgumentParser:
    """Return the options of benchmarks that measure whole steps."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    options.add_argument("--quick", action="store_true", help="one short repeat of each")
    options.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    return options


def measure_steps(
    function: Callable[..., dict[str, float]],
    sides: Mapping[str, Mapping[str, Any]],
    *,
    args: argparse.Namespace,
    tokens: int,
) -> dict[str, dict[str, float]]:
    """Measure steps of the tiny model from the same random weights, with all actors, on each side
    in turn.
    """
    with tempfile.TemporaryDirectory() as folder:
        return medians_of_sides(
            function,
            sides,
            repeats=num_repeats(args),
            threads=args.threads,
            assets=tiny_assets(Path(folder)),
            tokens=tokens,
            steps=3 if args.quick else 12,
            num_warmup=num_warmup_steps(args),
        )


def num_repeats(args: argparse.Namespace) -> int:
    return 1 if args.quick else 3


def num_warmup_steps(args: argparse.Namespace) -> int:
    """Return how many steps at the start are not measured: they allocate memory, compile and fill
    the pipeline.
    """
    return 2 if args.quick else 3


def medians_of_sides(
    function: Callable[..., dict[str, float]],
    sides: Mapping[str, Mapping[str, Any]],
    *,
    repeats: int,
    threads: int,
    **arguments: Any,
) -> dict[str, dict[str, float]]:
    """Call the function in new processes, alternating between sides; return the medians of its
    figures by side.

    Args:
        sides: arguments of each side; `arguments` are those of all.
    """
    measured: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for repeat in range(repeats):
        for side, of_side in sides.items():
            with Worker(
                function, threads=threads, num_threads=threads, **arguments, **of_side
            ) as worker:
                measured[side].append(
                    worker.call("copy")
                )  # of the dictionary that the function returned
            figures = ", ".join(f"{name} {value:.4g}" for name, value in measured[side][-1].items())
            print(f"repeat {repeat + 1}, {side}: {figures}", flush=True)
    return {
        side: {name: statistics.median(figures[name] for figures in of_side) for name in of_side[0]}
        for side, of_side in measured.items()
    }


@contextmanager
def open_runs_folder() -> Iterator[Path]:
    """Provide a temporary folder for runs; their starting points are kept in `outputs/`.

    A warm-up takes minutes, and any earlier run of this checkout may have made it.
    """
    from rl.observability.run_folder import STARTING_POINTS

    points = ROOT / "outputs" / STARTING_POINTS
    points.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / STARTING_POINTS).symlink_to(points)
        yield Path(folder)


def prepare_start(folder: Path, *, seed: int) -> str:
    """Return the weights of `tiny` after its warm-up, which is made unless an earlier run has.

    Args:
        folder: of `open_runs_folder`.
    """
    # Imported here so that measured processes import only what they need.
    from actors.launch.placement import count_gpus, fit_to_devices
    from actors.preflight.plan import find_starting_point
    from configs.sum_digits import tiny
    from rl.rollouts.environment import Environments

    config = tiny()
    config.dump_folder, config.seed = str(folder), seed
    config = fit_to_devices(config, num_gpus=count_gpus())
    task = config.task.build()
    start = find_starting_point(
        config, task=task, source=None, environments=Environments(make=task.environment)
    )
    if start.warmed_up is None:
        return str(start.folder)

    # In a run of its own: a run that has made a warm-up has compiled and allocated already.
    whole_run(
        folder, f"start-{seed}", "--module", "sum_digits", "--config", "tiny", "--seed", str(seed),
        "--loop.num_steps", "0", "--loop.eval_every", "0", timeout_s=WARM_UP_TIMEOUT_S,
    )  # fmt: skip
    assert start.warmed_up.exists(), f"the warm-up is not in {start.warmed_up}"
    return str(start.warmed_up)


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


def loop_steps(
    config: Any,
    *,
    assets: str,
    tokens: int,
    steps: int,
    threads: Sequence[int],
    num_warmup: int,
    num_cooldown: int = 0,
    marker: str | None = None,
) -> list[dict[str, float]]:
    """Run a config with all its actors in this process, from given weights, without evaluations.

    Args:
        threads: compute threads of the trainer and of the generator.
        num_warmup: first steps, which are not measured.
        num_cooldown: last steps, which are not measured: a run that generates ahead has nothing
            left to generate.
        marker: file that is there from the end of the first step until the end of the run.

    Returns:
        The metrics of each measured step.
    """
    from rl.config.registry import RunRequest
    from rl.observability.metrics import read_metrics

    num_steps = num_warmup + steps + num_cooldown
    config.trainer.num_threads, config.generator.num_threads = threads
    config.hf_assets_path, config.warmup = assets, None
    config.trainer.checkpoint.enable = False  # Nothing of the run is kept.
    config.loop.num_steps = config.loop.max_empty_steps = (
        num_steps  # random weights are never right
    )
    config.loop.sampling.max_tokens = tokens
    config.loop.eval_every = 0
    with tempfile.TemporaryDirectory() as folder:
        config.dump_folder, config.name = folder, "steps"
        metrics = Path(folder) / "steps" / "metrics.jsonl"
        request = RunRequest(module="sum_digits", function="tiny", config=config)
        with nullcontext() if marker is None else mark_steps(Path(marker), metrics=metrics):
            config.build(request=request).run()
        return read_metrics(metrics)[num_warmup : num_warmup + steps]


@contextmanager
def mark_steps(marker: Path, *, metrics: Path) -> Iterator[None]:
    """Keep a marker from the first line of a run's metrics until the end of the block."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            if metrics.exists() and metrics.stat().st_size:
                marker.touch()
                return

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()
        marker.unlink(missing_ok=True)


def tiny_assets(folder: Path) -> str:
    """Write random weights of the tiny model."""
    from rl.models.files.hf import write_random_model
    from rl.models.qwen3 import model_registry

    return str(write_random_model(folder / "model", spec=model_registry("tiny"), seed=0))
