"""Parts of a generator step are disjoint and sum to the whole."""

import json
import time

import pytest

from benchmarks.generator_step import PARTS, PartClock, main


class Work:
    """Object whose methods each take a minimum of CPU time themselves."""

    def outer(self):
        spin(0.02)
        return self.inner(3) + self.inner(4)

    def inner(self, value):
        spin(0.01)
        return value


def spin(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_time_of_a_part_excludes_nested_parts():
    clock, work = PartClock(), Work()
    clock.watch(work, "outer", "a")
    clock.watch(work, "inner", "b")
    assert work.outer() == 7
    assert clock.calls == {"a.outer": 1, "b.inner": 2}
    assert 0.02 <= clock.seconds["a"] < 0.03
    assert 0.02 <= clock.seconds["b"] < 0.03


@pytest.mark.slow
def test_parts_of_a_step_sum_to_its_cpu_time(capsys):
    main(["--quick", "--tokens", "5"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    row = figures["new_tokens"]["5"]
    assert row["steps"] == 5
    assert row["tokens_per_s"] == pytest.approx(128 * 5 / (5 * row["ms_per_step"] / 1e3), rel=0.01)
    assert sum(row["parts_ms"].values()) == pytest.approx(row["cpu_ms_per_step"], abs=0.1)
    assert sum(row["share"].values()) == pytest.approx(1, abs=0.01)
    assert all(row["parts_ms"][part] > 0 for part in PARTS)
