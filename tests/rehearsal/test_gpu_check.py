"""`make gpu-check` on the null device: it reaches its end, and each check fails where its fault is planted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.rehearsal import ROOT, Rehearsal
from tools.gpu_check.__main__ import CHECKS

pytestmark = pytest.mark.rehearsal

CAPTURE_BREAKER = """
import runpy
HELP = runpy.run_path({original!r})["HELP"]

def wait_in_forward(module):
    forward = module.VLLMPolicy.forward
    def and_wait(self, input_ids, *args, **kwargs):
        input_ids.sum().item()
        return forward(self, input_ids, *args, **kwargs)
    module.VLLMPolicy.forward = and_wait

HELP["actors.vllm.model"] = wait_in_forward
"""
"""A sitecustomize.py with which the generator's model waits for the device in its forward."""


def checked(
    rehearsal: Rehearsal,
    *only: str,
    settings: dict[str, Any],
    env: dict[str, str] | None = None,
    status: int = 0,
) -> dict[str, Any]:
    """Run checks; return their results by name."""
    folder = rehearsal.folder / "gpu-check"
    command = ["-m", "tools.gpu_check", "--no-numbers", "--folder", str(folder), "--limit_factor", "5"]
    ended = rehearsal.python(
        *command,
        *(["--only", *only] if only else []),
        settings={"SKIP_COPIES": 1} | settings,
        env=env,
        limit_s=1800,
    )
    assert ended.status == status, ended.describe()
    return json.loads((folder / "gpu-check.json").read_text())["checks"]


@pytest.mark.timeout(2000)
def test_all_checks_reach_their_end(rehearsal):
    results = checked(rehearsal, settings={"DEVICES": 8})
    assert {name: found["result"] for name, found in results.items()} == dict.fromkeys(CHECKS, "ok")


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("check", "settings", "fault"),
    [
        ("machine", {"DRIVER": "570.124.06"}, "CUDA 13 needs 580 or newer"),
        ("start", {"DRIVER": "570.124.06"}, "driver"),
        ("trainer", {"MAX_ALLOCATED": 4 << 30}, "ran out of GPU memory"),
        ("sync", {"DEVICES": 2, "FAIL_REGISTER": 1}, "could not be page-locked"),
    ],
)
def test_a_planted_fault_fails_its_check(rehearsal, check, settings, fault):
    found = checked(rehearsal, check, settings=settings, status=1)[check]
    assert found["result"] == "failed"
    assert fault in "; ".join(found["faults"])


@pytest.mark.timeout(400)
def test_a_wait_within_a_captured_step_fails_the_generators_check(rehearsal, tmp_path):
    original = ROOT / "tools" / "null_gpu" / "site" / "sitecustomize.py"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(CAPTURE_BREAKER.format(original=str(original)))
    paths = [tmp_path / "site", Path(ROOT)]
    env = {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    found = checked(rehearsal, "generator", settings={"DEVICES": 1}, env=env, status=1)["generator"]
    assert found["result"] == "failed"


@pytest.mark.timeout(200)
def test_a_machine_with_one_gpu_is_told_what_it_lacks(rehearsal):
    results = checked(rehearsal, "machine", "disjoint", "recovery", settings={"DEVICES": 1})
    assert [found["result"] for found in results.values()] == ["ok", "not here", "not here"]
    assert results["recovery"]["not_here"] == "needs 5 GPUs; there is 1"
