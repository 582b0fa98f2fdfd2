"""`make attack` in its shortest form, on a server of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_attack_makes_its_requests_and_ends_with_what_it_found(tmp_path):
    command = [
        sys.executable,
        "-m",
        "tools.attack",
        "--requests",
        "300",
        "--folder",
        str(tmp_path / "attack"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    *table, last = done.stdout.splitlines()
    found = json.loads(last)
    assert done.returncode == 0, done.stdout + done.stderr
    assert table[0].split()[:3] == ["calls", "number", "2xx"]
    assert found["requests"] == 300
    assert found["samples_of_the_other_key"] > 0
    assert (found["answered_5xx"], found["reached_of_another_key"], found["tracebacks"]) == (0, 0, 0)
