"""`make gpu-check` on the null device: it reaches its end, and each check fails where its fault is
planted.
"""

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
def wait_in_forward(module):
    forward = module.VLLMPolicy.forward
    def and_wait(self, input_ids, *args, **kwargs):
        input_ids.sum().item()
        return forward(self, input_ids, *args, **kwargs)
    module.VLLMPolicy.forward = and_wait

HELP["actors.vllm.model"] = wait_in_forward
"""
"""With it the generator's model waits for the device in its forward."""

CONTEXT_OPENER = """
def open_one_on_gpu_0(module):
    prepare = module._Mapping.prepare
    def after_it(self, device):
        module.torch.cuda.synchronize(0)
        return prepare(self, device)
    module._Mapping.prepare = after_it

HELP["rl.weights.shared_memory"] = open_one_on_gpu_0
"""
"""With it the thread that locks pages opens a context on the first GPU, whichever is its rank's."""


def checked(
    rehearsal: Rehearsal,
    *only: str,
    settings: dict[str, Any],
    env: dict[str, str] | None = None,
    status: int = 0,
) -> dict[str, Any]:
    """Run checks; return their results by name."""
    folder = rehearsal.folder / "gpu-check"
    command = [
        "-m",
        "tools.gpu_check",
        "--no-numbers",
        "--folder",
        str(folder),
        "--limit_factor",
        "5",
    ]
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
        ("kernels", {"MAX_ALLOCATED": 1 << 20}, "out of memory"),
        ("trainer", {"MAX_ALLOCATED": 4 << 30}, "ran out of GPU memory"),
        ("parity", {"MAX_ALLOCATED": 1 << 20}, "out of memory"),
        ("compile", {"MAX_ALLOCATED": 1 << 30}, "out of memory"),
        ("sync", {"DEVICES": 2, "FAIL_REGISTER": 1}, "could not be page-locked"),
        ("shared", {"DRIVER": "570.124.06"}, "the run ended with status"),
        ("disjoint", {"DEVICES": 2, "MAX_ALLOCATED": 1 << 20}, "the run ended with status"),
        ("recovery", {"DEVICES": 5, "MAX_ALLOCATED": 1 << 20}, "the run ended with status"),
    ],
)
def test_a_planted_fault_fails_its_check(rehearsal, check, settings, fault):
    found = checked(rehearsal, check, settings=settings, status=1)[check]
    assert found["result"] == "failed"
    assert fault in "; ".join(found["faults"])


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("check", "num_gpus", "plant", "fault"),
    [
        ("generator", 1, CAPTURE_BREAKER, "StreamCapture"),
        ("sync", 4, CONTEXT_OPENER, "contexts on GPUs of other ranks"),
    ],
)
def test_planted_code_fails_its_check(rehearsal, tmp_path, check, num_gpus, plant, fault):
    original = ROOT / "tools" / "null_gpu" / "site" / "sitecustomize.py"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        f'import runpy\nHELP = runpy.run_path({str(original)!r})["HELP"]\n{plant}'
    )
    paths = [tmp_path / "site", Path(ROOT)]
    env = {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    found = checked(rehearsal, check, settings={"DEVICES": num_gpus}, env=env, status=1)[check]
    assert found["result"] == "failed"
    assert fault in "; ".join(found["faults"])


@pytest.mark.timeout(200)
def test_a_machine_with_one_gpu_is_told_what_it_lacks(rehearsal):
    results = checked(rehearsal, "machine", "disjoint", "recovery", settings={"DEVICES": 1})
    assert [found["result"] for found in results.values()] == ["ok", "not here", "not here"]
    assert results["recovery"]["not_here"] == "needs 5 GPUs; there is 1"
