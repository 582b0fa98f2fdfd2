"""The made-up ledgers of the benchmark are sound, and its steps are told apart."""

import sys
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.ledger import Times, compute_figures, compute_ratios, is_on, time_command
from benchmarks.trained_batches import AGENTS, REPLIES, write_ledger
from rl.ledger.check import check_run


@pytest.mark.parametrize("shape", [REPLIES, AGENTS], ids=lambda shape: shape.name)
def test_made_up_ledger_closes(tmp_path, shape):
    small = replace(shape, reply_tokens=(2, 5), prompt_tokens=(3, 4), message_tokens=(2, 3))
    num_tokens = write_ledger(tmp_path, small, num_tokens=1_000)
    checked = check_run(tmp_path)
    assert (checked.violation, checked.notes) == (None, [])
    assert checked.num_tokens == num_tokens >= 1_000


def test_steps_with_and_without_the_ledger_are_compared_by_round():
    times = Times()
    seconds = [1.02, 1.0, 2.0, 2.04, 3.03, 3.0, 1.0, 1.01]  # A machine that slows down in between.
    times.by_step["wall"] = times.by_step["cpu"] = dict(enumerate(seconds, start=1))
    for n in (1, 4, 5, 8):
        times.by_step["choose"][n], times.by_step["write"][n] = 0.001, 0.02
    for n in range(1, 9):
        times.by_step["collect"][n] = 0.005 if is_on(n) else 0.001
    step: dict[str, Any] = compute_figures(times, range(1, 9))
    assert step["wall"]["overhead"] == pytest.approx((0.02 + 0.01) / 2)
    assert step["wall"]["off_s"] == 1.5
    assert (step["loop_ms"]["ledger"], step["writer_ms"]) == pytest.approx((1.0, 24.0))

    replies = {"tokens": 1e6, "seconds": 12.0, "peak_mib": 512.0, "bytes_per_token": 12.0}
    of_check = {"seconds": 0.2, "peak_mib": 0.5, "bytes_per_token": 0.5}
    ratios = compute_ratios({"replies": replies, "step": step})
    # 1 ms of the loop and 24 of the writer are a sixtieth of 1.5 s.
    assert ratios == pytest.approx(of_check | {"step": 100 / 60})


def test_memory_is_that_of_the_command_alone():
    _, peak_mib, said = time_command([sys.executable, "-c", "print('a'); print('b')"])
    assert said == "a\nb"
    assert 1 < peak_mib < 60
    with pytest.raises(RuntimeError, match="ended with 3"):
        time_command([sys.executable, "-c", "import sys; sys.exit(3)"])
