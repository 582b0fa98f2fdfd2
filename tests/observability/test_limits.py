"""What holds a run up, from records of which that is known."""

import inspect
import re

import pytest

from configs.sum_digits import tiny
from rl.config.serialize import to_dict
from rl.observability import limits
from rl.observability.limits import Bottleneck, bottleneck, typical

ASYNC = {"loop": {"max_policy_age": 1, "publish_every": 1, "num_prompts": 32, "num_samples": 8}}


def step(**parts):
    """Seconds of each part, of a step in which one is idle while the other works."""
    laps = {"generate": 0.0, "score": 0.0, "train": 0.0, "publish": 0.0} | parts
    step_s = sum(laps.values())
    return {f"time/{name}_s": lap for name, lap in laps.items()} | {"time/step_s": step_s}


def setting(record, config=None):
    found = bottleneck(record, config)
    assert found is not None
    return found.setting


def with_values(config, **values):
    """A copy with values at dotted paths, whose points are written __."""
    copy = {name: dict(node) for name, node in config.items()}
    for path, value in values.items():
        *nodes, leaf = path.split("__")
        node = copy
        for name in nodes:
            node = node.setdefault(name, {})
        node[leaf] = value
    return copy


def test_two_sides_that_take_turns_are_told_to_overlap():
    record = step(generate=4.5, score=0.5, train=4.0, publish=1.0) | {"limit/idle": 0.52}
    assert bottleneck(record) == Bottleneck(
        sentence=(
            "Generation (50% of a step) and training (50%) take turns, and devices are idle for 52% of it: "
            "at the same time, a step would take as long as the longer of the two"
        ),
        setting="--loop.max_policy_age 1",
    )
    assert setting(record, {"loop": {"max_policy_age": 0}}) == "--loop.max_policy_age 1"


def test_on_one_cpu_those_that_overlap_share_its_threads():
    record = step(generate=5.0, train=4.0)
    config = to_dict(tiny())
    assert (config["trainer"]["num_threads"], config["generator"]["num_threads"]) == (2, 2)
    found = bottleneck(record, config)
    assert found is not None
    assert "each with half its threads" in found.sentence
    assert found.setting == "--loop.max_policy_age 1 --trainer.num_threads 1 --generator.num_threads 1"
    config["trainer"]["num_threads"] = 1
    assert setting(record, config) == "--loop.max_policy_age 1 --generator.num_threads 1"
    config["generator"]["num_threads"] = 1
    assert setting(record, config) == "--loop.max_policy_age 1"
    on_gpus = to_dict(tiny())
    on_gpus["generator"]["dtype"] = "bfloat16"
    assert setting(record, on_gpus) == "--loop.max_policy_age 1"


@pytest.mark.parametrize(
    ("more", "config"),
    [({"age/max": 1.0}, None), ({}, ASYNC), ({}, {"launch": {"share_gpus": True}})],
    ids=["by the record", "by the config", "who shares a device cannot"],
)
def test_those_that_overlap_already_or_cannot_are_not_told_so(more, config):
    record = step(generate=4.5, train=4.0) | more
    assert setting(record, config) != "--loop.max_policy_age 1"


def test_a_part_that_takes_most_is_named_with_its_share_of_the_limit():
    record = step(generate=9.0, train=1.0) | {"limit/decode": 0.084, "limit/train": 0.7}
    found = bottleneck(record, ASYNC)
    assert found is not None
    assert found.sentence.startswith(
        "Generation takes 90% of a step and reaches 8% of what the machine can do:"
    )
    alone = bottleneck(step(generate=9.0, train=1.0), ASYNC)
    assert alone is not None
    assert alone.sentence.startswith("Generation takes 90% of a step: ")


@pytest.mark.parametrize(
    "record",
    [
        step(generate=9.0, train=1.0) | {"completion/tokens_max": 700.0, "completion/tokens_mean": 200.0},
        step(generate=1.0, publish=9.0),
        step(generate=5.0, train=5.0),
    ],
)
def test_who_shares_a_device_is_never_told_to_overlap(record):
    shared = with_values(ASYNC, loop__max_policy_age=0, launch__share_gpus=True)
    assert setting(record, with_values(shared, launch__share_gpus=False)) == "--loop.max_policy_age 1"
    assert "max_policy_age" not in setting(record, shared)


def test_every_setting_that_is_asked_for_or_named_is_one_of_a_run():
    named = re.findall(r'"(?:--)?([a-z_]+(?:\.[a-z_]+)+)', inspect.getsource(limits))
    assert {"loop.max_policy_age", "generator.max_num_seqs", "weights.num_threads"} <= set(named)
    config = to_dict(tiny())
    for path in named:
        node = config
        for name in path.split("."):
            assert name in node, path
            node = node[name]


