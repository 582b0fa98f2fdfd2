"""Check a GPU machine in eleven steps and under eleven minutes: `make gpu-check`.

    python -m tools.gpu_check [--only NAME ...] [--no-numbers] [--keep_figures]

Each check runs in a process of its own with a time limit, and none is skipped because an earlier
one failed. The table at the end gives each one's result (ok, slow, failed, or what the machine
lacks for it), its time and its figures, with those that were kept for this kind of GPU beside them;
outputs/gpu-check/gpu-check.json holds the same, the logs are beside it. Exit status: 0 nothing
failed, 1 a check failed.

`--no-numbers` judges neither results of kernels nor speeds: for devices that compute nothing
(tools/null_gpu).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from actors.launch.cleanup import find_by_environment
from rl.utils.processes import kill
from tools.gpu_check.report import FAILED, OK, SLOW, Report, is_installed

ROOT = Path(__file__).resolve().parent.parent.parent
KEPT = Path(__file__).with_name("figures.json")
"""Figures of earlier machines by the name of their GPU."""
SLOWER = 0.8
"""Share of a kept figure below which a figure is slow."""
OWNER = "RELAY_GPU_CHECK"
"""Environment variable that marks every process of a check."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    sentence: str
    function: str
    """`module:function` under tools.gpu_check; it is called with a Report."""
    limit_s: float
    packages: tuple[str, ...] = ()
    """Packages without which nothing of the check can run."""

    def run(self, report: Report) -> None:
        lacking = [package for package in self.packages if not is_installed(package)]
        if lacking:
            report.not_here = f"needs {' and '.join(lacking)}"
            return
        module, _, name = self.function.partition(":")
        function: Callable[[Report], None] = getattr(
            importlib.import_module(f"tools.gpu_check.{module}"), name
        )
        function(report)


CHECKS = {
    "machine": Check(
        sentence="driver, compiler, memory, GPUs and their links", function="machine:machine",
        limit_s=15
    ),
    "start": Check(
        sentence="imports, a Triton kernel, and an all-reduce over all GPUs",
        function="machine:start", limit_s=45
    ),
    "kernels": Check(
        sentence="kernels compute what their definitions say", function="kernels:kernels",
        limit_s=45
    ),
    "trainer": Check(
        sentence="a step of 0.6B equals the CPU's, fits its estimate, and is fast",
        function="training:trainer",
        limit_s=75,
    ),
    "parity": Check(
        sentence="losses, options, optimizers and the sampler give the CPU's numbers",
        function="parity:parity",
        limit_s=60,
    ),
    "compile": Check(
        sentence="compiled blocks give the same loss, faster", function="training:compiled",
        limit_s=60
    ),
    "generator": Check(
        sentence="CUDA graphs and the trainer give the same logprobs; sleep frees memory",
        function="generation:generator",
        limit_s=160,
        packages=("vllm",),
    ),
    "sync": Check(
        sentence="weights arrive bit for bit, from pinned memory, near the bus's speed",
        function="sync:sync",
        limit_s=40,
        packages=("monarch",),
    ),
    "shared": Check(
        sentence="the main job trains on one GPU, in turns with its generator",
        function="runs:shared",
        limit_s=55,
        packages=("vllm", "monarch"),
    ),
    "disjoint": Check(
        sentence="the main job trains on one GPU and generates on another",
        function="runs:disjoint", limit_s=50,
        packages=("vllm", "monarch"),
    ),
    "recovery": Check(
        sentence="FSDP 2 x TP 2 loses a trainer process and goes on", function="runs:recovery",
        limit_s=55,
        packages=("vllm", "monarch"),
    ),
}  # fmt: skip


def run_here(name: str, *, file: Path, numbers: bool) -> None:
    """Run a check in this process and write its report; an exception is a fault."""
    report = Report(numbers=numbers)
    try:
        CHECKS[name].run(report)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with the machine
        traceback.print_exc()
        first, *lines = f"{type(error).__name__}: {error}".splitlines()
        causes = [
            line for line in lines if re.match(r"[\w.]+Error: ", line)
        ]  # in the traceback of another process
        report.faults.append(": ".join([first, *causes[-1:]]))
    report.write(file)


