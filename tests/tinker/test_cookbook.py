"""The runner of the cookbook's recipes: commands, processes, and checks, each with runs that
violate it.
"""

from __future__ import annotations

import json
import math
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tools.tinker_cookbook import recipes
from tools.tinker_cookbook.main import TIMED_OUT, Runner
from tools.tinker_cookbook.recipes import (
    Evidence,
    Finding,
    Recipe,
    Row,
    all_recipes,
    chosen,
    smollm2_recipes,
)

SETTINGS: dict[str, Any] = {"python": Path(sys.executable), "model": "/m", "server": {}}
SCRIPT = """
import pathlib, sys, time
run = pathlib.Path("run")
print("found", run.exists(), flush=True)
if not run.exists():
    run.mkdir()
    (run / "checkpoints.jsonl").write_text('{"name": "1"}\\n')
    time.sleep(60)
"""


def test_chosen_recipes_run_by_their_own_modules(tmp_path):
    whole = all_recipes(Path("c.jsonl"))
    assert chosen(whole, []) == list(whole)
    with pytest.raises(ValueError, match=r"--only chat: must be one of math_rl, .*guess_number"):
        chosen(whole, ["chat"])
    (recipe,) = chosen(whole, ["math_rl_one_step_off"])
    runner = Runner(folder=tmp_path, deadline_s=30.0, **SETTINGS)
    argv = runner.command(recipe)
    assert argv[1:3] == ["-m", "tinker_cookbook.recipes.math_rl.train"]
    assert {
        "model_name=/m",
        "env=arithmetic",
        "max_steps_off_policy=1",
        "groups_per_batch=64",
    } <= set(argv)
    (pretrained,) = smollm2_recipes()
    assert {"renderer_name=role_colon", "env=arithmetic", "lora_rank=16"} <= set(
        runner.command(pretrained)
    )


class Script(Runner):
    def command(self, recipe: Recipe) -> list[str]:
        return [str(self.python), "-c", SCRIPT]


def test_run_is_killed_after_its_checkpoint_and_started_again_or_ends_at_its_deadline(
    tmp_path, capsys
):
    seen: list[Evidence] = []

    def check(evidence: Evidence) -> Finding:
        seen.append(evidence)
        return Finding(promise="rises", holds=False, seen="5")

    recipe = Recipe(name="r", program=("-m", "m"), arguments={}, checks=(check,), kill_after=1)
    Script(folder=tmp_path / "a", deadline_s=30.0, **SETTINGS).run(recipe)
    assert seen[0].statuses == (-signal.SIGKILL, 0)
    assert (seen[0].log, seen[0].checkpoints) == ("found True\n", ({"name": "1"},))
    assert "  NOT KEPT: rises (5)" in capsys.readouterr().out
    Script(folder=tmp_path / "b", deadline_s=0.5, **SETTINGS).run(replace(recipe, kill_after=None))
    assert seen[1].statuses == (TIMED_OUT,)


RUN = "tinker://s:train:1/weights"
END = {"name": "final", "state_path": f"{RUN}/final"}


def rows(name: str, *values: float) -> tuple[Row, ...]:
    return tuple({"step": step, name: value} for step, value in enumerate(values))


def evidence(*found: Row, **changes: Any) -> Evidence:
    return replace(Evidence(statuses=(0,), rows=found, checkpoints=(END,), log=""), **changes)


def kl_rows(*pairs: tuple[float, float]) -> tuple[Row, ...]:
    return tuple(
        {recipes.REWARD: 0.5, **dict(zip(recipes.KL_NAMES, pair, strict=True))} for pair in pairs
    )


STEPS = (*rows(recipes.NLL, 1, 2, 3), {"step": 3, "tokens/cumulative/trained": 9})
LOW_KL = (*kl_rows((1e-7, 1e-12), (-9e-4, 9e-4)), {"tokens/cumulative/trained": 9})
RESUMED = evidence(
    statuses=(-signal.SIGKILL, 0),
    checkpoints=(
        *({"name": n, "batch": 8, "state_path": f"{RUN}/{n}"} for n in ("000004", "000008")),
        END,
    ),
    log=f"Resumed training from {RUN}/000008\n",
)


@pytest.mark.parametrize(
    ("check", "good", "seen", "violations"),
    [
        (
            recipes.completes(3),
            evidence(*STEPS),
            "status 0, 3 different steps in 3 rows, 1 final checkpoints",
            [
                {"statuses": (-9, 1)},
                {"rows": (*STEPS[:3], STEPS[2])},
                {"rows": STEPS[1:]},
                {"checkpoints": ({"name": "000001", "state_path": "p"},)},
            ],
        ),
        (
            recipes.kl_stays_below(1e-3),
            evidence(*LOW_KL),
            "at most 9.0e-04",
            [
                {"rows": kl_rows((1e-7, 1e-12), (-1.1e-3, 1e-6))},
                {"rows": kl_rows((1e-7, 1e-3))},
                {"rows": kl_rows((math.nan, 1e-6))},
                {"rows": (*LOW_KL, {recipes.REWARD: 0.5})},
                {"rows": ()},
            ],
        ),
        (
            recipes.resumes,
            RESUMED,
            f"statuses -9, 0, resumed from {RUN}/000008",
            [
                {"statuses": (0, 0)},  # the run was finished before the kill
                {"statuses": (0,)},
                {"log": "Training for 8 batches"},
            ],
        ),
    ],
    ids=["completes", "kl stays low", "resumes"],
)
def test_check_passes_a_good_run_and_finds_each_violation(check, good, seen, violations):
    assert (check(good).holds, check(good).seen) == (True, seen)
    assert [change for change in violations if check(replace(good, **change)).holds] == []


def test_ends_of_a_run_are_means_of_three_steps():
    risen = evidence(*rows(recipes.REWARD, 0.1, 0.3, 0.2, 9.0, 0.3, 0.4, 0.2))
    assert recipes.reward_rises(by=0.1)(risen).seen == "0.200 -> 0.300"
    assert [recipes.reward_rises(by=by)(risen).holds for by in (0.1, 0.11)] == [True, False]
    assert not recipes.reward_rises(by=0.0)(
        evidence(*rows(recipes.REWARD, 0.1, 0.2, 0.3, 0.4, 0.5))
    ).holds
    fallen = evidence(*rows(recipes.NLL, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0))
    assert [recipes.loss_falls(to_share=share)(fallen).holds for share in (0.5, 0.49)] == [
        True,
        False,
    ]


def test_rows_are_whole_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert recipes.read_rows(path) == ()
    path.write_text(json.dumps({"step": 0}) + "\n" + '{"step": 1, "rew')
    assert recipes.read_rows(path) == ({"step": 0},)