GENERATOR = with_values(ASYNC, generator__max_num_seqs=256, generator__num_replicas=1)


@pytest.mark.parametrize(
    ("config", "more", "expected"),
    [
        (with_values(GENERATOR, generator__max_num_seqs=64), {}, "--generator.max_num_seqs 256"),
        (
            with_values(GENERATOR, generator__max_num_seqs=64, generator__num_replicas=2),
            {},
            "--generator.max_num_seqs 128",
        ),
        (
            with_values(GENERATOR, generator__dtype="bfloat16", generator__enforce_eager=True),
            {},
            "--generator.enforce_eager False",
        ),
        (
            with_values(GENERATOR, generator__dtype="float32"),
            {"limit/decode": 0.8},
            "--generator.dtype bfloat16",
        ),
        (
            with_values(GENERATOR, generator__dtype="float32", batch_invariant=True),
            {"limit/decode": 0.8},
            "--generator.num_replicas 2",
        ),
        (GENERATOR, {"limit/decode": 0.8}, "--generator.num_replicas 2"),
        (GENERATOR, {"limit/decode": 0.1}, "--loop.num_prompts"),
        (
            with_values(GENERATOR, loop__max_policy_age=0),
            {"limit/decode": 0.1, "completion/tokens_max": 700.0, "completion/tokens_mean": 200.0},
            "--loop.max_policy_age 1",
        ),
        (None, {}, "--generator.num_replicas"),
    ],
)
def test_generation_is_moved_by_what_its_config_leaves_open(config, more, expected):
    assert setting(step(generate=9.0, train=1.0) | more, config) == expected


TRAINER = with_values(
    ASYNC,
    trainer__num_procs=4,
    trainer__training={"max_tokens_per_microbatch": 4096, "param_dtype": "bfloat16"},
    trainer__activation_checkpoint={"mode": "none"},
    trainer__compile={"enable": False},
    generator__dtype="bfloat16",
)


@pytest.mark.parametrize(
    ("config", "more", "expected"),
    [
        (
            TRAINER,
            {"packing/num_micro_batches": 8.0, "packing/fill": 0.5},
            "--trainer.training.max_tokens_per_microbatch 8192",
        ),
        (
            with_values(TRAINER, trainer__training={"param_dtype": "float32"}),
            {},
            "--trainer.training.param_dtype bfloat16",
        ),
        (
            with_values(TRAINER, trainer__activation_checkpoint={"mode": "full"}),
            {},
            "--trainer.activation_checkpoint.mode none",
        ),
        (TRAINER, {}, "--trainer.compile.enable True"),
        (with_values(TRAINER, generator__dtype="float32"), {"limit/train": 0.6}, "--trainer.num_procs 8"),
        (with_values(TRAINER, generator__dtype="float32"), {"limit/train": 0.1}, "--loop.num_prompts"),
    ],
)
def test_training_is_moved_by_what_its_config_leaves_open(config, more, expected):
    assert setting(step(generate=1.0, train=9.0) | more, config) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, "--loop.max_policy_age 1"),
        (ASYNC, "--loop.publish_every 2"),
        (with_values(ASYNC, loop__publish_every=2, weights__num_threads=2), "--weights.num_threads 4"),
    ],
)
def test_a_sync_that_takes_most_is_hidden_then_rarer_then_faster(config, expected):
    assert setting(step(generate=1.0, publish=9.0), config) == expected


def test_slow_scores_ask_for_more_processes():
    assert (
        setting(step(score=9.0, train=1.0), with_values(ASYNC, reward__num_procs=2)) == "--reward.num_procs 4"
    )


@pytest.mark.parametrize("record", [{}, {"eval/correct": 0.5}, {"time/step_s": 0.0}, {"time/step_s": 1.0}])
def test_a_record_that_does_not_say_where_its_time_went_has_no_bottleneck(record):
    assert bottleneck(record) is None


def test_a_typical_step_is_the_median_without_evaluations_and_the_first_steps():
    slow_start = [step(train=100.0) | {"step": i} for i in (1, 2)]
    usual = [step(train=second) | {"step": 3} for second in (1.0, 2.0, 9.0)]
    record = typical([{"step": 0, "eval/correct": 0.5}, *slow_start, *usual])
    assert (record["time/train_s"], record["time/step_s"]) == (2.0, 2.0)
    assert typical(slow_start)["time/train_s"] == 100.0
    assert typical([]) == {}
    gone = typical([step(train=1.0) | {"loss/mean": float("nan")}])
    assert "loss/mean" not in gone
