"""Spans drawn on a page, for runs of any length."""

import pytest

from rl.observability.timeline import Span, find_kind
from rl.reporting.html.timeline import pack_timeline


def span(name, start_s, end_s, *, role="trainer", rank=0, version=None, error=None):
    return Span(
        role=role, rank=rank, name=name, start_s=start_s, end_s=end_s, version=version, error=error
    )


def told(packed, lane=0):
    """Return name, start, length, row and number of spans of each block of a lane."""
    of = packed["lanes"][lane]
    names = [packed["names"][n][0] for n in of["name"]]
    return list(zip(names, of["at"], of["for"], of["row"], of["num"], strict=True))


def test_times_start_at_zero_and_lanes_are_ordered():
    packed = pack_timeline(
        [
            span("score", 103, 104, role="reward"),
            span("generate", 101, 103, role="generator_1"),
            span("generate", 101, 102, role="generator_0"),
            span("optim_step", 104, 104.5, version=3),
            span("waits for a batch", 100, 104, role="controller"),
        ],
        [{"time": 99.0, "event": "started"}, {"time": 105.0, "event": "lost", "role": "reward"}],
    )
    roles = [lane["role"] for lane in packed["lanes"]]
    assert roles == ["controller", "trainer", "generator_0", "generator_1", "reward"]
    assert (packed["start_s"], packed["length_s"], packed["gap_s"]) == (99, 6, 0)
    assert told(packed, 1) == [("optim_step", 5, 0.5, 0, 1)]
    assert packed["lanes"][1]["version"] == [3]
    assert packed["events"] == [
        {"at": 0, "event": "started"},
        {"at": 6, "event": "lost", "role": "reward"},
    ]


def test_nested_spans_are_in_the_row_below():
    packed = pack_timeline(
        [
            span("forward_backward", 0, 10),
            span("pack", 0, 2),
            span("save", 1, 3),
            span("push", 3, 4),
        ],
        [],
    )
    assert told(packed) == [
        ("pack", 0, 2, 0, 1),
        ("forward_backward", 0, 10, 1, 1),
        ("save", 1, 2, 2, 1),
        ("push", 3, 1, 0, 1),
    ]


def test_many_overlapping_requests_are_one_block():
    requests = [span("generate", 1 + 0.01 * i, 5 + 0.1 * i, role="generator_0") for i in range(50)]
    later = [span("generate", 20, 21, role="generator_0")]
    packed = pack_timeline([*requests, *later], [])
    assert told(packed) == [("generate", 0, 8.9, 0, 50), ("generate", 19, 1, 0, 1)]
    assert packed["lanes"][0]["busy"] == {0: pytest.approx(sum(4 + 0.09 * i for i in range(50)))}


def test_short_spans_of_a_long_run_are_merged():
    spans = [span("pack", i + 0.1 * k, i + 0.1 * k + 0.05) for i in range(2000) for k in range(10)]
    packed = pack_timeline(spans, [], max_blocks=1000)
    blocks = told(packed)
    assert len(blocks) <= 1000
    assert sum(num for *_, num in blocks) == 20_000  # no span is lost
    assert packed["lanes"][0]["busy"][0] == pytest.approx(0.05 * blocks[0][-1])


def test_span_longer_than_the_gap_is_not_merged():
    spans = [span("pack", i, i + 0.1) for i in range(1000)] + [span("push", 500.2, 560)]
    packed = pack_timeline(spans, [], max_blocks=50)
    assert len(told(packed)) <= 50
    assert [(at, took) for name, at, took, *_ in told(packed) if name == "push"] == [(500.2, 59.8)]


def test_span_with_an_error_is_not_merged():
    spans = [
        span("pack", i, i + 0.1, error="OSError: gone" if i == 70 else None) for i in range(100)
    ]
    packed = pack_timeline(spans, [], max_blocks=10)
    (lane,) = packed["lanes"]
    ((number, error),) = lane["error"].items()
    assert (lane["at"][number], lane["num"][number], error) == (70, 1, "OSError: gone")


def test_each_span_has_a_kind():
    kinds = {
        "waits for trainer.optim_step": "wait", "generate": "generate", "score": "reward",
        "optim_step": "optim",
        "compute_logprobs": "forward_backward", "pull": "pull",
        "evaluation after step 3": "evaluate",
        "setup": "setup", "something of a plugin": "other",
    }  # fmt: skip
    assert {name: find_kind(name) for name in kinds} == kinds
