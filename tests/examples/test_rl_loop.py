import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from examples.rl_loop import main, parse_args, reward
from tests.support.scored import replied

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "rl_loop.py"
SHORT = ["--warmup_steps", "3", "--num_prompts", "2", "--num_samples", "2", "--num_eval", "4"]


def test_the_whole_algorithm_is_under_250_lines():
    assert len(SCRIPT.read_text().splitlines()) < 250


def test_a_right_answer_earns_more_than_a_wrong_one_and_that_more_than_none():
    texts = ("19+2=21 [ANSWER] 21", "17+2=19 [ANSWER] 19", "21")
    assert [reward(replied(text)) for text in texts] == [1.0, 0.1, 0.0]


@pytest.mark.medium
def test_a_short_run_is_on_policy_and_saves_what_it_trained(tmp_path, capsys):
    args = parse_args([*SHORT, "--steps", "2", "--eval_every", "1", "--output", str(tmp_path / "out")])
    curve = asyncio.run(main(args))
    assert [step for step, _ in curve] == [0, 1, 2]
    assert re.findall(r"ratio (\S+)", capsys.readouterr().out) == ["1.000000"] * 2
    random, warm = (
        load_file(tmp_path / "out" / name / "model.safetensors")["model.embed_tokens.weight"]
        for name in ("random", "warm")
    )
    assert (random - warm).abs().max() > 1e-4
    assert (tmp_path / "out" / "hf" / "model.safetensors").exists()
    with pytest.raises(SystemExit, match="out is there already: name another folder, or remove it"):
        asyncio.run(main(args))


@pytest.mark.medium
def test_it_runs_as_a_file_from_any_folder(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *SHORT, "--steps", "1", "--output", "out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "Hugging Face folder: out/hf" in done.stdout
    assert (tmp_path / "out" / "hf" / "config.json").exists()


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--num_samples=1", "--num_samples=1: must be at least 2"),
        ("--steps=0", "--steps=0: must be at least 1"),
    ],
)
def test_options_out_of_range_are_refused(option, says, capsys):
    with pytest.raises(SystemExit):
        parse_args([option])
    assert says in capsys.readouterr().err
