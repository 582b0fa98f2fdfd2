"""Whole runs, as a user starts them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from tools.chaos import read_lines, run
from tools.fault_injection import Fault
from tools.gpu_check.report import Report

FOLDER = Path("outputs/gpu-check/runs")
STEPS = 3
SHORT = (
    "--loop.num_steps", str(STEPS), "--loop.groups_per_batch", "8", "--loop.eval_every", "0",
    "--task.num_eval", "8",
    "--warmup", "None",
)  # fmt: skip
LIMIT_S = 600.0
"""The check's own limit ends a run before."""


def shared(report: Report) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    _train(report, "shared", "--config", "tiny", *SHORT)


def disjoint(report: Report) -> None:
    if _has_gpus(report, 2):
        os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
        _train(report, "disjoint", "--config", "tiny", *SHORT)


def recovery(report: Report) -> None:
    if not _has_gpus(report, 5):
        return
    fault = Fault(phase="optim_step", victim="trainer", count=2)
    options = ("--config", "tiny_fsdp2_tp2", "--trainer.checkpoint.interval", "1", *SHORT)
    _train(report, "recovery", *options, faults=[fault])
    report.require(
        fault.marker(FOLDER / "recovery" / "logs").exists(),
        "no trainer process was killed: nothing was recovered",
    )


def _has_gpus(report: Report, num: int) -> bool:
    if (there := torch.cuda.device_count()) < num:
        report.not_here = f"needs {num} GPUs; there {'is' if there == 1 else 'are'} {there}"
    return report.not_here is None


def _train(report: Report, name: str, *options: str, faults: Any = ()) -> None:
    """Train sum-digits; fail unless all steps ended and the logprobs of trainer and generator
    agree.
    """
    folder, log = FOLDER / name, FOLDER / f"{name}.log"
    shutil.rmtree(folder, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    command = ["--module", "sum_digits", *options, "--dump_folder", str(FOLDER), "--name", name]
    status = run(command, log=log, faults=faults, limit_s=LIMIT_S)
    report.require(status == 0, f"the run ended with status {status}: {log}")
    steps = [record for record in read_lines(folder / "metrics.jsonl") if "time/step_s" in record]
    report.require(
        len({record["step"] for record in steps}) == STEPS, f"{len(steps)} of {STEPS} steps: {log}"
    )
    if not steps:
        return
    report.figure("step s", min(record["time/step_s"] for record in steps))
    bound = json.loads((folder / "config.json").read_text())["values"]["loop"]["max_logprob_diff"]
    if bound is not None:
        worst = max(record.get("logprob_diff/mean", 0.0) for record in steps)
        report.same("the generator's logprobs", worst, atol=bound)
