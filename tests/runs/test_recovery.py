"""Runs that lose their actors one after another, and end as if nothing had happened."""

import pytest

from rl.observability.run_folder import read_status
from tests.runs.test_resume import EXACT, LIMIT_S, trained_on, without_times
from tests.support.leaks import drop_files_of_others, list_shared_memory
from tests.support.runs import kill_roles_after_lines, run_to_the_end

pytestmark = pytest.mark.slow


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
