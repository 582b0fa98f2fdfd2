"""Runner of the recipes: table, commands and processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tools.tinker_cookbook import main
from tools.tinker_cookbook.main import ProcessError, Runner, running, wait_for_url
from tools.tinker_cookbook.recipes import Finding, all_recipes, chosen


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


def test_unknown_recipe_is_refused_with_the_known_names():
    recipes = all_recipes(Path("c.jsonl"))
    assert [recipe.name for recipe in chosen(recipes, ["chat_sl"])] == ["chat_sl"]
    assert chosen(recipes, []) == list(recipes)
    with pytest.raises(ValueError, match=r"--only chat: must be one of math_rl, .*guess_number"):
        chosen(recipes, ["chat"])


def test_recipes_run_by_their_own_modules_and_offline(tmp_path):
    runner = Runner(python=Path("py"), model=Path("/m"), url="http://x", folder=tmp_path, deadline_s=1.0)
    commands = {recipe.name: runner.command(recipe) for recipe in all_recipes(Path("c.jsonl"))}
    argv = commands["math_rl_one_step_off"]
    assert argv[:3] == ["py", "-m", "tinker_cookbook.recipes.math_rl.train"]
    assert {"model_name=/m", "env=arithmetic", "max_steps_off_policy=1", "groups_per_batch=64"} <= set(argv)
    assert all("renderer_name=qwen3_instruct" in argv for argv in commands.values())


def start(code: str, *, log: Path, deadline_s: float) -> str:
    with running([sys.executable, "-c", code], log=log, cwd=log.parent, environment={}) as process:
        return wait_for_url(process, log=log, deadline_s=deadline_s)


def test_url_of_the_server_is_read_from_its_log(tmp_path):
    code = "import time; print('serving the Tinker API at http://x:1', flush=True); time.sleep(60)"
    assert start(code, log=tmp_path / "log", deadline_s=30.0) == "http://x:1"


def test_server_that_ends_too_early_is_reported_with_the_end_of_its_log(tmp_path):
    with pytest.raises(ProcessError, match=r"the server ended with status 3\n  \| no port\n"):
        start("print('no port'); raise SystemExit(3)", log=tmp_path / "log", deadline_s=30.0)


def test_server_that_takes_too_long_is_ended(tmp_path):
    code = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(60)"
    with pytest.raises(ProcessError, match=r"the server did not start within 2 s"):
        start(code, log=tmp_path / "log", deadline_s=2.0)
    pid = json.loads((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists()
