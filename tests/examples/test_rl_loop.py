import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from examples.rl_loop import main, parse_args

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "rl_loop.py"
SHORT = ["--warmup_steps", "3", "--groups_per_batch", "2", "--group_size", "2", "--num_eval", "4"]


@pytest.mark.medium
def test_short_run_is_on_policy_and_saves_what_it_trained(tmp_path, capsys):
    args = parse_args(
        [*SHORT, "--steps", "2", "--eval_every", "1", "--output", str(tmp_path / "out")]
    )
    curve = asyncio.run(main(args))
    assert [step for step, _ in curve] == [0, 1, 2]
    assert re.findall(r"ratio (\S+)", capsys.readouterr().out) == ["1.000000"] * 2
    random, warm = (
        load_file(tmp_path / "out" / name / "model.safetensors")["model.embed_tokens.weight"]
        for name in ("random", "warm")
    )
    assert (random - warm).abs().max() > 1e-4
    assert (tmp_path / "out" / "hf" / "model.safetensors").exists()
    again = subprocess.run(
        [sys.executable, str(SCRIPT), "--output", "out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "out is there already: name another folder, or remove it" in again.stderr
