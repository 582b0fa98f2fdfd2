"""Parts of a generator step are disjoint and sum to the whole."""

import json
import time

import pytest

from benchmarks.generator_step import PARTS, PartClock, main


def test_time_of_a_part_excludes_nested_parts(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(time, "thread_time", lambda: now_s)

    class Work:
        def outer(self):
            nonlocal now_s
            now_s += 2.0
            return self.inner(3) + self.inner(4)

        def inner(self, value):
            nonlocal now_s
            now_s += 1.0
            return value

    clock, work = PartClock(), Work()
    clock.watch(work, "outer", "a")
    clock.watch(work, "inner", "b")
    assert work.outer() == 7
    assert clock.calls == {"a.outer": 1, "b.inner": 2}
    assert clock.seconds == {"a": 2.0, "b": 2.0}


@pytest.mark.slow
def test_parts_of_a_step_sum_to_its_cpu_time(capsys):
    main(["--quick", "--tokens", "5"])
    row = json.loads(capsys.readouterr().out.splitlines()[-1])["calls"]["128x5"]["ours"]
    assert row["steps"] == 5
    assert sum(row["parts_ms"].values()) == pytest.approx(row["cpu_ms_per_step"], abs=0.1)
    assert all(row["parts_ms"][part] > 0 for part in PARTS)
