"""Weights from a trainer's GPUs to a generator's, through the run's own store
(benchmarks.weight_sync).
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import torch

from rl.observability.machine import measure_limits
from tools.gpu_check.report import Report

LEAST_OF_BUS = 0.4
"""Share of the rate of copies from pinned memory."""
REFUSED = "could not be page-locked"
"""Part of the store's warning."""


def sync(report: Report) -> None:
    num_gpus = torch.cuda.device_count()
    if num_gpus < 2:
        report.not_here = "needs 2 GPUs; there is 1"
        return
    limits = measure_limits(dtype="bfloat16", num_bytes=1 << 28, device=torch.device("cuda"))
    report.figure("bus GB/s", limits.host_bytes_per_s / 1e9)
    cases = [
        ("0.6b", 28, "one_to_one"),
        ("8b", 4, "fsdp2_to_tp2" if num_gpus >= 4 else "one_to_one"),
    ]
    for model, layers, case in cases:
        figures = _measure(report, "--model", model, "--layers", str(layers), "--only", case)
        for speed in ("push", "pull"):
            at_least = LEAST_OF_BUS * limits.host_bytes_per_s / 1e9
            report.figure(
                f"{model} {case} {speed} GB/s", figures[f"{speed}_gb_per_s"], at_least=at_least
            )


def _measure(report: Report, *options: str) -> dict[str, Any]:
    """Return the figures of a case; checksums that differ end it with an error."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.weight_sync",
        "--device",
        "cuda",
        "--repeats",
        "3",
        *options,
    ]
    done = subprocess.run(
        [*command, *([] if report.numbers else ["--no-check"])],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    print(done.stdout)
    refused = [line for line in done.stdout.splitlines() if REFUSED in line]
    report.require(not refused, refused[0] if refused else "")
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command[1:])} ended with {done.returncode}: {done.stdout[-500:]}"
        )
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["cases"][0]
    foreign = ", ".join(figures["foreign_contexts"])
    report.require(
        not foreign, f"contexts on GPUs of other ranks, which take 0.5 GB each: {foreign}"
    )
    return figures
