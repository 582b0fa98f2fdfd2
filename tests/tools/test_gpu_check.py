"""The checks' runner and their judgement; the checks themselves need GPU builds
(tests/rehearsal).
"""

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from tools.gpu_check import __main__ as gpu_check
from tools.gpu_check.__main__ import Check, compare, lines_of, run_apart
from tools.gpu_check.report import Report

PYTHON = sys.executable


def test_a_wrong_result_fails_and_a_low_figure_is_slow():
    report = Report()
    report.close("a sum", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), atol=0.1)
    report.figure("GB/s", 3.0, at_least=5.0)
    assert (report.result, report.faults) == ("failed", ["a sum differs by 0.5, more than 0.1"])
    assert report.slow == ["GB/s 3 is below 5"]
    report.faults.clear()
    assert report.result == "slow"


def test_nan_and_another_shape_fail():
    report = Report()
    report.close("a sum", torch.tensor([float("nan")]), torch.zeros(1), atol=1.0)
    report.close("a shape", torch.zeros(2, 1), torch.zeros(2), atol=1.0)
    assert report.faults == [
        "a sum differs by nan, more than 1", "a shape has the shape (2, 1) instead of (2,)",
    ]  # fmt: skip


def test_without_numbers_only_the_rest_is_judged():
    report = Report(numbers=False)
    report.close("a sum", torch.tensor([1.0]), torch.tensor([9.0]), atol=0.1)
    report.figure("GB/s", 3.0, at_least=5.0)
    assert report.result == "ok"
    report.require(False, "no pinned memory")
    assert report.result == "failed"


def test_a_check_that_lost_a_fifth_of_a_kept_figure_is_slow():
    report = Report()
    report.figure("GB/s", 79.0, at_least=5.0)
    report.figure("step s", 0.1)
    found = asdict(report) | {"result": report.result}
    compare(found, kept={"GB/s": 100.0, "step s": 0.9})
    assert (found["result"], found["slow"]) == ("slow", ["GB/s 79 was 100 before"])


def test_the_table_names_what_a_machine_lacks():
    found = asdict(Report(figures={"step s": 0.5}, not_here="needs 5 GPUs; there is 1"))
    found |= {"result": "not here", "seconds": 1.0}
    lines = lines_of("recovery", found, kept={"step s": 0.25})
    assert re.fullmatch(r"recovery +not here +1.0 s  FSDP 2 x TP 2 .*", lines[0])
    assert [line.strip() for line in lines[1:]] == [
        "step s: 0.5  (kept: 0.25)",
        "! needs 5 GPUs; there is 1",
    ]


def planted(monkeypatch: pytest.MonkeyPatch, folder: Path, body: str) -> None:
    """Replace the command of a check's process by a Python program."""
    program = folder / "program.py"
    program.write_text(body)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    (folder / "python").write_text(f'#!/bin/sh\nexec {PYTHON} {program} "$@"\n')
    (folder / "python").chmod(0o755)


def test_a_check_that_hangs_or_dies_fails_and_leaves_no_process(tmp_path, monkeypatch):
    planted(monkeypatch, tmp_path, "import time; time.sleep(60)")
    found = run_apart("kernels", folder=tmp_path, numbers=True, limit_s=1.0)
    assert found["result"] == "failed"
    assert "not ended after 1 s" in found["faults"][0]
    planted(monkeypatch, tmp_path, "import os; os.abort()")
    found = run_apart("kernels", folder=tmp_path, numbers=True, limit_s=20.0)
    assert found["result"] == "failed"
    assert "ended with status -6" in found["faults"][0]


def test_an_exception_is_the_checks_fault(tmp_path, monkeypatch):
    monkeypatch.setitem(
        gpu_check.CHECKS, "kernels", Check(sentence="x", function="report:NO_FUNCTION", limit_s=1.0)
    )
    gpu_check.run_here("kernels", file=tmp_path / "kernels.json", numbers=True)
    written = json.loads((tmp_path / "kernels.json").read_text())
    assert written["result"] == "failed"
    assert written["faults"][0].startswith("AttributeError: ")


def test_all_limits_together_are_eleven_minutes():
    assert len(gpu_check.CHECKS) == 11
    assert sum(check.limit_s for check in gpu_check.CHECKS.values()) <= 660


def test_a_check_names_the_packages_that_it_needs_and_is_not_run():
    lacking = Check(sentence="x", function="no:such", limit_s=1.0, packages=("torch", "no_vllm"))
    report = Report()
    lacking.run(report)
    assert (report.result, report.not_here) == ("not here", "needs no_vllm")


def test_a_part_without_its_package_is_noted_and_the_rest_is_checked():
    report = Report()
    assert report.has_package("torch", part="products")
    assert not report.has_package("no_vllm", part="fused layers")
    assert report.notes == ["fused layers: not checked, because no_vllm is not installed"]
    assert report.result == "ok"
