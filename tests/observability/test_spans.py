"""What processes did, from the activities to what is read of them."""

import json
import time

import pytest

from rl.observability.activity import Activity
from rl.observability.span_file import SPANS_FOLDER, SpanFile, TimelineConfig
from rl.observability.spans import Span, kind_of, read_spans
from tests.support.disks import on_small_disk


def span_file(logs, *, role="trainer", rank=0, max_bytes=1 << 20, wall_clock=time.time):
    path = logs / SPANS_FOLDER / f"{role}-{rank}.jsonl"
    return SpanFile(path, role=role, rank=rank, max_bytes=max_bytes, wall_clock=wall_clock)


def ended(file, name, *, began_s=1.0, ended_s=2.0, version=None, error=None, more=False):
    file.add(name, began_s=began_s, ended_s=ended_s, version=version, error=error, more=more)


def names(logs):
    return [span.name for span in read_spans(logs)]


def test_activities_are_read_back_by_their_starts_with_process_version_and_error(tmp_path):
    activity = Activity()
    activity.keep_spans(span_file(tmp_path, role="generator_1", rank=2))
    before = time.time()
    step = activity.begin("step 3", None)
    push = activity.begin("push", 7)
    activity.end("push", push, ValueError("too\n large"))
    activity.end("step 3", step)
    after = time.time()
    outer, inner = read_spans(tmp_path)
    assert (outer.name, outer.version, outer.error) == ("step 3", None, None)
    assert (inner.name, inner.version, inner.error) == ("push", 7, "ValueError: too large")
    assert (inner.process, inner.role, inner.rank) == ("generator_1[2]", "generator_1", 2)
    # The wall clock was looked at before these activities; the file has microseconds.
    times = [before - 0.01, outer.start_s, inner.start_s, inner.end_s, outer.end_s, after + 0.01]
    assert times == sorted(times)


def test_times_are_those_of_the_monotonic_clock_beside_one_look_at_the_wall_clock(tmp_path):
    hour_s = 3600.0
    looks = iter([time.time() + hour_s])  # a second look would fail
    file = span_file(tmp_path, wall_clock=lambda: next(looks))
    now = time.monotonic()
    ended(file, "push", began_s=now - 2.5, ended_s=now)
    (span,) = read_spans(tmp_path)
    assert span.duration_s == pytest.approx(2.5, abs=2e-6)
    assert span.end_s == pytest.approx(time.time() + hour_s, abs=0.5)


def test_what_a_process_did_last_is_on_the_disk_while_it_waits(tmp_path):
    file = span_file(tmp_path)
    ended(file, "forward_backward", began_s=1.0, ended_s=2.0, more=True)  # the first is due at once
    ended(file, "pack", began_s=2.1, ended_s=2.2, more=True)
    assert names(tmp_path) == ["forward_backward"]
    ended(file, "optim_step", began_s=2.2, ended_s=2.24, more=False)
    assert names(tmp_path) == ["forward_backward", "pack", "optim_step"]
    ended(file, "push", began_s=2.3, ended_s=2.4, more=True)
    assert names(tmp_path)[-1] == "optim_step"
    ended(file, "pull", began_s=2.4, ended_s=2.5, more=True)  # a quarter of a second after the last writing
    assert names(tmp_path)[-2:] == ["push", "pull"]


def test_what_is_kept_back_is_written_when_the_process_is_told_to_stop(tmp_path):
    activity = Activity()
    activity.keep_spans(span_file(tmp_path))
    activity.begin("step 1", None)
    for _ in range(3):
        activity.end("push", activity.begin("push", 1))
    activity.stop()
    assert names(tmp_path) == ["push"] * 3
    activity.end("pull", activity.begin("pull", 1))
    assert names(tmp_path) == ["push"] * 3


def test_a_line_that_was_cut_short_is_left_out_and_the_next_process_goes_on_after_it(tmp_path):
    file = span_file(tmp_path)
    ended(file, "push")
    path = tmp_path / SPANS_FOLDER / "trainer-0.jsonl"
    with path.open("a") as torn:
        torn.write('{"name": "forward_backward", "start_s": 17640')
    assert names(tmp_path) == ["push"]
    ended(span_file(tmp_path), "load", began_s=3.0, ended_s=4.0)
    assert names(tmp_path) == ["push", "load"]


