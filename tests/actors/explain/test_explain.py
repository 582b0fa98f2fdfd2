"""Explanations of a run that has not started."""

import json
from typing import Any

import psutil
import pytest

from actors.explain.explain import as_text, explain, find_parts, idle_beside_others, size
from configs.sum_digits import tiny
from rl.config.cli import main
from rl.config.effect import idle_options
from rl.config.json import write_json
from rl.config.registry import ResolvedRun
from rl.config.tree import rebuild
from tests.support.checkpoints import save, truncate
from tests.support.explained import LAPTOP, explained


def start(*options, module="sum_digits", config="tiny"):
    return main(list(options), default_module=module, default_config=config, prog="test")


def changed(base: Any, **edits: object) -> Any:
    """Edit a config; `__` in a keyword stands for a dot."""
    return rebuild(base, {path.replace("__", "."): value for path, value in edits.items()})


def test_explaining_neither_starts_nor_writes_anything(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    children = set(psutil.Process().children())
    assert start("--explain", "json", "--loop.num_steps", "7") == 0
    assert set(psutil.Process().children()) == children
    assert list(tmp_path.iterdir()) == []
    found = json.loads(capsys.readouterr().out)
    assert (found["run"]["num_steps"], found["step"]["samples"]) == (7, 256)
    assert found["changes"] == {"loop.num_steps": {"value": 7, "registry": 80, "source": "command line"}}
    assert found["values"]["trainer.optimizer.betas"] == [0.9, 0.95]
    assert found["memory"]["trainer"]["parameters_bytes"] == 4 * 779_328


def test_resumed_run_names_its_last_step_and_the_source_of_its_changes(tmp_path):
    folder = tmp_path / "mine"
    for step in (20, 40):
        save(folder / "checkpoints", step)
    (folder / "status.json").write_text('{"status": "running"}')
    config = changed(tiny(), name="elsewhere", trainer__optimizer__lr=1e-3, warmup=None)
    file = folder / "config.json"
    write_json(ResolvedRun(module="sum_digits", function="tiny", config=config), file)
    found = explained("--resume", str(folder), "--loop.num_steps", "100")
    assert (found["run"]["done_steps"], found["run"]["num_steps"]) == (40, 100)
    sources = {path: change["source"] for path, change in found["changes"].items()}
    assert sources.pop("loop.num_steps") == "command line"
    assert {"name", "dump_folder", "trainer.optimizer.lr", "warmup.num_steps"} < set(sources)
    assert set(sources.values()) == {str(file)}
    assert {path.name for path in folder.iterdir()} == {"checkpoints", "config.json", "status.json"}


def test_32b_config_on_a_laptop_is_laid_out_on_assumed_gpus():
    found = explained("--config", "qwen3_32b")
    assert found["devices"] == "20 GPUs of 80 GB: this machine has 0"
    trainer, generator = found["layout"]["trainer"], found["layout"]["generator"]
    assert (trainer["gpus"], trainer["mesh"]) == ((*range(16),), {"dp_shard": 4, "tp": 4})
    assert (generator["gpus"], generator["mesh"]) == ((16, 17, 18, 19), {"tp": 4})
    # 32,762,123,264 parameters: in float32 over 16 ranks, and in bfloat16 over 4.
    ranks = found["memory"]["trainer"]
    assert ranks["parameters_bytes"] == 4 * 32_762_123_264 // 16
    assert ranks["optimizer_bytes"] == 2 * ranks["gradients_bytes"]
    assert ranks["fits"]
    assert found["publish"]["pushed_bytes"] == 2 * 32_762_123_264
    assert found["publish"]["pulled_by_rank_bytes"] == pytest.approx(2 * 32_762_123_264 / 4, rel=1e-4)
    assert found["options"]["refused"] == []
    (missing,) = found["options"]["refused_here"]
    assert missing.startswith("hf_assets_path='assets/Qwen3-32B'")
    step = found["step"]
    assert step["trained_tokens_most"] == 256 * 1023
    assert (step["micro_batches_of_rank_fewest"], step["micro_batches_of_rank_most"]) == (1, 16)
    assert found["run"]["eval_problems"] == {"held_out": 256}


@pytest.mark.medium
@pytest.mark.parametrize(
    "name",
    [
        "gsm8k.math_qwen3_1_7b", "sum_digits.tiny_fsdp2_tp2", "sum_digits.tiny_moe", "verifiers_env.qwen3_1_7b",
    ],
)  # fmt: skip
def test_shipped_config_is_explained_on_a_laptop_and_can_run_somewhere(name):
    module, function = name.split(".")
    found = explained("--module", module, "--config", function)
    assert found["options"]["refused"] == []
    # Tiny configs need no files.
    assert found["options"]["refused_here"] == [] or not function.startswith("tiny")
    assert found["memory"]["trainer"]["fits"]
    assert found["memory"]["generator"]["fits"]
    assert ("GPU" in found["devices"]) == (found["memory"]["available_bytes"] != LAPTOP.memory_bytes)
    assert f"{name}\n" in as_text(found)


def test_all_refusals_are_printed_and_a_run_stops_at_the_first(capsys):
    options = [
        "--trainer.num_procs", "3", "--trainer.parallelism.tensor_parallel_degree", "3",
        "--generator.max_model_len", "4096", "--loop.kl_reward.coef", "0.5",
    ]  # fmt: skip
    assert start("--explain", *options) == 2
    captured = capsys.readouterr()
    faults = [line.removeprefix("error: ") for line in captured.err.splitlines()]
    for message in (
        "trainer.parallelism.tensor_parallel_degree=3 does not divide num_kv_heads=4",
        "generator.max_model_len=4096 is more than the model's max_positions=1024",
        "trainer.training.max_tokens_per_microbatch=2048 is less than generator.max_model_len=4096",
        "loop.kl_reward.coef=0.5 needs the reference policy",
    ):
        assert sum(fault.startswith(message) for fault in faults) == 1, message
    assert start(*options) == 2
    assert capsys.readouterr().err == f"error: {faults[0]}\n"
    # Values that do not depend on the refused options are still shown.
    assert "20,480" in captured.out


def test_damaged_checkpoint_and_load_errors_are_named_and_left_in_place(tmp_path):
    folder = tmp_path / "mine"
    truncate(save(folder / "checkpoints", 20) / "__0_0.distcp")
    save(folder / "checkpoints", 10, position=False)
    (folder / "status.json").write_text('{"status": "running"}')
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    run = ResolvedRun(module="sum_digits", function="tiny", config=tiny(), resumes=folder)
    found = explain(run, here=LAPTOP)
    assert found["not_checked"][0].startswith("step-20 would be set aside")
    assert any("was not saved by a loop" in fault for fault in found["options"]["refused_here"])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_options_without_effect_are_told_apart():
    found = explained("--parity.enable", "false", "--parity.num_tokens", "5")["options"]
    assert found["set_without_effect"] == ["parity.num_tokens"]
    idle = {
        "parity.max_logprob_diff", "launch.slurm.*", "generator.on_update", "generator.rank_timeout_s",
        "trainer.comm.*", "trainer.parallelism.loss_parallel", "sinks.write_s",
    }  # fmt: skip
    assert idle < set(found["without_effect"])
    config = changed(tiny(), loop__max_off_policy_steps=1, sinks__tensorboard__enable=True)
    assert "generator.on_update" not in idle_beside_others(config, find_parts(config), on_gpu=False)
    assert "sinks.write_s" not in idle_options(config)


TINY = """\
step:
  groups: 32
  group_size: 8
  samples: 256
  optimizer_steps: 1
  samples_of_optimizer_step: 256
  data_ranks: 1
  sample_tokens_most: 128
  reply_tokens_most: 8,192
  trained_tokens_most: 32,512
  micro_batches_of_rank_fewest: 1
  micro_batches_of_rank_most: 16

run:
  num_steps: 80
  done_steps: 0
  optimizer_steps: 80
  samples: 20,480
  reply_tokens_most: 655,360
  publishes: 81
  evaluations_after: [0, 20, 40, 60, 80]
  eval_problems:
    held_out: 512
  eval_replies_of_problem: 1
  checkpoints_after: [80]
  warmup_steps: 300
  warmup_demonstrations_of_step: 64
"""
MEMORY = """\
memory:
  available_bytes: 16.0 GB
  trainer:
    num_ranks: 1
    parameters_bytes: 3.12 MB
    gradients_bytes: 3.12 MB
    optimizer_bytes: 6.23 MB
    activations_bytes: 111 MB
    logits_bytes: 10.5 MB
    held_between_steps_bytes: 12.5 MB
    peak_bytes: 134 MB
    fits: true
  generator:
    num_ranks: 1
    weights_bytes: 3.12 MB
    cache_bytes: 1.07 GB
    cache_tokens: 349,472
    longest_requests_at_once: 2,730
    fits: true
  controller:
    rollouts_bytes: 393 kB
    shared_weights_bytes: 9.35 MB

staleness:
  steps_most: 0
  policy_versions_most: 0
  groups_ahead: 32
  publish_every: 1
  generation: takes turns with training

publish:
  num_tensors: 26
  dtype: float32
  transport: auto
  pushed_bytes: 3.12 MB
  pulled_by_rank_bytes: 3.12 MB
  pulled_bytes: 3.12 MB
  pushed_in_run_bytes: 253 MB
"""


def test_numbers_of_the_tiny_config_match_the_recorded_ones():
    text = as_text(explained())
    assert TINY in text
    assert MEMORY in text
    assert "\n  refused: []\n" in text
    sizes = {0: "0 bytes", 999: "999 bytes", 1000: "1.00 kB", 12_345: "12.3 kB", 123_456_789_012: "123 GB"}
    assert {number: size(number) for number in sizes} == sizes
