"""Scripts of completion: bash completes with its own; zsh and fish are run where installed."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from relay import completion
from relay.command import SUBCOMMANDS

ROOT = Path(__file__).parents[2]


def print_script(shell, capsys):
    assert completion.main([shell]) == 0
    return capsys.readouterr().out


def complete(script, *words, cwd):
    """Return what bash would offer for the last word."""
    quoted = " ".join(f"'{word}'" for word in words)
    code = (
        f"{script}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}\n"
        "_relay; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    done = subprocess.run(["bash", "-c", code], cwd=cwd, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split("\n")[:-1]


def test_bash_completes_subcommands_options_and_folders(tmp_path, capsys):
    script = print_script("bash", capsys)
    for name in ("first run", "second"):
        (tmp_path / "outputs" / name).mkdir(parents=True)
    (tmp_path / "outputs" / "file").write_text("")
    assert complete(script, "relay", "", cwd=tmp_path) == list(SUBCOMMANDS)
    assert complete(script, "relay", "re", cwd=tmp_path) == ["report"]
    assert "--lr" in complete(script, "relay", "train", "--", cwd=tmp_path)
    found = complete(script, "relay", "train", "--loop.group", cwd=tmp_path)
    assert found == ["--loop.groups_per_batch", "--loop.group_size"]
    folders = complete(script, "relay", "report", "", cwd=tmp_path)
    assert sorted(folders) == ["outputs/first run", "outputs/second"]
    assert complete(script, "relay", "push", "outputs/s", cwd=tmp_path) == ["outputs/second"]
    assert complete(script, "relay", "train", "--resume", "outputs/f", cwd=tmp_path) == [
        "outputs/first run"
    ]
    assert complete(script, "relay", "completion", "f", cwd=tmp_path) == ["fish"]
    # Of files bash knows by itself.
    assert complete(script, "relay", "train", "--data", "outp", cwd=tmp_path) == [""]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_of_other_shells_name_subcommands_and_options(shell, capsys):
    script = print_script(shell, capsys)
    for name in (*SUBCOMMANDS, "loop.num_steps"):
        assert name in script
    assert "@" not in script


@pytest.mark.parametrize("name", [*completion.OPTIONS])
def test_completed_options_exist(name, capsys):
    module, _, function = SUBCOMMANDS[name].place.partition(":")
    with pytest.raises(SystemExit):
        getattr(importlib.import_module(module), function)(["--help"])
    said = capsys.readouterr().out
    for option in completion.OPTIONS[name]:
        assert f"--{option}" in said


def test_script_takes_no_import_of_torch():
    code = (
        "import sys\nfrom relay.command import main\nstatus = main(['completion', 'bash'])\n"
        "heavy = {'torch', 'vllm', 'numpy', 'tyro'} & set(sys.modules)\n"
        "sys.exit(f'{status} {heavy}' if status or heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_unknown_shell_is_refused(capsys):
    with pytest.raises(SystemExit):
        completion.main(["tcsh"])
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
