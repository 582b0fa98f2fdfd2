import pytest

from benchmarks.batch_invariant import Turn, figures


def turn(*, seconds, processor_s):
    return Turn(
        generate_s=seconds / 4, train_s=seconds / 2, step_s=seconds, processor_s=processor_s,
        num_generated=100, num_trained=300, logprob_diff_max=seconds,
    )  # fmt: skip


def test_the_cost_is_of_median_steps():
    off = [turn(seconds=s, processor_s=4.0) for s in (1.0, 2.0, 50.0)]
    on = [turn(seconds=s, processor_s=5.0) for s in (0.5, 2.2, 3.0)]
    result = figures({"off": off, "on": on}, threads=2)
    assert result["cost"] == pytest.approx(0.1)
    assert result["processor_cost"] == pytest.approx(0.25)
    assert result["off"]["generator_tokens_s"] == 200
    assert result["off"]["trainer_tokens_s"] == 300
    assert result["on"]["logprob_diff_max"] == 3.0
    assert (result["turns"], result["threads"]) == (3, 2)
