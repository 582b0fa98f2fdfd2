"""Checks of recipe runs, each shown a run that passes and runs with a single violation."""

from __future__ import annotations

import json
import math
import signal
from dataclasses import replace
from typing import Any

import pytest

from tools.tinker_cookbook import recipes
from tools.tinker_cookbook.recipes import Evidence, Row

RUN = "tinker://s:train:1/weights"


def rows(name: str, *values: float) -> tuple[dict, ...]:
    return tuple({"step": step, name: value} for step, value in enumerate(values))


def evidence(*found: Row, **changes: Any) -> Evidence:
    whole = Evidence(
        statuses=(0,),
        rows=found,
        checkpoints=({"name": "final", "state_path": f"{RUN}/final"},),
        log="",
    )
    return replace(whole, **changes)


def kl_rows(*pairs: tuple[float, float]) -> tuple[dict, ...]:
    return tuple(
        {recipes.REWARD: 0.5, recipes.KL_NAMES[0]: first, recipes.KL_NAMES[1]: second}
        for first, second in pairs
    )


COMPLETE = evidence(*rows(recipes.NLL, 1, 2, 3), {"step": 3, "tokens/cumulative/trained": 9})
LOW_KL = kl_rows((1e-7, 1e-12), (-9e-4, 9e-4))
RESUMED = evidence(
    statuses=(-signal.SIGKILL, 0),
    checkpoints=(
        *({"name": f"00000{n}", "batch": n, "state_path": f"{RUN}/00000{n}"} for n in (4, 8)),
        *evidence().checkpoints,
    ),
    log=f"Resumed training from {RUN}/000008\n",
)


@pytest.mark.parametrize(
    ("check", "good", "seen", "violations"),
    [
        (
            recipes.completes(3),
            COMPLETE,
            "status 0, 3 different steps in 3 rows, 1 final checkpoints",
            [
                {"statuses": (-9, 1)},
                {"rows": (*COMPLETE.rows[:3], COMPLETE.rows[2])},
                {"rows": COMPLETE.rows[1:]},
                {"checkpoints": ({"name": "000001", "state_path": "p"},)},
            ],
        ),
        (
            recipes.kl_stays_low,
            evidence(*LOW_KL, {"tokens/cumulative/trained": 9}),
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
    finding = recipes.reward_rises(by=0.1)(risen)
    assert (finding.holds, finding.seen) == (True, "0.200 -> 0.300")
    assert not recipes.reward_rises(by=0.11)(risen).holds
    assert not recipes.reward_rises(by=0.0)(evidence(*rows(recipes.REWARD, 0.1, 0.2, 0.3, 0.4, 0.5))).holds
    fallen = evidence(*rows(recipes.NLL, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0))
    assert [recipes.loss_falls(to_share=share)(fallen).holds for share in (0.5, 0.49)] == [True, False]


def test_rows_are_whole_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert recipes.read_rows(path) == ()
    path.write_text(json.dumps({"step": 0}) + "\n" + '{"step": 1, "rew')
    assert recipes.read_rows(path) == ({"step": 0},)
