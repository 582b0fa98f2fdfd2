"""Runner of the recipes: commands and processes."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tools.tinker_cookbook.main import TIMED_OUT, Runner
from tools.tinker_cookbook.recipes import Evidence, Finding, Recipe, all_recipes, chosen

SETTINGS: dict[str, Any] = {"python": Path(sys.executable), "model": Path("/m"), "server": {}}


def test_chosen_recipes_run_by_their_own_modules(tmp_path):
    recipes = all_recipes(Path("c.jsonl"))
    assert chosen(recipes, []) == list(recipes)
    with pytest.raises(ValueError, match=r"--only chat: must be one of math_rl, .*guess_number"):
        chosen(recipes, ["chat"])
    (recipe,) = chosen(recipes, ["math_rl_one_step_off"])
    argv = Runner(folder=tmp_path, deadline_s=30.0, **SETTINGS).command(recipe)
    assert argv[1:3] == ["-m", "tinker_cookbook.recipes.math_rl.train"]
    assert {"model_name=/m", "env=arithmetic", "max_steps_off_policy=1", "groups_per_batch=64"} <= set(argv)


SCRIPT = """
import pathlib, sys, time
run = pathlib.Path("run")
print("found", run.exists(), flush=True)
if not run.exists():
    run.mkdir()
    (run / "checkpoints.jsonl").write_text('{"name": "1"}\\n')
    time.sleep(60)
"""


class Script(Runner):
    def command(self, recipe: Recipe) -> list[str]:
        return [str(self.python), "-c", SCRIPT]


def test_run_is_killed_after_its_checkpoint_and_started_again(tmp_path, capsys):
    seen: list[Evidence] = []

    def check(evidence: Evidence) -> Finding:
        seen.append(evidence)
        return Finding(promise="rises", holds=False, seen="5")

    recipe = Recipe(name="r", module="m", arguments={}, checks=(check,), kill_after=1)
    Script(folder=tmp_path / "a", deadline_s=30.0, **SETTINGS).run(recipe)
    assert seen[0].statuses == (-signal.SIGKILL, 0)
    assert (seen[0].log, seen[0].checkpoints) == ("found True\n", ({"name": "1"},))
    assert "  NOT KEPT: rises (5)" in capsys.readouterr().out
    started = time.monotonic()
    late = Script(folder=tmp_path / "b", deadline_s=0.5, **SETTINGS)
    late.run(Recipe(name="r", module="m", arguments={}, checks=(check,)))
    assert seen[1].statuses == (TIMED_OUT,)
    assert time.monotonic() - started < 30
