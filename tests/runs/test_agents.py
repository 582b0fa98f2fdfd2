"""Whole runs on an agent with branches: its tokens, and what a loss of processes leaves of it."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rl.ledger.__main__ import main
from rl.ledger.check import check_run
from rl.observability.events import read_events
from rl.observability.recorder import read_rollouts
from tests.support.runs import FinishedRun, kill_role, run_to_the_end

pytestmark = [pytest.mark.medium, pytest.mark.timeout(400)]
AGENTS = ("--module", "tests.support.faulty_configs", "--config", "agents")
ALL = ("--recorder.num_groups", "None", "--ledger.enable", "True")


def list_trained(run: FinishedRun) -> list[dict[str, Any]]:
    rollouts = read_rollouts(run.folder / "rollouts.jsonl")
    return [line for line in rollouts if line["kind"] == "train"]


def check_rows(run: FinishedRun) -> None:
    """Check that every step has all of its rollouts, each once, and exact tokens."""
    assert [record["step"] for record in run.steps] == [1, 2, 3]
    for record in run.steps:
        # Trainer and generator have the same kernels: across branches too.
        assert record["logprob_diff/identical"] == 1
        assert record["logprob_diff/max"] == 0.0
        assert record["branches/agent"] == 8
        assert record["branches/rewritten"] == 8
    lines = list_trained(run)
    counts = Counter((line["step"], line["problem"], line["sample"]) for line in lines)
    assert len(counts) == 3 * 2 * 4
    assert set(counts.values()) == {1}
    assert len({line["problem"] for line in lines}) == 3 * 2
    for line in lines:
        roles = [(branch["role"], branch["cause"]) for branch in line["branches"]]
        assert roles == [("sub-agent", ""), ("main", "agent"), ("main", "rewritten")]
        assert all(turn["mask"] == 1 for turn in line["turns"])
        if line["step"] == 1:
            assert all(turn["logprobs"] == turn["trainer_logprobs"] for turn in line["turns"])
    checked = check_run(run.folder)
    assert (checked.violation, checked.notes) == (None, [])
    assert (checked.num_steps, checked.num_episodes) == (3, 3 * 2 * 4)


def test_run_whose_endpoint_and_generator_are_killed_trains_on_every_rollout_once(tmp_path):
    def kill_both(run: subprocess.Popen[str]) -> None:
        kill_role("agents")(run)
        kill_role("generator")(run)

    run = run_to_the_end(
        tmp_path, "killed", *AGENTS, *ALL, after=("reward", kill_both), limit_s=300
    )
    assert run.status == 0, run.output
    check_rows(run)
    restarted = {e.get("role") for e in read_events(run.folder / "events.jsonl")} - {None}
    assert {"agents", "generator"} <= restarted


@pytest.mark.slow
def test_run_whose_controller_is_killed_goes_on_without_losing_or_doubling_a_row(tmp_path):
    killed = run_to_the_end(
        tmp_path, "resumed", *AGENTS, *ALL,
        after=("      1  ", subprocess.Popen.kill), limit_s=300,
    )  # fmt: skip
    assert killed.status == -9
    run = run_to_the_end(tmp_path, "resumed", resumes=True, limit_s=300)
    assert run.status == 0, run.output
    check_rows(run)
    assert main([str(run.folder), "--replay", "2"]) == 0
    assert not list(Path("/tmp").glob(f"relay-play-{tmp_path.name}*"))
