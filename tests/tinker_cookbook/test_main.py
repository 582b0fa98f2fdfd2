"""What the program around the recipes says and refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tools.setup import state
from tools.tinker_cookbook import environment, main
from tools.tinker_cookbook.checks import Finding
from tools.tinker_cookbook.processes import ProcessError, running, wait_until
from tools.tinker_cookbook.recipes import Place, all_recipes, command
from tools.tinker_cookbook.serving import Server


def place(folder: Path) -> Place:
    server = Server(url="http://127.0.0.1:1")
    return Place(python=Path("py"), model=Path("/m"), server=server, folder=folder, deadline_s=1.0)


def test_table_has_a_row_for_each_promise():
    kept = Finding(promise="rises", holds=True, seen="0.2 -> 0.3")
    broken = Finding(promise="stays low", holds=False, seen="5")
    outcomes = [
        main.Outcome(recipe="math_rl", time_s=12.3, findings=(kept, broken)),
        main.Outcome(recipe="chat", time_s=4.0, findings=(kept,)),
    ]
    assert main.table(outcomes).splitlines() == [
        "recipe   s   promise    kept  seen",
        "math_rl  12  rises      yes   0.2 -> 0.3",
        "             stays low  NO    5",
        "chat     4   rises      yes   0.2 -> 0.3",
    ]
    assert [outcome.holds for outcome in outcomes] == [False, True]


def test_unknown_recipe_is_named_with_those_that_there_are():
    recipes = all_recipes(Path("c.jsonl"))
    assert [recipe.name for recipe in main.chosen(recipes, ["chat_sl"])] == ["chat_sl"]
    assert main.chosen(recipes, []) == list(recipes)
    with pytest.raises(ValueError, match=r"--only chat: must be of math_rl, .*guess_number"):
        main.chosen(recipes, ["chat"])


def test_recipes_are_run_by_their_own_modules_and_offline(tmp_path):
    commands = {recipe.name: command(recipe, place(tmp_path)) for recipe in all_recipes(Path("c.jsonl"))}
    argv = commands["math_rl_one_step_off"]
    assert argv[:3] == ["py", "-m", "tinker_cookbook.recipes.math_rl.train"]
    assert {"model_name=/m", "env=arithmetic", "max_steps_off_policy=1", "groups_per_batch=64"} <= set(argv)
    assert all("renderer_name=qwen3_instruct" in argv for argv in commands.values())


def test_environment_is_in_place_only_when_its_installation_was_completed(tmp_path):
    venv = tmp_path / ".venv-cookbook"
    key = environment.environment_key("3.11")
    assert not environment.is_in_place(venv, key=key)
    site_packages = venv / "lib" / "python3.11" / "site-packages"
    (site_packages / "tinker-0.38.0.dist-info").mkdir(parents=True)
    (venv / "bin").mkdir()
    (venv / "bin" / "python").touch()
    assert not environment.is_in_place(venv, key=key)
    state.write_stamp(venv, key=key, groups=(), installed=state.read_installed(site_packages))
    assert environment.is_in_place(venv, key=key)
    assert not environment.is_in_place(venv, key=environment.environment_key("3.12"))
    (site_packages / "tinker-0.38.0.dist-info").rmdir()
    assert not environment.is_in_place(venv, key=key)


def wait_for_a_process(code: str, *, log: Path, deadline_s: float) -> None:
    with running([sys.executable, "-c", code], log=log, cwd=log.parent, environment={}) as process:
        wait_until(lambda: False, process=process, what="the start", deadline_s=deadline_s, log=log)


def test_process_that_ends_too_early_is_said_with_the_end_of_its_log(tmp_path):
    with pytest.raises(ProcessError, match=r"the start: the process ended with status 3\n  \| no port\n"):
        wait_for_a_process("print('no port'); raise SystemExit(3)", log=tmp_path / "log", deadline_s=30.0)


def test_process_that_takes_too_long_is_ended(tmp_path):
    code = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(60)"
    with pytest.raises(ProcessError, match=r"the start: not within 2 s"):
        wait_for_a_process(code, log=tmp_path / "log", deadline_s=2.0)
    pid = json.loads((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists()
