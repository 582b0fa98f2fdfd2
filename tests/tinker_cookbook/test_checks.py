"""Each check of a recipe's run is shown one that keeps the promise, and ones that break it in one way."""

from __future__ import annotations

import json
import math
import signal
from dataclasses import replace
from typing import Any

import pytest

from tools.tinker_cookbook import checks
from tools.tinker_cookbook.checks import Evidence, Row

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
    whole = evidence(*rows(checks.NLL, 1, 2, 3), {"step": 3, "tokens/cumulative/trained": 9})
    assert checks.completes(3)(whole).holds
    broken = (
        checks.completes(4)(whole),
        checks.completes(3)(replace(whole, statuses=(1,))),
        checks.completes(3)(replace(whole, statuses=(-9, 1))),
        checks.completes(3)(replace(whole, rows=(*whole.rows[:3], whole.rows[2]))),
        checks.completes(3)(replace(whole, rows=whole.rows[1:])),
        checks.completes(3)(replace(whole, checkpoints=())),
        checks.completes(3)(replace(whole, checkpoints=({"name": "000001", "state_path": "p"},))),
    )
    assert [finding.holds for finding in broken] == [False] * 7
    assert broken[0].seen == "status 0, 3 different steps in 3 rows, 1 final checkpoints"


def kl_rows(*pairs: tuple[float, float]) -> tuple[dict, ...]:
    return tuple(
        {checks.REWARD: 0.5, checks.KL_FIRST_ORDER: first, checks.KL_SECOND_ORDER: second}
        for first, second in pairs
    )


@pytest.mark.parametrize(
    ("found", "holds"),
    [
        (kl_rows((1e-7, 1e-12), (-9e-4, 9e-4)), True),
        (kl_rows((1e-7, 1e-12), (1.1e-3, 1e-6)), False),
        (kl_rows((1e-7, 1e-12), (-1.1e-3, 1e-6)), False),
        (kl_rows((1e-7, 1e-3)), False),
        (kl_rows((math.nan, 1e-6)), False),
        ((*kl_rows((1e-7, 1e-12)), {checks.REWARD: 0.5}), False),
        ((*kl_rows((1e-7, 1e-12)), {"tokens/cumulative/trained": 9}), True),
        ((), False),
    ],
    ids=[
        "low",
        "high",
        "high below zero",
        "second order at the limit",
        "nan",
        "a step without",
        "totals without",
        "none",
    ],
)
def test_kl_has_to_be_low_in_every_step_by_both_estimates(found, holds):
    assert checks.kl_stays_low(evidence(*found)).holds is holds


def test_highest_kl_is_said():
    found = checks.kl_stays_low(evidence(*kl_rows((2e-7, 1e-12), (-3e-6, 4e-11))))
    assert found.seen == "at most 3.0e-06 and 4.0e-11"


def test_reward_rises_by_means_of_three_steps_at_each_end():
    risen = evidence(*rows(checks.REWARD, 0.1, 0.3, 0.2, 9.0, 0.3, 0.4, 0.2))
    finding = checks.reward_rises(by=0.1)(risen)
    assert finding.holds
    assert finding.seen == "0.200 -> 0.300"
    assert not checks.reward_rises(by=0.11)(risen).holds
    assert not checks.reward_rises(by=0.0)(evidence(*rows(checks.REWARD, 0.1, 0.2, 0.3, 0.4, 0.5))).holds


def test_loss_falls_to_a_share():
    fallen = evidence(*rows(checks.NLL, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0))
    assert checks.loss_falls(to_share=0.5)(fallen).holds
    assert not checks.loss_falls(to_share=0.49)(fallen).holds
    assert not checks.loss_falls(to_share=0.5)(evidence()).holds


def resumed(**changes: Any) -> Evidence:
    rolling = [{"name": f"00000{n}", "batch": n, "state_path": f"{RUN}/00000{n}"} for n in (4, 8)]
    return replace(
        evidence(),
        statuses=(-signal.SIGKILL, 0),
        checkpoints=(*rolling, *evidence().checkpoints),
        log=f"Resumed training from {RUN}/000008\n",
        **changes,
    )


def test_resumed_run_was_killed_and_took_up_a_checkpoint():
    finding = checks.resumes(resumed())
    assert finding.holds
    assert finding.seen == "statuses -9, 0, resumed from step 8 of epoch None"
    assert not checks.resumes(replace(resumed(), statuses=(0, 0))).holds  # it was through before the kill
    assert not checks.resumes(replace(resumed(), statuses=(0,))).holds
    assert not checks.resumes(replace(resumed(), log="Training for 8 batches")).holds


def test_of_a_finished_run_only_the_final_state_is_kept():
    other = "tinker://s:train:0/weights/000008"
    assert checks.old_checkpoints_go(evidence(kept=(f"{RUN}/final", other))).holds
    assert not checks.old_checkpoints_go(evidence(kept=(f"{RUN}/000028", f"{RUN}/final"))).holds
    assert not checks.old_checkpoints_go(evidence(kept=(other,))).holds


@pytest.mark.parametrize(
    ("turns", "reward", "holds"), [(9.5, -1.0, True), (9.5, -5.0, False), (1.0, 1.0, False)]
)
def test_guesses_are_read_where_most_of_several_turns_cost_nothing(turns, reward, holds):
    row = {checks.TURNS: turns, checks.REWARD: reward}
    assert checks.guesses_are_read(evidence(row, row)).holds is holds


def test_rows_are_whole_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert checks.read_rows(path) == ()
    path.write_text(json.dumps({"step": 0}) + "\n" + '{"step": 1, "rew')
    assert checks.read_rows(path) == ({"step": 0},)
