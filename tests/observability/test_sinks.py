"""Sinks of a run: config, threads, console and TensorBoard. test_clients.py has the clients of W&B
and trackio."""

import asyncio
import io
import logging
import sys
import threading
import time
from collections.abc import Mapping

import pytest

from actors.preflight.plan import make_plan
from configs.sum_digits import tiny
from rl.config.tree import rebuild
from rl.observability.loggers import MetricsLogger
from rl.observability.metrics import Mean
from rl.observability.recorder import RecorderConfig
from rl.observability.sinks import QueuedLogger, SinksConfig, open_sinks
from rl.observability.spans import TimelineConfig
from rl.observability.watcher import FindingsWatcher

# Config


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_missing_package_is_refused_before_the_start(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)  # simulates a missing package
    config = tiny()
    getattr(config.sinks, name).enable = True
    with pytest.raises(
        ValueError, match=f"sinks.{name}.enable=True: the package {name} is not"
    ) as error:
        make_plan(config)
    assert "python3 tools/setup_env.py sinks" in str(error.value)


def test_missing_client_of_prometheus_is_refused_before_the_start(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)  # simulates a missing package
    config = tiny()
    config.sinks.prometheus.port = 9400
    with pytest.raises(ValueError, match=r"sinks.prometheus.port=9400: the package prometheus_cli"):
        make_plan(config)


@pytest.mark.parametrize(
    ("config", "path", "value", "message"),
    [
        (SinksConfig(), "console.num_rows", 0, "console.num_rows=0: must be at least 1"),
        (SinksConfig(), "close_s", float("inf"), "close_s=inf: must be above 0 and below inf"),
        (
            SinksConfig(),
            "wandb.project",
            "a/b",
            r"wandb.project='a/b': must be a name without / \\ # \? % or :",
        ),
        (SinksConfig(), "trackio.project", "", "trackio.project='': must be a name"),
        (SinksConfig(), "console.style", "loud", "console.style='loud': must be 'auto'"),
        (RecorderConfig(), "num_groups", -1, "num_groups=-1: must be at least 0"),
        (RecorderConfig(), "num_eval_problems", -1, "num_eval_problems=-1: must be at least 0"),
        (
            RecorderConfig(),
            "max_megabytes",
            0.0,
            "max_megabytes=0.0: must be above 0 and below inf",
        ),
        (
            TimelineConfig(),
            "max_megabytes",
            0.05,
            r"max_megabytes=0.05: must be at least 0.1 and below inf",
        ),
        (
            TimelineConfig(),
            "max_megabytes",
            float("nan"),
            "max_megabytes=nan: must be at least 0.1",
        ),
    ],
)
def test_invalid_value_is_refused(config, path, value, message):
    with pytest.raises(ValueError, match=message):
        rebuild(config, {path: value})


# Threads


class FakeLogger(MetricsLogger):
    """Logger that records its calls; the first write of each step in `fails_at` raises."""

    name = "fake"

    def __init__(self, *, fails_at=(), blocks=None):
        self.calls = []
        self.fails_at = set(fails_at)
        self.blocks = blocks

    def open(self, last_step):
        self.calls.append(("open", last_step))

    def write(self, step, values, *, row):
        if self.blocks is not None:
            self.blocks.wait(60)
        if step in self.fails_at:
            self.fails_at.remove(step)
            raise RuntimeError("no connection")
        self.calls.append((step, dict(values), row))

    def close(self, *, failed):
        self.calls.append(("close", failed))


def run_thread(fake, records, *, failed=False):
    thread = QueuedLogger(fake)
    thread.begin(None)
    for record in records:
        thread.write(record)
    thread.end(failed=failed)
    thread.join(20.0)
    return thread


def test_each_record_reaches_the_logger_reduced_and_in_order():
    fake = FakeLogger()
    records = [
        {"step": 1, "reward/mean": Mean(1.0, 4), "empty": Mean(0.0, 0)},
        {"step": 1, "eval/correct": 0.5},
    ]
    assert run_thread(fake, records, failed=True).num_lost == 0
    assert fake.calls == [
        ("open", None), (1, {"reward/mean": 0.25}, 2), (1, {"eval/correct": 0.5}, 3),
        ("close", True),
    ]  # fmt: skip


def test_failed_logger_is_reopened_after_its_last_record(caplog):
    fake = FakeLogger(fails_at=[2, 3])
    thread = run_thread(fake, [{"step": step, "x": 1.0} for step in range(1, 5)])
    assert [call for call in fake.calls if call[0] != "close"] == [
        ("open", None), (1, {"x": 1.0}, 2), ("open", 1), ("open", 1), (4, {"x": 1.0}, 8),
    ]  # fmt: skip
    assert thread.num_lost == 2
    first, last = (record.message for record in caplog.records if record.levelno == logging.WARNING)
    assert first.startswith("fake failed: RuntimeError: no connection; training goes on")
    assert last == "fake has not taken everything: it lacks 2 records, which are in metrics.jsonl"


