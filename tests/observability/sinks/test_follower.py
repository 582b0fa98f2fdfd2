import json
import logging
import threading
from dataclasses import dataclass, field

import pytest

from rl.observability.metrics import MetricsWriter, read_metrics
from rl.observability.sinks.delivery import RETRY_S, Delivery
from rl.observability.sinks.follower import Follower
from rl.observability.sinks.place import Place, Sent, place_of

LIMIT_S = 30.0
"""For a thread to end; none needs it."""


@dataclass(kw_only=True)
class ListBackend:
    """Keeps what it is given, in memory, and forgets what a run goes back on."""

    name: str = "list"
    rows: list = field(default_factory=list)
    fails: list = field(default_factory=list)
    """For each next call of `write`, whether it raises; none when they are used up."""
    calls: list = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def open(self, sent):
        self.calls.append("open")
        self.rows = [row for row in self.rows if sent.kept is not None and row[0] <= sent.kept]
        return sent.kept

    def write(self, record):
        if self.fails and self.fails.pop(0):
            raise OSError(28, "No space left on device")
        with self.changed:
            self.rows.append((record.place, record.number, record.values))
            self.changed.notify_all()

    def close(self, *, failed):
        self.calls.append("failed" if failed else "close")

    @property
    def steps(self):
        return [(place.step, place.is_evaluation) for place, _, _ in self.rows]


@dataclass(kw_only=True)
class KeepingBackend(ListBackend):
    """Cannot forget anything."""

    def open(self, sent):
        return sent.last


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


class Steps:
    """A run's metrics.jsonl, and a follower of it."""

    def __init__(self, folder, backend, *, clock=None, write_s=60.0):
        self.metrics = folder / "metrics.jsonl"
        self.clock = clock or Clock()
        self.follower = Follower(
            backend, metrics=self.metrics, sent=folder / "sent.json", write_s=write_s, clock=self.clock
        )

    def write(self, *steps, evaluation=False):
        with MetricsWriter(self.metrics) as writer:
            for step in steps:
                record = {"step": step, "eval/correct" if evaluation else "reward/mean": step / 2}
                writer.write(record)
                self.follower.write(record)

    def begin(self):
        records = read_metrics(self.metrics) if self.metrics.exists() else []
        self.follower.begin(place_of(records[-1], records[-1]["step"]) if records else None)

    def cut(self, num_lines):
        lines = self.metrics.read_text().splitlines(keepends=True)
        self.metrics.write_text("".join(lines[:num_lines]))

    def end(self):
        self.follower.end(failed=False)
        return self.follower.join(LIMIT_S)


def test_each_record_is_given_once_and_in_order_those_from_before_too(tmp_path):
    backend = ListBackend()
    run = Steps(tmp_path, backend)
    with MetricsWriter(run.metrics) as writer:  # of a process that had no such sink
        for step in (1, 2):
            writer.write({"step": step})
    run.begin()
    run.write(3)
    run.write(3, evaluation=True)
    assert run.end()
    assert backend.steps == [(1, False), (2, False), (3, False), (3, True)]
    assert [number for _, number, _ in backend.rows] == [0, 1, 2, 3]
    assert backend.rows[2][2] == {"reward/mean": 1.5}
    assert backend.calls == ["open", "close"]


def test_a_failure_is_one_warning_that_names_the_sink_and_nothing_is_lost_or_doubled(tmp_path, caplog):
    clock, backend = Clock(), ListBackend(fails=[False, True, False, True])
    caplog.set_level(logging.INFO)
    delivery = Delivery(backend, metrics=tmp_path / "m", sent=tmp_path / "sent.json", clock=clock)
    with MetricsWriter(tmp_path / "m") as writer:
        for step in range(1, 6):
            writer.write({"step": step})
            delivery.look()
            clock.now_s += 2 * RETRY_S[0]
    assert [step for step, _ in backend.steps] == [1, 2, 3, 4, 5]
    assert delivery.num_failures == 2
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == [
        "list was not written: OSError: [Errno 28] No space left on device; training goes on, and it is "
        "tried again from m"
    ]


