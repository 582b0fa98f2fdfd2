"""The machine and packages of a run, its measured limits, and the shares of them that a step
reaches.
"""

import itertools
import socket
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl.models.model_cost import ModelWork
from rl.observability.events import describe_environment, write_environment
from rl.observability.machine import (
    MATRICES,
    LimitSink,
    MachineLimits,
    RunLimits,
    measure_limits,
)
from rl.observability.metrics import Max, Mean
from rl.reporting.data import read_optional
from rl.utils.processes import use_threads
from tests.support.fakes import ListSink

CPU = torch.device("cpu")
MACHINE = MachineLimits(flops_per_s=1e6, memory_bytes_per_s=1e5, host_bytes_per_s=1e5)


def test_machine_is_described_without_secrets(tmp_path, monkeypatch):
    for number in range(2):
        gpu = tmp_path / f"0000:0{number}:00.0"
        gpu.mkdir()
        (gpu / "information").write_text(f"Model: \t\t Some GPU {number}\nIRQ:   \t\t 16\n")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SOME_API_KEY", "secret")
    told = describe_environment(gpus=tmp_path)
    assert told["host"] == socket.gethostname()
    assert told["memory_gib"] > 0
    assert told["gpus"] == ["Some GPU 0", "Some GPU 1"]
    assert told["packages"]["torch"] == metadata.version("torch")
    assert told["variables"]["NCCL_DEBUG"] == "INFO"
    assert "SOME_API_KEY" not in told["variables"]


def test_environment_is_read_back(tmp_path, caplog):
    write_environment(tmp_path / "environment.json")
    assert read_optional(tmp_path / "environment.json") == describe_environment()
    (tmp_path / "cut.json").write_text('{"host": "a')
    assert read_optional(tmp_path / "cut.json") == {}
    write_environment(tmp_path / "gone" / "environment.json")
    assert "environment.json was not written: No such file" in caplog.text


def test_measured_rates_are_those_of_the_fastest_repetition_and_change_no_state(monkeypatch):
    # On this clock repetitions take 1/16 and 1/32 seconds by turns, and an hour passes between two
    # of them.
    times_s = itertools.accumulate(itertools.cycle([3600, 1 / 16, 3600, 1 / 32]))
    clock = SimpleNamespace(perf_counter=lambda: next(times_s))
    monkeypatch.setattr("rl.observability.machine.time", clock)
    use_threads(1)
    random_state = torch.get_rng_state()
    limits = measure_limits(dtype="float32", num_bytes=3_000_000, device=CPU)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.get_num_threads() == 1
    assert limits.flops_per_s == 2 * max(MATRICES["cpu"]) ** 3 * 32
    # The bytes are read and written.
    assert limits.memory_bytes_per_s == limits.host_bytes_per_s == 3_000_000 * 32


# Shares of a step, compared with sums by hand

WORK = ModelWork(parameters=1000, products=900, trained=900, attention=20, cached=10, read=1000)
LIMITS = RunLimits(
    trainer=MACHINE,
    num_trainer_ranks=2,
    generator=MACHINE,
    num_generator_ranks=1,
    num_replicas=1,
    shares_devices=False,
    trained=WORK,
    sampled=WORK,
    itemsize=4,
    num_samples=4,
    most_running=16,
    waits_for_the_longest=True,
)
STEP: dict[str, Any] = {
    "step": 1,
    "time/step_s": 10.0,
    "time/train_s": 4.0,
    "time/push_s": 0.25,
    "time/pull_s": 0.75,
    "time/trainer_idle_s": 6.0,
    "time/generator_idle_s": 5.0,
    "time/reward_idle_s": 9.5,
    "sync/version": 7,
    "perf/generated_tokens_per_s": Mean(160, 5.0),
    "prompt/tokens_mean": Mean(16 * 10, 16),
    "completion/tokens_max": Max(20),
    "completion/context_mean": Mean(160 * 15, 160),
    "packing/context_mean": Mean(200 * 8, 200),
}


def shares(step, limits=LIMITS):
    sink = ListSink()
    LimitSink(limits=limits, sinks=[sink]).write(step)
    return {name: value for name, value in sink.records[0].items() if name.startswith("limit/")}


def test_each_share_is_the_least_time_over_the_actual_time():
    # 20 steps read the weights and 160 tokens a context of 15 each, which takes longer than the
    # operations.
    read_s = 4 * (20 * 1000 + 160 * 15 * 10) / 1e5
    multiplied_s = (2 * 900 * (160 + 40) + 4 * 160 * 15 * 20) / 1e6
    assert read_s > multiplied_s
    trained = (200 * 6 * 900 + 12 * 200 * 8 * 20) / 1e6
    # Each of two ranks copies a half to the store; a generator copies all of it. Copies read and
    # write.
    copied = 2 * 4 * 1000 / 1e5 * (1 / 2 + 1)
    assert shares(STEP) == {
        "limit/decode": pytest.approx(read_s / 5.0),
        "limit/train": pytest.approx(trained / 2 / 4.0),
        "limit/sync": pytest.approx(copied / 1.0),
        "limit/idle": 0.55,
    }


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, 20),  # the longest completion
        ({"most_running": 4}, 40),  # 160 tokens, 4 at a time
        ({"waits_for_the_longest": False}, 10),
        ({"waits_for_the_longest": False, "num_replicas": 2, "num_generator_ranks": 2}, 5),
    ],
)
def test_weights_are_read_once_for_each_decoding_step(changes, steps):
    limits = replace(LIMITS, **changes)
    tokens = 160 / limits.num_replicas
    read_s = 4 * (steps * 1000 + tokens * 15 * 10) / 1e5
    assert shares(STEP, limits)["limit/decode"] == pytest.approx(read_s / 5.0)


def test_each_replica_copies_all_weights():
    copy_s = 2 * 4 * 1000 / 1e5
    for num_replicas, num_ranks, copies in ((3, 3, 1), (3, 6, 1 / 2), (3, 1, 3)):
        limits = replace(LIMITS, num_replicas=num_replicas, num_generator_ranks=num_ranks)
        assert shares(STEP, limits)["limit/sync"] == pytest.approx(copy_s * (1 / 2 + copies))
    gpu = replace(MACHINE, memory_bytes_per_s=1e9)
    assert shares(STEP, replace(LIMITS, trainer=gpu))["limit/sync"] == pytest.approx(
        copy_s / 2 * (1 / 2 + 1)
    )


def test_sync_is_reported_once():
    sink = ListSink()
    limited = LimitSink(limits=LIMITS, sinks=[sink])
    for version in (7, 7, 8):
        limited.write({**STEP, "sync/version": version})
    assert ["limit/sync" in record for record in sink.records] == [True, False, True]


def test_missing_metrics_have_no_share_and_none_is_above_1():
    def without(*names):
        return set(shares({name: value for name, value in STEP.items() if name not in names}))

    known = {"limit/decode", "limit/train", "limit/sync", "limit/idle"}
    assert without("perf/generated_tokens_per_s") == known - {"limit/decode"}
    assert without("packing/context_mean") == without("time/train_s") == known - {"limit/train"}
    nothing = {
        **STEP,
        "perf/generated_tokens_per_s": Mean(0, 0.0),
        "packing/context_mean": Mean(0, 0),
    }
    assert set(shares(nothing)) == {"limit/sync", "limit/idle"}
    assert shares({**STEP, "time/train_s": 0.125})["limit/train"] == 1.0