def run_apart(name: str, *, folder: Path, numbers: bool, limit_s: float) -> dict[str, Any]:
    """Run a check in a process of its own; no process of it is left afterwards."""
    file, log = folder / f"{name}.json", folder / f"{name}.log"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tools.gpu_check", "--run", name, "--folder", str(folder)]
    owner, started = f"{os.getpid()}-{name}", time.monotonic()
    fault = None
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *([] if numbers else ["--no-numbers"])],
            cwd=ROOT, env=os.environ | {OWNER: owner}, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        if status := process.wait(limit_s):
            fault = f"ended with status {status}"
    except subprocess.TimeoutExpired:
        fault = f"not ended after {limit_s:g} s"
    finally:
        for left in find_by_environment(OWNER, owner):
            kill(left)
        process.wait()
    found = json.loads(file.read_text()) if file.exists() else asdict(Report())
    if fault is not None or not file.exists():
        found["faults"].append(f"{fault or 'no report'}: {log}")
        found["result"] = FAILED
    return found | {"seconds": round(time.monotonic() - started, 1)}


def gpu_name() -> str:
    """Return the name of the first GPU by its driver; no CUDA context is opened here."""
    try:
        import pynvml
    except ImportError:  # of the GPU builds
        return "no GPU"
    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))
    except pynvml.NVMLError:
        return "no GPU"


def lines_of(name: str, found: dict[str, Any], *, kept: dict[str, float]) -> list[str]:
    """Return a check's lines of the table."""
    lines = [f"{name:<10} {found['result']:<9} {found['seconds']:>6.1f} s  {CHECKS[name].sentence}"]
    for figure, value in found["figures"].items():
        before = f"  (kept: {kept[figure]:g})" if figure in kept else ""
        lines.append(f"{'':<29}{figure}: {value:g}{before}")
    reasons = [*found["faults"], *found["slow"], *found["notes"], found["not_here"]]
    return lines + [f"{'':<29}! {reason}" for reason in reasons if reason]


def compare(found: dict[str, Any], *, kept: dict[str, float]) -> None:
    """Call a check slow in which a figure that should be large lost a fifth of its kept value."""
    for name in found["judged"]:
        value = found["figures"][name]
        if name in kept and value < SLOWER * kept[name]:
            found["slow"].append(f"{name} {value:g} was {kept[name]:g} before")
            found["result"] = SLOW if found["result"] == OK else found["result"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=CHECKS, default=list(CHECKS), help="run these only"
    )
    parser.add_argument(
        "--no-numbers", action="store_true", help="judge neither results of kernels nor speeds"
    )
    parser.add_argument(
        "--keep_figures", action="store_true", help="keep this machine's figures for the next time"
    )
    parser.add_argument("--folder", type=Path, default=Path("outputs/gpu-check"))
    parser.add_argument(
        "--limit_factor", type=float, default=1.0, help="of all time limits, for a slow machine"
    )
    parser.add_argument("--run", choices=CHECKS, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.folder.mkdir(parents=True, exist_ok=True)
    numbers = not args.no_numbers
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # The check that runs is ended on the way.
    if args.run is not None:
        run_here(args.run, file=args.folder / f"{args.run}.json", numbers=numbers)
        return 0
    gpu = gpu_name()
    all_kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    kept, results = all_kept.get(gpu, {}), {}
    for name in args.only:
        print(f"{name}: {CHECKS[name].sentence} ...", flush=True)
        limit_s = CHECKS[name].limit_s * args.limit_factor
        found = run_apart(name, folder=args.folder, numbers=numbers, limit_s=limit_s)
        if numbers:
            compare(found, kept=kept.get(name, {}))
        results[name] = found
    print(f"\n{gpu}{'' if numbers else '; results of kernels and speeds were not judged'}")
    for name, found in results.items():
        print("\n".join(lines_of(name, found, kept=kept.get(name, {}))))
    whole = {"gpu": gpu, "numbers": numbers, "checks": results}
    (args.folder / "gpu-check.json").write_text(
        json.dumps(whole, indent=1) + "\n", encoding="utf-8"
    )
    if args.keep_figures and numbers:
        all_kept[gpu] = kept | {name: found["figures"] for name, found in results.items()}
        KEPT.write_text(json.dumps(all_kept, indent=1) + "\n", encoding="utf-8")
    return int(any(found["result"] == FAILED for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