def test_a_sink_that_fails_to_the_end_says_at_the_end_what_it_lacks(tmp_path, caplog):
    backend = ListBackend(fails=[False, False, *[True] * 99])
    run = Steps(tmp_path, backend)
    run.begin()
    run.write(1, 2, 3, 4)
    assert not run.end()
    first, last = (record.message for record in caplog.records)
    assert first.startswith("list was not written: OSError")
    assert last == (f"list could not be written: it lacks what came after step 2, which is in {run.metrics}")


def test_a_sink_that_cannot_be_closed_says_that_it_may_lack_some(tmp_path, caplog):
    @dataclass(kw_only=True)
    class Lost(ListBackend):
        def close(self, *, failed):
            raise ConnectionResetError("Connection lost")

    run = Steps(tmp_path, Lost())
    run.begin()
    run.write(1)
    assert not run.end()
    (record,) = caplog.records
    assert record.message == (
        "list may lack some of the records, as it was not closed in order: "
        "ConnectionResetError('Connection lost')"
    )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_sink_that_ends_its_thread_says_at_the_end_what_it_lacks(tmp_path, caplog):
    @dataclass(kw_only=True)
    class Leaving(ListBackend):
        def write(self, record):
            raise SystemExit(1)

    run = Steps(tmp_path, Leaving())
    run.begin()
    run.write(1)
    assert not run.end()
    assert caplog.records[-1].message == (
        f"list ended before the run did: it lacks all of it, which is in {run.metrics}"
    )


def test_after_failures_in_a_row_a_sink_is_left_alone_for_longer_and_longer(tmp_path):
    clock, backend = Clock(), ListBackend(fails=[True] * 9)
    with MetricsWriter(tmp_path / "m") as writer:
        writer.write({"step": 1})
    delivery = Delivery(backend, metrics=tmp_path / "m", sent=tmp_path / "sent.json", clock=clock)
    delivery.restart(Place(1))
    tried_at = []
    for second in range(1, 160):
        clock.now_s, before = 100.0 + second, delivery.num_failures
        delivery.look()
        if delivery.num_failures > before:
            tried_at.append(second)
    assert RETRY_S == (1, 5, 15, 60)
    assert tried_at == [1, 6, 21, 81, 141]
    backend.fails.clear()
    delivery.catch_up()  # at the end of the run, however recent the last failure is
    assert delivery.has_all
    assert backend.steps == [(1, False)]


def test_a_sink_that_hangs_holds_up_nobody_and_is_told_once(tmp_path, caplog):
    free, entered = threading.Event(), threading.Event()

    @dataclass(kw_only=True)
    class Hanging(ListBackend):
        def write(self, record):
            entered.set()
            assert free.wait(LIMIT_S)
            super().write(record)

    backend = Hanging()
    run = Steps(tmp_path, backend, write_s=60.0)
    run.begin()
    run.write(1)
    assert entered.wait(LIMIT_S)
    run.clock.now_s += 59
    run.write(2)
    assert caplog.records == []
    run.clock.now_s += 2
    run.write(3, 4)
    (warning,) = caplog.records
    assert warning.message.startswith("list has not answered for 61 s; training goes on")
    run.follower.end(failed=False)
    assert not run.follower.join(0.0)
    assert caplog.records[-1].message.startswith("list was not done when the run ended: it lacks all of it")
    free.set()  # it comes back after all
    assert run.follower.join(LIMIT_S)
    assert [step for step, _ in backend.steps] == [1, 2, 3, 4]


def test_a_run_that_goes_back_doubles_nothing_in_this_process(tmp_path):
    backend = ListBackend()
    run = Steps(tmp_path, backend)
    run.begin()
    run.write(1, 2, 3, 4)
    wait_for(backend, 4)
    run.cut(2)
    run.begin()
    run.write(3, 4, 5)
    assert run.end()
    assert [step for step, _ in backend.steps] == [1, 2, 3, 4, 5]
    assert [number for _, number, _ in backend.rows] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("make", [ListBackend, KeepingBackend])
