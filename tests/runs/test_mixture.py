"""A whole run of a mixture of experts."""

import math
from pathlib import Path

import pytest

from rl.models.hf import HFFolder
from tests.support.runs import run_to_the_end

RUN_LIMIT_S = 8 * 60


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mixture_trains_and_generates_with_a_bias_that_balances_its_load(tmp_path: Path) -> None:
    """The bias moves in each of the 10 warm-up steps and the 4 steps of the run, and reaches the
    generator.
    """
    run = run_to_the_end(
        tmp_path, "mixture", "--config", "tiny_moe", "--trainer.experts.load_balance_rate", "0.001",
        "--warmup.num_steps", "10", "--loop.num_steps", "4", "--loop.eval_every", "0",
        "--loop.groups_per_batch", "8", "--task.reward", "noise",
        limit_s=RUN_LIMIT_S,
    )  # fmt: skip
    assert run.status == 0, run.output
    assert len(run.steps) == 4
    assert all(math.isfinite(step["loss/mean"]) for step in run.steps)
    assert max(step["logprob_diff/mean"] for step in run.steps) <= 1e-5
    for step in run.steps:
        assert 1.0 <= step["experts/busiest_mean"] <= step["experts/busiest_max"] <= 8.0
    exported = HFFolder(run.folder / "checkpoints" / "hf", tokenizer=True)
    assert sum("e_score_correction_bias" in name for name in exported.shapes) == 3