def test_hanging_logger_blocks_nothing_and_is_a_warning(caplog):
    release = threading.Event()
    thread = QueuedLogger(FakeLogger(blocks=release), max_queued=3)
    thread.begin(None)
    for step in range(8):
        thread.write({"step": step})
    thread.end(failed=False)
    thread.join(0.0)
    first, last = (record.message for record in caplog.records if record.levelno == logging.WARNING)
    assert first.startswith("fake hangs or is too slow; training goes on")
    assert (
        last
        == "fake was not done when the run ended: it lacks 8 records, which are in metrics.jsonl"
    )
    release.set()


# All sinks of a run


def test_logger_that_hangs_at_every_record_delays_no_step(tmp_path):
    release = threading.Event()
    config = SinksConfig(close_s=0.05)

    async def run():
        opened = open_sinks(
            config, folder=tmp_path, title="try-1", num_steps=9, stream=io.StringIO()
        )
        opened.loggers = [QueuedLogger(FakeLogger(blocks=release))]
        async with opened as sinks:
            with sinks.show_attempt():
                started_s = time.monotonic()
                for step in range(1, 10):
                    sinks.write({"step": step, "reward/mean": 0.5})
                took_s = time.monotonic() - started_s
        return took_s

    assert asyncio.run(run()) < 3.0  # a record that is written in the loop's thread waits for ever
    release.set()


def test_watcher_looks_as_often_as_its_share_of_the_time_allows():
    now_s = 0.0
    looks: list[float] = []
    shown: list[Mapping[str, str]] = []

    def find_now():
        nonlocal now_s
        looks.append(now_s)
        now_s += 1 / 128
        return {} if len(looks) < 2 else {"slow_reward": "slow"}

    watcher = FindingsWatcher(follow=lambda: find_now, show=shown.append, clock=lambda: now_s)
    watcher.open(None)
    for step in range(1, 21):
        watcher.write(step, {"reward/mean": 0.5}, row=2 * step)
        now_s += 0.5
    # The first look is not counted; the others take half a percent of the 1.6 s until the next.
    assert looks == pytest.approx([0.0, 0.508, 2.516, 4.523, 6.531, 8.539], abs=1e-3)
    assert shown == [{"slow_reward": "slow"}]
    watcher.close(failed=True)  # of what came after the last look
    watcher.close(failed=True)
    assert len(looks) == 7
    watcher.open(8)
    watcher.write(9, {"reward/mean": 0.5}, row=18)
    assert len(looks) == 8


def test_findings_of_a_run_reach_its_console(tmp_path):
    stream = io.StringIO()

    async def run():
        async with open_sinks(
            SinksConfig(),
            folder=tmp_path,
            title="try-1",
            num_steps=9,
            stream=stream,
            follow=lambda: lambda: {"slow_reward": "The reward is slow."},
        ) as sinks:
            with sinks.show_attempt():
                sinks.write({"step": 1, "reward/mean": 0.5})

    asyncio.run(run())
    assert stream.getvalue().splitlines()[-1] == "finding: The reward is slow."


def test_rule_that_fails_stops_nothing(tmp_path, caplog):
    def fail():
        raise KeyError("reward/std")

    async def run():
        async with open_sinks(
            SinksConfig(),
            folder=tmp_path,
            title="try-1",
            num_steps=9,
            stream=io.StringIO(),
            follow=lambda: fail,
        ) as sinks:
            with sinks.show_attempt():
                for step in (1, 2, 3):
                    sinks.write({"step": step, "reward/mean": 0.5})

    asyncio.run(run())
    assert "findings failed: KeyError: 'reward/std'; training goes on" in caplog.text


class ClosedTerminal(io.StringIO):
    def write(self, text):
        raise OSError(5, "Input/output error")


def test_closed_terminal_is_one_warning_and_stops_nothing(tmp_path, caplog):
    async def run():
        config, stream = SinksConfig(), ClosedTerminal()
        opened = open_sinks(config, folder=tmp_path, title="try-1", num_steps=9, stream=stream)
        async with opened as sinks:
            with sinks.show_attempt():
                for step in (1, 2, 3):
                    sinks.write({"step": step, "reward/mean": step / 2})

    asyncio.run(run())
    (record,) = caplog.records
    assert record.getMessage() == "the console was not written: Input/output error; the run goes on"