def test_a_process_that_resumes_the_run_doubles_nothing(tmp_path, make):
    backend = make()
    first = Steps(tmp_path, backend)
    first.begin()
    first.write(1, 2, 3, 4)
    assert first.end()
    first.cut(2)
    second = Steps(tmp_path, backend)
    second.begin()
    second.write(3, 4, 5, 6)
    assert second.end()
    assert [step for step, _ in backend.steps] == [1, 2, 3, 4, 5, 6]


def test_no_two_records_have_a_number_where_a_run_goes_on_with_fewer_evaluations(tmp_path):
    backend = KeepingBackend()
    first = Steps(tmp_path, backend)
    first.begin()
    for step in (1, 2, 3):
        first.write(step)
        first.write(step, evaluation=True)
    assert first.end()
    first.cut(2)
    second = Steps(tmp_path, backend)
    second.begin()
    second.write(2, 3, 4, 5)
    assert second.end()
    assert backend.steps[-3:] == [(3, True), (4, False), (5, False)]
    assert [number for _, number, _ in backend.rows] == list(range(8))


def test_what_a_killed_process_had_not_given_is_given_by_the_next(tmp_path):
    backend = KeepingBackend()
    first = Steps(tmp_path, backend)
    first.begin()
    first.write(1)
    assert first.end()
    with MetricsWriter(first.metrics) as writer:
        for step in (2, 3):
            writer.write({"step": step})
    second = Steps(tmp_path, backend)
    second.begin()
    second.write(4)
    assert second.end()
    assert [step for step, _ in backend.steps] == [1, 2, 3, 4]


def test_a_run_that_starts_again_from_its_beginning_gives_everything_again(tmp_path):
    backend = ListBackend()
    first = Steps(tmp_path, backend)
    first.begin()
    first.write(1, 2)
    assert first.end()
    first.metrics.unlink()
    second = Steps(tmp_path, backend)
    second.begin()
    second.write(1)
    assert second.end()
    assert [step for step, _ in backend.steps] == [1]


def test_a_line_that_is_not_whole_waits_and_one_that_is_no_record_is_left_out(tmp_path):
    backend = ListBackend()
    run = Steps(tmp_path, backend)
    run.metrics.write_text('{"step": 1}\nnoise\n{"reward/mean": 1}\n{"step": 2, "rew')
    run.follower.begin(Place(1))
    run.follower.write({"step": 2})
    wait_for(backend, 1)
    with run.metrics.open("a") as file:
        file.write('ard/mean": "nan"}\n')
    run.follower.write({"step": 2})
    assert run.end()
    assert backend.steps == [(1, False), (2, False)]
    assert backend.rows[1][1] == 3  # the line's number
    assert str(backend.rows[1][2]["reward/mean"]) == "nan"


def test_what_was_sent_is_a_file_that_another_process_reads(tmp_path):
    file = tmp_path / "logs" / "sent.json"
    sent = Sent.read(file)
    sent.save(Place(3, True))
    again = Sent.read(file)
    assert (again.last, again.run_id) == (Place(3, True), sent.run_id)
    assert json.loads(file.read_text())["last"] == {"step": 3, "is_evaluation": True}
    sent.cut(Place(5))
    assert not sent.is_cut
    sent.cut(Place(3))
    sent.cut(Place(2))
    sent.cut(Place(4))  # of a process that could give nothing between
    again = Sent.read(file)
    assert (again.last, again.is_cut, again.kept) == (Place(3, True), True, Place(2))
    file.write_text('{"last": ')
    assert Sent.read(file).last is None
    assert Place(3) < Place(3, True) < Place(4)


def wait_for(backend, num):
    """Until the backend has so many rows."""
    with backend.changed:
        assert backend.changed.wait_for(lambda: len(backend.rows) >= num, timeout=LIMIT_S)
