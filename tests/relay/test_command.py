"""The command `relay`: its help, its subcommands, and folders with relay's names."""

import importlib
import os
import subprocess
import sys
import time

import pytest

from relay.command import SUBCOMMANDS, choose_origin, main

RELAY = [sys.executable, "-m", "relay"]


def run_relay(*argv, cwd, **env):
    return subprocess.run(
        [*RELAY, *argv], cwd=cwd, capture_output=True, text=True, env={**os.environ, **env},
        timeout=50,
    )  # fmt: skip


def test_help_lists_the_subcommands_without_torch(tmp_path):
    code = (
        "import sys; from relay.command import main; status = main(['--help']);"
        "print('heavy:', {'torch', 'vllm', 'monarch', 'datasets'} & sys.modules.keys())"
    )
    start_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=50
    )
    assert time.monotonic() - start_s < 10  # a second on a calm machine
    assert done.returncode == 0, done.stderr
    assert all(f"  {name} " in done.stdout for name in SUBCOMMANDS)
    assert "heavy: set()" in done.stdout


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_subcommand_has_its_function(name):
    module, _, function = SUBCOMMANDS[name].place.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_unknown_subcommand_names_the_nearest(capsys):
    assert main(["trian"]) == 2
    assert "relay trian: no such subcommand; did you mean train?" in capsys.readouterr().err


def test_serve_with_a_folder_serves_a_run(tmp_path, capsys):
    assert main(["serve", str(tmp_path / "none")]) == 2
    assert "there is no such folder; give the folder of a run" in capsys.readouterr().err


def test_train_alone_shows_how_it_is_used(capsys):
    assert main(["train"]) == 2
    assert "relay train --model NAME --data FILE" in capsys.readouterr().err


OWN_NAMES = ("losses", "rl", "actors", "configs")


def explain_beside(folder, content_of_init):
    """Explain a run in a project that has folders of all these names."""
    for name in OWN_NAMES:
        (folder / name).mkdir()
        file = "__init__.py" if content_of_init else "settings.py"
        (folder / name / file).write_text("raise RuntimeError('the project of a user')")
    (folder / "rewards.py").write_text("def right(rollout):\n    return 1.0\n")
    (folder / "qa.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n' * 2)
    return run_relay(
        "explain", "--model", "none/such", "--data", "qa.jsonl", "--reward", "rewards:right",
        cwd=folder, HF_HUB_OFFLINE="1",
    )  # fmt: skip


def test_folders_with_names_of_relay_are_left_alone(tmp_path):
    done = explain_beside(tmp_path, content_of_init=False)
    assert "note: relay has packages of these names too" in done.stderr
    assert "losses/, rl/, actors/, configs/ of this folder" in done.stderr
    assert "the project of a user" not in done.stderr
    assert "none/such" in done.stderr
    assert done.returncode == 2


def test_packages_with_names_of_relay_are_refused_with_what_to_do(tmp_path):
    done = explain_beside(tmp_path, content_of_init=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "has packages that are called as relay's own, losses/, rl/, actors/" in done.stderr
    assert "Rename them, or start relay in another folder" in done.stderr
    report = run_relay("runs", cwd=tmp_path)
    assert "called as relay's own" not in report.stderr


def test_import_of_relay_finds_its_own_packages(tmp_path):
    (tmp_path / "rl").mkdir()
    (tmp_path / "rl" / "__init__.py").write_text("raise RuntimeError('the project of a user')")
    code = "import relay, rl.types; print(rl.types.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) not in done.stdout


def test_import_after_a_package_of_relays_name_says_so(tmp_path):
    (tmp_path / "rl").mkdir()
    (tmp_path / "rl" / "__init__.py").write_text("")
    code = "import sys; sys.path.insert(0, ''); import rl; import relay"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=50
    )
    assert "import relay first, or rename that folder" in done.stderr
    assert str(tmp_path / "rl") in done.stderr


@pytest.mark.parametrize(
    ("argv", "origin"),
    [
        (["--model", "m"], ("configs.own", "grpo")),
        (["--module", "own", "--model", "m"], ("configs.own", "grpo")),
        (["--steps", "5"], ("sum_digits", "tiny")),
        (["--module", "sum_digits", "--help"], ("sum_digits", "tiny")),
        (["--module=sum_digits", "--model=m"], ("sum_digits", "tiny")),
    ],
)
def test_default_config_is_one_of_the_module(argv, origin):
    assert choose_origin(argv) == origin
