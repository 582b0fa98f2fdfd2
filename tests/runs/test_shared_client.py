"""What environments share lives in one event loop, from the first check to the end of a run."""

import pytest

from tests.support.runs import run_to_the_end

SHARED = ("--module", "tests.support.shared_client", "--config", "asking")


@pytest.mark.slow
def test_a_client_of_all_environments_serves_checks_warm_up_rollouts_and_evaluations(tmp_path):
    run = run_to_the_end(tmp_path, "shared", *SHARED, limit_s=150)
    assert run.status == 0, run.output
    assert [record["environment/asked"] for record in run.steps] == [1.0]
    assert sorted(run.evaluations) == [0, 1]
