import pytest

from rl.observability.lanes import MAIN, lanes_of
from rl.observability.spans import Span


def span(name, start_s, end_s):
    return Span(role="trainer", rank=0, name=name, start_s=start_s, end_s=end_s)


def drawn(*spans):
    return {name: [[s.name for s in lane] for lane in lanes] for name, lanes in lanes_of(spans)}


def test_what_nests_or_follows_shares_a_lane_and_what_overlaps_lies_beside_it():
    assert drawn(
        span("forward_backward", 0, 4),
        span("pack", 0, 1),
        span("optim_step", 4, 5),
        span("push", 3, 6),
    ) == {MAIN: [["forward_backward", "pack", "optim_step"], ["push"]]}


def test_the_longer_of_two_that_begin_together_is_around_the_other():
    assert drawn(span("inner", 0, 1), span("outer", 0, 2)) == {MAIN: [["outer", "inner"]]}


def test_what_overlaps_with_itself_has_as_few_lanes_as_there_are_at_once():
    calls = [span("generate", *times) for times in ((0, 3), (1, 2), (2, 5), (3, 4), (4, 6))]
    lanes = dict(lanes_of([*calls, span("pull", 0, 6)]))
    assert [[s.name for s in lane] for lane in lanes[MAIN]] == [["pull"]]
    times = [[(s.start_s, s.end_s) for s in lane] for lane in lanes["generate"]]
    assert times == [[(0, 3), (3, 4), (4, 6)], [(1, 2), (2, 5)]]


@pytest.mark.parametrize("seed", range(5))
def test_no_two_of_a_lane_overlap_without_nesting_and_none_is_lost(seed):
    state = seed + 1
    spans = []
    for number in range(200):
        state = state * 48271 % 2147483647
        start = state % 1000
        spans.append(span(f"n{number % 7}", start, start + 1 + state // 1000 % 60))
    found = [lane for _, lanes in lanes_of(spans) for lane in lanes]
    assert sorted(s.start_s for lane in found for s in lane) == sorted(s.start_s for s in spans)
    for lane in found:
        for i, one in enumerate(lane):
            for other in lane[i + 1 :]:
                apart = one.end_s <= other.start_s
                assert apart or (one.start_s <= other.start_s and other.end_s <= one.end_s)
