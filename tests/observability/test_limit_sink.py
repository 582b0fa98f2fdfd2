"""Shares of the machine's limits, against sums by hand."""

import logging
from dataclasses import replace
from typing import Any

import pytest

from rl.machine_limits import MachineLimits
from rl.observability.limit_sink import LimitSink, RunLimits
from rl.observability.metrics import Max, Mean
from rl.training.model_work import ModelWork
from tests.support.fakes import ListSink
from tests.support.loops import half_right, make_loop
from tests.support.simulated import SimulatedPolicy
from tests.support.virtual_time import run_in_virtual_time

WORK = ModelWork(parameters=1000, products=900, trained=900, attention=20, cached=10, read=1000)
MACHINE = MachineLimits(
    device="a CPU", flops_per_s=1e6, memory_bytes_per_s=1e5, host_bytes_per_s=1e5, file="/x/machine-1.json"
)
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


def test_each_part_is_what_it_needs_at_least_over_what_it_took():
    # 20 steps read the weights, 160 tokens a context of 15; which takes longer than the operations.
    read_s = 4 * (20 * 1000 + 160 * 15 * 10) / 1e5
    multiplied_s = (2 * 900 * (160 + 40) + 4 * 160 * 15 * 20) / 1e6
    assert read_s > multiplied_s
    trained = (200 * 6 * 900 + 12 * 200 * 8 * 20) / 1e6
    # To the store by two ranks, each a half, and to a generator; read and written.
    copied = 2 * 4 * 1000 / 1e5 * (1 / 2 + 1)
    assert shares(STEP) == {
        "limit/decode": pytest.approx(read_s / 5.0),
        "limit/train": pytest.approx(trained / 2 / 4.0),
        "limit/sync": pytest.approx(copied / 1.0),
        "limit/idle": 0.55,
    }


def test_decoding_is_held_against_its_operations_where_these_take_longer():
    fast_memory = replace(MACHINE, memory_bytes_per_s=1e9)
    limits = replace(LIMITS, generator=fast_memory, num_generator_ranks=2)
    multiplied_s = (2 * 900 * (160 + 40) + 4 * 160 * 15 * 20) / 1e6
    assert shares(STEP, limits)["limit/decode"] == pytest.approx(multiplied_s / 2 / 5.0)


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, 20),  # the longest completion
        ({"most_running": 4}, 40),  # 160 tokens, 4 at a time
        ({"waits_for_the_longest": False}, 10),
        (
            {"waits_for_the_longest": False, "num_replicas": 2, "num_generator_ranks": 2, "most_running": 8},
            10,
        ),
    ],
)
def test_weights_are_read_as_often_as_so_many_completions_at_once_ask_for(changes, steps):
    limits = replace(LIMITS, **changes)
    tokens = 160 / limits.num_replicas
    read_s = 4 * (steps * 1000 + tokens * 15 * 10) / 1e5
    assert shares(STEP, limits)["limit/decode"] == pytest.approx(read_s / 5.0)


def test_replicas_that_share_cores_are_held_against_those_once():
    apart, shared = (
        shares(STEP, replace(LIMITS, num_replicas=2, num_generator_ranks=ranks)) for ranks in (2, 1)
    )
    assert shared["limit/decode"] == pytest.approx(2 * apart["limit/decode"])


def test_replicas_copy_the_weights_at_once_each_all_of_them_and_a_gpu_sends_a_byte_once():
    copy_s = 2 * 4 * 1000 / 1e5
    for num_replicas, num_ranks, copies in ((3, 3, 1), (3, 6, 1 / 2), (3, 1, 3)):
        limits = replace(LIMITS, num_replicas=num_replicas, num_generator_ranks=num_ranks)
        assert shares(STEP, limits)["limit/sync"] == pytest.approx(copy_s * (1 / 2 + copies))
    gpu = replace(MACHINE, memory_bytes_per_s=1e9)
    assert shares(STEP, replace(LIMITS, trainer=gpu))["limit/sync"] == pytest.approx(copy_s / 2 * (1 / 2 + 1))


def test_devices_that_are_shared_are_idle_while_neither_has_anything_to_do():
    shared = replace(LIMITS, shares_devices=True)
    # Trained for 4 s, drawn for 3.5 s of 10.
    assert shares({**STEP, "time/generator_idle_s": 6.5}, shared)["limit/idle"] == pytest.approx(0.25)
    assert shares({**STEP, "time/generator_idle_s": 3.0}, shared)["limit/idle"] == 0.0


def test_a_sync_is_told_of_once():
    sink = ListSink()
    limited = LimitSink(limits=LIMITS, sinks=[sink])
    for version in (7, 7, 8):
        limited.write({**STEP, "sync/version": version})
    assert ["limit/sync" in record for record in sink.records] == [True, False, True]


@pytest.mark.parametrize(
    ("missing", "kept"),
    [
        ("perf/generated_tokens_per_s", {"limit/train", "limit/sync", "limit/idle"}),
        ("packing/context_mean", {"limit/decode", "limit/sync", "limit/idle"}),
        ("time/train_s", {"limit/decode", "limit/sync", "limit/idle"}),
    ],
)
def test_what_a_record_does_not_say_is_not_compared(missing, kept):
    assert set(shares({name: value for name, value in STEP.items() if name != missing})) == kept
    nothing = {**STEP, "perf/generated_tokens_per_s": Mean(0, 0.0), "packing/context_mean": Mean(0, 0)}
    assert set(shares(nothing)) == {"limit/sync", "limit/idle"}


def test_more_than_was_measured_counts_as_all_of_it_and_is_said_once(caplog):
    sink = ListSink()
    limited = LimitSink(limits=LIMITS, sinks=[sink])
    with caplog.at_level(logging.WARNING, logger="rl.observability.limit_sink"):
        for _ in range(2):
            limited.write({**STEP, "time/train_s": 0.125})
    assert [record["limit/train"] for record in sink.records] == [1.0, 1.0]
    (said,) = caplog.messages
    assert said == (
        "limit/train is 5.86, more than what was measured of a CPU, which was busy then: "
        "remove /x/machine-1.json to have it measured again"
    )


def test_evaluations_and_other_records_pass_as_they_are():
    sink = ListSink()
    LimitSink(limits=LIMITS, sinks=[sink, sink]).write({"step": 0, "eval/correct": 0.5})
    assert sink.records == [{"step": 0, "eval/correct": 0.5}] * 2


def test_a_loops_steps_are_compared_with_the_machine():
    """Of 1 s of generation, 1 s of training and 0.2 s of sync, in virtual time."""
    loop, sink = make_loop(SimulatedPolicy(reply=half_right), num_steps=2, num_prompts=2, num_samples=4)
    loop.sinks = [LimitSink(limits=LIMITS, sinks=loop.sinks)]
    run_in_virtual_time(loop.run())
    # Half of 8 replies are "[ANSWER] 10" and its end, half "no", after "<12 34>".
    tokens, attended = 4 * (12 + 3), 4 * (12 * 7 + 66 + 3 * 7 + 3)
    read_s = 4 * (12 * 1000 + attended * 10) / 1e5
    assert read_s > (2 * 900 * (tokens + 2 * 7) + 4 * attended * 20) / 1e6
    for record in sink.records:
        limits = {name: share for name, share in record.items() if name.startswith("limit/")}
        assert limits == {
            "limit/decode": pytest.approx(read_s / 1.0),
            "limit/sync": pytest.approx(2 * 4 * 1000 / 1e5 * (1 / 2 + 1) / 0.2),
            "limit/idle": pytest.approx(1.2 / 2.2),
        }
