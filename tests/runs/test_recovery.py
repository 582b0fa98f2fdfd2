"""Runs that lose their actors one after another, and end as if nothing had happened."""

import pytest

from rl.observability.recorder import read_rollouts
from rl.observability.run_folder import read_status
from tests.runs.test_resume import EXACT, LIMIT_S, SHORT, trained_on, without_times
from tests.support.leaks import drop_files_of_others, list_shared_memory
from tests.support.runs import kill_roles_after_lines, run_to_the_end

pytestmark = [pytest.mark.slow, pytest.mark.long]


def step(number):
    """How the console's line of a step begins."""
    return f"{number:>7}  "


@pytest.mark.timeout(3 * LIMIT_S + 60)
def test_a_run_that_loses_each_of_its_roles_has_the_metrics_of_an_undisturbed_one_in_every_bit(tmp_path):
    before = list_shared_memory()
    whole = run_to_the_end(tmp_path, "whole", *EXACT, limit_s=LIMIT_S)
    assert whole.status == 0, whole.output
    victims = [(step(1), "generator"), (step(3), "trainer"), (step(4), "reward"), (step(5), "generator")]
    losing = kill_roles_after_lines(tmp_path, "losing", *EXACT, victims=victims, limit_s=2 * LIMIT_S)
    assert losing.status == 0, losing.output
    for role in ("generator", "trainer", "reward"):
        assert f"{role} is lost: " in losing.output

    assert "generator serves again after " in losing.output
    assert "trainer is set up again after " in losing.output
    assert "reward works again after " in losing.output
    assert without_times(losing.folder) == without_times(whole.folder)
    assert trained_on(losing.folder) == trained_on(whole.folder)
    assert read_status(losing.folder) == "finished"
    assert not drop_files_of_others(list_shared_memory() - before, own=())


@pytest.mark.timeout(2 * LIMIT_S + 60)
def test_a_run_that_loses_a_role_too_often_says_so_and_can_be_continued(tmp_path):
    lost = kill_roles_after_lines(
        tmp_path, "often", *EXACT, "--recovery.max_restarts", "1",
        victims=[(step(2), "generator"), (step(3), "generator")], limit_s=LIMIT_S,
    )  # fmt: skip
    assert lost.status == 1, lost.output
    assert "generator is lost once more, after 1 restarts within 3600 s" in lost.output.splitlines()[-1]
    assert "recovery.max_restarts=1" in lost.output.splitlines()[-1]
    assert f"continue with --resume {lost.folder}\n" in lost.output
    ended = run_to_the_end(tmp_path, "often", limit_s=LIMIT_S, resumes=True)
    assert ended.status == 0, ended.output
    assert [record["step"] for record in ended.steps] == list(range(1, 8))


@pytest.mark.timeout(3 * LIMIT_S + 60)
def test_an_asynchronous_run_that_loses_its_roles_trains_on_every_problem_once_and_keeps_its_bound(tmp_path):
    ahead = (
        *SHORT, "--loop.num_steps", "7", "--loop.max_policy_age", "2", "--trainer.checkpoint.interval", "2",
        "--generator.num_replicas", "2", "--recorder.num_groups", "8",
    )  # fmt: skip
    victims = [(step(2), "generator_1"), (step(4), "trainer"), (step(5), "generator_0"), (step(6), "reward")]
    losing = kill_roles_after_lines(tmp_path, "losing", *ahead, victims=victims, limit_s=2 * LIMIT_S)
    assert losing.status == 0, losing.output
    assert [record["step"] for record in losing.steps] == list(range(1, 8))
    assert max(record["age/max"] for record in losing.steps) <= 2
    trained = [r for r in read_rollouts(losing.folder / "rollouts.jsonl") if r["kind"] == "train"]
    samples = [(r["problem"], r["sample"]) for r in trained]
    assert len(samples) == len(set(samples)) == 8 * 4 * 7
