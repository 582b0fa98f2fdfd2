"""The wheel in an environment of its own: installed in another folder, it trains a step."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.setup_env import TORCH_BUILDS, Environment

ROOT = Path(__file__).resolve().parents[2]


def run(*command, cwd, status=0):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL,
        timeout=400,
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_installed_wheel_trains_a_step(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    # From a copy: a build writes into its tree.
    tree = tmp_path / "tree"
    for path in ("relay", "rl", "actors", "losses", "configs"):
        shutil.copytree(ROOT / path, tree / path, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    run(*build, "--wheel-dir", str(tmp_path), str(tree), cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    environment = Environment(tmp_path / "venv")
    environment.create()
    environment.install_torch(TORCH_BUILDS["cpu"])
    constraints = ROOT / "tools" / "constraints-cpu.txt"
    # Otherwise the first run compiles thousands of modules, in each of its processes.
    compiled = ["--compile-bytecode", "--constraint", str(constraints)]
    environment.install(*compiled, f"{wheel}[cpu]")

    relay = str(environment.venv / "bin" / "relay")
    folder = tmp_path / "project"
    options = ["--module", "sum_digits", "--config", "tiny", "--warmup", "None", "--name", "one"]
    sizes = ["--steps", "1", "--groups", "2", "--max_tokens", "8", "--loop.eval_every", "0"]
    folder.mkdir()
    printed = run(relay, "train", *options, *sizes, cwd=folder)
    assert "finished: 1 steps" in printed
    assert "relay report" in printed
    assert (folder / "outputs" / "one" / "checkpoints" / "hf" / "model.safetensors").is_file()
    run(relay, "report", "outputs/one", cwd=folder)
    assert (folder / "outputs" / "one" / "report.html").is_file()
    # A file that travels with the package, and an extra that is not installed.
    printed = run(relay, "train", "--module", "gsm8k", "--config", "tiny", cwd=folder, status=2)
    assert "pip install 'relay-rl[tasks]'" in printed
    assert "tiny_math" not in printed
