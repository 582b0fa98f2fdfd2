"""The sides of the benchmark of observability: what they observe, and what is made of their times."""

import numpy as np
import pytest

from benchmarks.observability import figures, interval, order
from benchmarks.observability_actors import SIDES, Switch
from rl.observability.activity import Activity
from rl.observability.process_state import read_state
from rl.observability.span_file import SPANS_FOLDER, SpanFile
from rl.observability.spans import read_spans


def test_each_side_has_its_own_share_of_what_a_process_tells(tmp_path):
    watched = Activity()
    state = watched.start(tmp_path / "state", role="trainer", rank=0)
    path = tmp_path / SPANS_FOLDER / "trainer-0.jsonl"
    watched.keep_spans(SpanFile(path, role="trainer", rank=0, max_bytes=1 << 20))
    switch = Switch(watched)
    told = {}
    for side in SIDES:
        switch.turn(side)
        number = switch.begin(side, 1)
        told[side] = [doing.what for doing in read_state(state).doing]
        switch.end(side, number)
    assert told == {"off": [], "timeline": [], "all": ["all"], "control": []}
    assert [span.name for span in read_spans(tmp_path)] == ["timeline", "all"]


def test_what_began_on_one_side_ends_there(tmp_path):
    watched = Activity()
    state = watched.start(tmp_path / "state", role="trainer", rank=0)
    switch = Switch(watched)
    number = switch.begin("generate", 1)
    switch.turn("off")
    switch.end("generate", number)
    assert read_state(state).doing == ()


def test_every_side_is_in_every_place_equally_often_and_as_often_before_each_other():
    rounds = [order(number) for number in range(2 * len(SIDES))]
    for place in range(len(SIDES)):
        assert sorted(sides[place] for sides in rounds) == sorted(SIDES * 2)
    for one in SIDES:
        for other in SIDES:
            if one != other:
                assert sum(sides.index(one) < sides.index(other) for sides in rounds) == len(SIDES)


def test_overheads_are_of_steps_of_the_same_round():
    times = {
        "off": [1.0, 2.0, 1.0],  # a round in which the machine was slow
        "timeline": [1.005, 2.01, 1.5],
        "all": [1.02, 2.04, 1.02],
        "control": [1.0, 2.0, 0.9],
    }
    found = figures(times)
    assert found["overhead"] == pytest.approx({"timeline": 0.005, "all": 0.02, "control": 0.0})
    assert found["ratio"] == pytest.approx(1.02)
    assert found["met"] == {"timeline": True, "all": True}
    assert found["step_s"]["off"] == 1.0
    assert found["interval"]["all"] == pytest.approx((0.02, 0.02))
    assert found["interval"]["timeline"] == pytest.approx((0.005, 0.5))
    slow = figures(times | {"all": [1.04, 2.08, 1.04]})
    assert slow["met"] == {"timeline": True, "all": False}


def test_interval_is_that_of_the_ranks_around_the_median():
    # Of 101 values: 1.96 standard deviations of a binomial, sqrt(101) / 2, to both sides of the 51st.
    assert interval(np.arange(1.0, 102.0)) == pytest.approx((41.2, 60.8), abs=0.9)
