"""Bottleneck of a run, for records whose bottleneck is known."""

import inspect
import re
from typing import Any

import pytest

from configs.sum_digits import tiny
from rl.config.json import to_dict
from rl.observability import machine as machine_module
from rl.observability.machine import Bottleneck, compute_typical_step, find_bottleneck


def step(**parts):
    """Return seconds of each part of a step in which one role idles while the other works."""
    laps = {"generate": 0.0, "score": 0.0, "train": 0.0, "publish": 0.0} | parts
    step_s = sum(laps.values())
    return {f"time/{name}_s": lap for name, lap in laps.items()} | {"time/step_s": step_s}


def found(record, config=None):
    result = find_bottleneck(record, config)
    assert result is not None
    return result


ASYNC = {
    "loop": {"max_off_policy_steps": 1, "publish_every": 1, "groups_per_batch": 32, "group_size": 8}
}
OVERLAP = "--loop.max_off_policy_steps 1"


def test_overlap_is_advised_when_generation_and_training_alternate():
    record = step(generate=4.5, score=0.5, train=4.0, publish=1.0) | {"limit/idle": 0.52}
    assert find_bottleneck(record) == Bottleneck(
        sentence=(
            "Generation (50% of a step) and training (50%) take turns, and devices are idle for "
            "52% of it: at the same time, a step would take as long as the longer of the two"
        ),
        setting=OVERLAP,
    )
    for more, config in (
        ({"staleness/max": 1.0}, None),
        ({}, ASYNC),
        ({}, {"launch": {"share_gpus": True}}),  # roles on one device cannot overlap
    ):
        assert found(record | more, config).setting != OVERLAP


def test_overlap_on_one_cpu_halves_the_threads():
    record = step(generate=5.0, train=4.0)
    config = to_dict(tiny())
    assert "each with half its threads" in found(record, config).sentence
    assert (
        found(record, config).setting
        == f"{OVERLAP} --trainer.num_threads 1 --generator.num_threads 1"
    )
    # A trainer that computes for much longer needs all of them when generation is over.
    long = step(generate=2.5, train=7.0)
    assert "generation with half its threads" in found(long, config).sentence
    assert found(long, config).setting == f"{OVERLAP} --generator.num_threads 1"
    config["generator"]["dtype"] = "bfloat16"  # on GPUs
    assert found(record, config).setting == OVERLAP


def test_largest_part_is_named_with_its_share_of_the_limit():
    record = step(generate=9.0, train=1.0) | {"limit/decode": 0.084, "limit/train": 0.7}
    says = "Generation takes 90% of a step and reaches 8% of what the machine can do:"
    assert found(record, ASYNC).sentence.startswith(says)


def test_every_setting_of_the_advice_exists():
    named = re.findall(r'"(?:--)?([a-z_]+(?:\.[a-z_]+)+)', inspect.getsource(machine_module))
    assert {"loop.max_off_policy_steps", "loop.groups_per_batch", "weights.num_threads"} <= set(
        named
    )
    config = to_dict(tiny())
    for path in named:
        node = config
        for name in path.split("."):
            assert name in node, path
            node = node[name]


GENERATOR: dict[str, Any] = {"max_num_seqs": 256, "num_replicas": 1}
TRAINER = {
    "trainer": {
        "num_procs": 4,
        "training": {"max_tokens_per_microbatch": 4096},
        "compile": {"enable": False},
    },
    "generator": {"dtype": "bfloat16"},
}
MANY = {"packing/num_micro_batches": 8.0}


@pytest.mark.parametrize(
    ("record", "config", "expected"),
    [
        (
            step(generate=9.0),
            {"generator": GENERATOR | {"max_num_seqs": 64}},
            "--generator.max_num_seqs 256",
        ),
        (
            step(generate=9.0) | {"limit/decode": 0.8},
            {"generator": GENERATOR},
            "--generator.num_replicas 2",
        ),
        (step(generate=9.0), {}, "--generator.num_replicas"),
        (step(train=9.0) | {"limit/train": 0.6}, TRAINER, "--trainer.num_procs 8"),
        (step(train=9.0) | MANY, TRAINER, "--trainer.training.max_tokens_per_microbatch 8192"),
        (step(train=9.0), TRAINER, "--trainer.compile.enable True"),
        (step(train=9.0), {}, "--loop.groups_per_batch"),
        (step(publish=9.0), {"weights": {"num_threads": 2}}, "--weights.num_threads 4"),
        (step(publish=9.0), {"loop": {}}, OVERLAP),
        (step(score=9.0), {"reward": {"num_procs": 2}}, "--reward.num_procs 4"),
    ],
)
def test_advice_depends_on_the_record_and_the_config(record, config, expected):
    assert found(record, ASYNC | config).setting == expected


def test_typical_step_is_the_median_without_first_steps():
    slow_start = [step(train=100.0) | {"step": i} for i in (1, 2)]
    usual = [
        step(train=second) | {"step": 3, "loss/mean": float("nan")} for second in (1.0, 2.0, 9.0)
    ]
    record = compute_typical_step([{"step": 0, "eval/correct": 0.5}, *slow_start, *usual])
    assert (record["time/train_s"], record["time/step_s"]) == (2.0, 2.0)
    assert "loss/mean" not in record
    assert compute_typical_step(slow_start)["time/train_s"] == 100.0
    assert compute_typical_step([]) == {}
    assert find_bottleneck({}) is None
