"""Two whole runs, as a user starts them: trainer and generator agree in every bit, and so do the runs."""

import pytest

from rl.observability.metrics import read_metrics
from tests.support.runs import run_to_the_end

pytestmark = pytest.mark.slow

LIMIT_S = 240


@pytest.mark.timeout(2 * LIMIT_S + 60)
def test_logprobs_are_identical_in_every_step_and_a_second_run_has_the_same_metrics(tmp_path):
    records = []
    for name in ("first", "second"):
        run = run_to_the_end(
            tmp_path, name, "--module", "tests.support.invariant_configs", "--config", "short_noise",
            limit_s=LIMIT_S,
        )  # fmt: skip
        assert run.status == 0, run.output
        assert len(run.steps) == 3
        for step in run.steps:
            assert step["logprob_diff/identical"] == 1
            assert step["logprob_diff/max"] == step["logprob_diff/mean"] == 0.0
            # Something was learnt from, and so changed.
            assert step["loss/grad_norm"] > 0
        records.append([_without_times(r) for r in read_metrics(run.folder / "metrics.jsonl")])
    assert records[0] == records[1]


def _without_times(record):
    return {
        name: value for name, value in record.items() if not name.startswith(("time/", "perf/", "limit/"))
    }
