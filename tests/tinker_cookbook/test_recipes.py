"""Checks of recipe runs, each shown a run that passes and runs with a single violation."""

from __future__ import annotations

import json
import math
import signal
from dataclasses import replace
from typing import Any

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


def test_run_completes_with_each_step_once_and_a_final_checkpoint():
    whole = evidence(*rows(recipes.NLL, 1, 2, 3), {"step": 3, "tokens/cumulative/trained": 9})
    check = recipes.completes(3)
    assert check(whole).holds
    assert check(whole).seen == "status 0, 3 different steps in 3 rows, 1 final checkpoints"
    changes: tuple[dict[str, Any], ...] = (
        {"statuses": (-9, 1)},
        {"rows": (*whole.rows[:3], whole.rows[2])},
        {"rows": whole.rows[1:]},
        {"checkpoints": ({"name": "000001", "state_path": "p"},)},
    )
    assert not any(check(replace(whole, **change)).holds for change in changes)


def kl_rows(*pairs: tuple[float, float]) -> tuple[dict, ...]:
    return tuple(
        {recipes.REWARD: 0.5, recipes.KL_NAMES[0]: first, recipes.KL_NAMES[1]: second}
        for first, second in pairs
    )


def test_kl_must_be_low_in_every_step_by_both_estimates():
    low = kl_rows((1e-7, 1e-12), (-9e-4, 9e-4))
    assert recipes.kl_stays_low(evidence(*low, {"tokens/cumulative/trained": 9})).holds
    assert recipes.kl_stays_low(evidence(*low)).seen == "at most 9.0e-04"
    broken_rows = (kl_rows((1e-7, 1e-12), (-1.1e-3, 1e-6)), kl_rows((1e-7, 1e-3)), kl_rows((math.nan, 1e-6)))
    for broken in (*broken_rows, (*low, {recipes.REWARD: 0.5}), ()):
        assert not recipes.kl_stays_low(evidence(*broken)).holds, broken


def test_ends_of_a_run_are_means_of_three_steps():
    risen = evidence(*rows(recipes.REWARD, 0.1, 0.3, 0.2, 9.0, 0.3, 0.4, 0.2))
    finding = recipes.reward_rises(by=0.1)(risen)
    assert (finding.holds, finding.seen) == (True, "0.200 -> 0.300")
    assert not recipes.reward_rises(by=0.11)(risen).holds
    assert not recipes.reward_rises(by=0.0)(evidence(*rows(recipes.REWARD, 0.1, 0.2, 0.3, 0.4, 0.5))).holds
    fallen = evidence(*rows(recipes.NLL, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0))
    assert [recipes.loss_falls(to_share=share)(fallen).holds for share in (0.5, 0.49)] == [True, False]


def test_resumed_run_was_killed_and_loaded_a_checkpoint():
    rolling = [{"name": f"00000{n}", "batch": n, "state_path": f"{RUN}/00000{n}"} for n in (4, 8)]
    resumed = replace(
        evidence(),
        statuses=(-signal.SIGKILL, 0),
        checkpoints=(*rolling, *evidence().checkpoints),
        log=f"Resumed training from {RUN}/000008\n",
    )
    finding = recipes.resumes(resumed)
    assert (finding.holds, finding.seen) == (True, f"statuses -9, 0, resumed from {RUN}/000008")
    changes: tuple[dict[str, Any], ...] = (
        {"statuses": (0, 0)},  # the run was finished before the kill
        {"statuses": (0,)},
        {"log": "Training for 8 batches"},
    )
    assert not any(recipes.resumes(replace(resumed, **change)).holds for change in changes)


def test_rows_are_whole_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert recipes.read_rows(path) == ()
    path.write_text(json.dumps({"step": 0}) + "\n" + '{"step": 1, "rew')
    assert recipes.read_rows(path) == ({"step": 0},)