def test_what_is_no_span_is_left_out(tmp_path):
    folder = tmp_path / SPANS_FOLDER
    folder.mkdir()
    (folder / "a-0.jsonl").write_text('{"name": "push", "start_s": 1, "end_s": 2, "version": null}\n')
    (folder / "b-0.jsonl").write_text('{"role": "b", "rank": 0}\n[]\n3\n{"name": "push"}\n\xff\n')
    (folder / "c-0.jsonl").write_text(
        '{"role": "c", "rank": 1}\n{"name": "pull", "start_s": 1.5, "end_s": 2.5, "version": 4}\n'
    )
    assert read_spans(tmp_path) == [
        Span(role="c", rank=1, name="pull", start_s=1.5, end_s=2.5, version=4, error=None)
    ]
    assert read_spans(tmp_path / "elsewhere") == []


def test_the_oldest_spans_make_room_and_the_newest_stay(tmp_path):
    file = span_file(tmp_path, max_bytes=20_000)
    for number in range(1000):
        ended(file, f"step {number}", began_s=number, ended_s=number + 0.5)
    file.close()
    sizes = [path.stat().st_size for path in (tmp_path / SPANS_FOLDER).iterdir()]
    assert len(sizes) == 2
    assert sum(sizes) <= 20_000
    kept = names(tmp_path)
    assert 100 <= len(kept) < 250
    assert kept == [f"step {number}" for number in range(1000 - len(kept), 1000)]
    assert {span.process for span in read_spans(tmp_path)} == {"trainer[0]"}


def test_of_more_than_can_be_read_each_process_has_its_newest_spans(tmp_path):
    for role in ("trainer", "generator_0"):
        file = span_file(tmp_path, role=role, max_bytes=40_000)  # of which 20,000 are the file before it
        for number in range(1000):
            ended(file, f"step {number}", began_s=number, ended_s=number + 0.5)
        file.close()
    everything = read_spans(tmp_path)
    for max_bytes in (80_000, 50_000, 20_000, 1_000):
        spans = read_spans(tmp_path, max_bytes=max_bytes)
        for process in ("trainer[0]", "generator_0[0]"):
            of_all = [span for span in everything if span.process == process]
            kept = [span for span in spans if span.process == process]
            assert kept == of_all[len(of_all) - len(kept) :]
            # A line has about 80 bytes.
            assert min(len(of_all), max_bytes / 2 / 100) <= len(kept) <= max_bytes / 2 / 70
    assert read_spans(tmp_path, max_bytes=80_000) == everything


def test_a_full_disk_loses_spans_and_nothing_else(tmp_path):
    def act(disk):
        activity = Activity()
        activity.keep_spans(span_file(disk.folder))
        for name in ("setup", "load"):
            activity.end(name, activity.begin(name, None))
        disk.fill()
        for _ in range(500):
            activity.end("lost", activity.begin("lost", 5))
        disk.free()
        activity.end("push", activity.begin("push", 6))
        kept = names(disk.folder)
        return json.dumps([kept[:2], kept[-1], kept.count("lost")])

    first, last, num_lost = json.loads(on_small_disk(act, tmp_path))
    assert (first, last) == (["setup", "load"], "push")
    assert num_lost < 500  # the rest had room in a page that was begun


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("generate", "generate"),
        ("score", "reward"),
        ("optim_step", "optim"),
        ("waits for trainer.optim_step", "wait"),
        ("waits for a batch", "wait"),
        ("save", "checkpoint"),
        ("step 3", "other"),
    ],
)
def test_names_are_of_a_kind(name, kind):
    assert kind_of(name) == kind


def test_a_span_adds_less_than_10_microseconds_to_an_activity(tmp_path):
    def best_s(activity):
        def batch():
            started = time.perf_counter()
            for _ in range(200):
                activity.end("forward_backward", activity.begin("forward_backward", 3))
            return (time.perf_counter() - started) / 200

        return min(batch() for _ in range(30))

    plain, told = Activity(), Activity()
    for activity, name in ((plain, "plain"), (told, "told")):
        activity.start(tmp_path / "state", role=name, rank=0)
    told.keep_spans(span_file(tmp_path, role="told"))
    extra_s = best_s(told) - best_s(plain)
    plain.stop()
    told.stop()
    assert extra_s < 10e-6


@pytest.mark.parametrize("value", [0.0, 0.05, float("inf"), float("nan")])
def test_a_size_that_no_file_can_have_is_refused(value):
    with pytest.raises(ValueError, match=r"max_megabytes=.*: must be at least 0\.1 and finite"):
        TimelineConfig(max_megabytes=value)
