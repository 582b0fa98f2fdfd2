"""The configs of sum-digits, and layouts that are refused; none of this needs a GPU."""

from dataclasses import replace

import pytest
import torch

from actors.checks import check_memory
from actors.layout_checks import check_layout
from configs import sum_digits
from rl.config.cli import parse_cli
from rl.config.registry import registry_functions
from rl.config.serialize import write_json
from rl.config.tree import rebuild

CONFIGS = sorted(registry_functions(sum_digits))
GPU_CONFIGS = [name for name in CONFIGS if name.startswith("qwen3_")]


def test_all_promised_sizes_have_a_config():
    sizes = {"0_6b", "1_7b", "4b", "8b", "14b", "32b", "30b_a3b"}
    assert {name.removeprefix("qwen3_") for name in GPU_CONFIGS} == sizes
    assert {"tiny", "tiny_fsdp2", "tiny_tp2", "tiny_ddp2", "tiny_fsdp2_tp2", "tiny_noise"} <= set(CONFIGS)


def test_tiny_runs_are_batch_invariant_where_they_can_be():
    on = {name for name in CONFIGS if getattr(sum_digits, name)().batch_invariant}
    assert on == {"tiny", "tiny_async", "tiny_fsdp2", "tiny_ddp2", "tiny_noise"}


def test_a_run_started_from_the_file_of_another_does_not_take_its_folder(tmp_path):
    path = tmp_path / "config.json"
    run = parse_cli(
        ["--name", "first", "--overwrite", "--seed", "3"], default_module="sum_digits", default_config="tiny"
    )
    write_json(run, path)
    again = parse_cli(["--from_json", str(path)], default_module="sum_digits").config
    assert (again.name, again.overwrite, again.seed) == (None, False, 3)


@pytest.mark.parametrize("name", GPU_CONFIGS)
def test_gpu_configs_have_the_shapes_their_name_says(name):
    config = getattr(sum_digits, name)()
    billions = float(name.removeprefix("qwen3_").partition("b")[0].replace("_", "."))
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in config.model.model.build().parameters())
    assert num_parameters / 1e9 == pytest.approx(billions, rel=0.06)


def test_a_model_larger_than_a_machine_without_gpus_is_refused_with_both_sizes():
    config = sum_digits.qwen3_8b()
    config.trainer.parallelism.data_parallel_shard_degree = 4
    # 8.19 billion parameters in float32, as many gradients, twice as many optimizer values: 131 GB.
    message = r"qwen3 8B needs \d+ GB on 4 ranks .*parameters 8\.19.*this machine has 130 GB and no GPU"
    with pytest.raises(ValueError, match=message):
        check_memory(config.fleet, model_spec=config.model, memory_bytes=130 * 10**9)
    degrees = config.trainer.parallelism.degrees(4)
    need = config.trainer.estimate_memory(config.model, degrees=degrees, on_gpu=False)
    assert 4 * need.held == pytest.approx(131e9, rel=0.01)
    check_memory(config.fleet, model_spec=config.model, memory_bytes=4 * need.total)
    with pytest.raises(ValueError, match="qwen3 8B needs"):
        check_memory(config.fleet, model_spec=config.model, memory_bytes=4 * need.total - 1)


def test_a_compiled_model_that_may_be_too_large_is_warned_of(caplog):
    config = sum_digits.qwen3_8b()
    config.trainer.compile.enable = True
    config.trainer.parallelism.data_parallel_shard_degree = 4
    check_memory(config.fleet, model_spec=config.model, memory_bytes=10**9)
    (record,) = caplog.records
    assert (record.levelname, record.name) == ("WARNING", "rl.training.memory")
    assert "qwen3 8B needs" in record.getMessage()
    assert "this machine has 1 GB and no GPU" in record.getMessage()


def test_experts_that_cannot_be_shared_out_are_refused_by_degree_and_number():
    shards = {"trainer.num_procs": 6, "trainer.parallelism.data_parallel_shard_degree": 6}
    config = rebuild(sum_digits.tiny_moe(), shards | {"trainer.parallelism.expert_parallel_degree": 3})
    with pytest.raises(ValueError, match="expert_parallel_degree=3 does not divide num_experts=8"):
        check_layout(config.fleet, model_spec=config.model, loop=config.loop, num_gpus=0)


def test_a_dataset_is_refused_because_problems_come_from_the_task():
    for field in ("dataset", "dataset_path"):
        with pytest.raises(ValueError, match=f"{field}='gsm8k': must be None, as problems come from"):
            rebuild(sum_digits.tiny(), {field: "gsm8k"})


@pytest.mark.parametrize(
    ("edits", "names"),
    [
        ({"trainer.num_procs": 3}, r"does not multiply to the world size of 3"),
        (
            {"trainer.num_procs": 8, "trainer.parallelism.tensor_parallel_degree": 8},
            r"trainer.parallelism.tensor_parallel_degree=8 does not divide the 4 key-value heads",
        ),
        (
            {"trainer.num_procs": 2, "trainer.parallelism.tensor_parallel_degree": 2, "vocab_size": 321},
            r"trainer.parallelism.tensor_parallel_degree=2 does not divide the vocab_size of 321 of",
        ),
        (
            {"generator.tensor_parallel_degree": 3},
            r"generator.tensor_parallel_degree=3 does not divide num_kv_heads=4",
        ),
        (
            {"trainer.experts.load_balance_rate": 0.01},
            r"experts.load_balance_rate=0.01: must be 0.0 for a model without experts",
        ),
        (
            {"trainer.experts.force_load_balance": True},
            r"experts.force_load_balance=True: must be False for a model without experts",
        ),
        (
            {"trainer.parallelism.expert_tensor_parallel_degree": 2},
            r"expert_tensor_parallel_degree=2: must be 1: a dense model has no experts",
        ),
        ({"generator.max_model_len": 9999}, r"max_model_len=9999 .*max_positions"),
        ({"loop.sampling.max_tokens": 128}, r"max_tokens=128 leaves no room"),
        (
            {"trainer.training.max_tokens_per_microbatch": 64},
            r"max_tokens_per_microbatch=64 is less than generator.max_model_len=128",
        ),
        (
            {"trainer.training.max_sequence_length": 127},
            r"trainer.training.max_sequence_length=127 is less than generator.max_model_len=128",
        ),
        (
            {"trainer.training.max_sequence_length": 2000},
            r"max_sequence_length=2000: must be at most 1024, the positions of qwen3 tiny",
        ),
        ({"trainer.loss.kl_coef": 0.1}, r"loss.kl_coef=0.1 needs the reference policy"),
    ],
)
def test_a_layout_that_cannot_run_is_refused_by_field_and_value(edits, names):
    vocab_size = edits.get("vocab_size", 320)
    fields = {field: value for field, value in edits.items() if field != "vocab_size"}
    config = rebuild(sum_digits.tiny(), {"trainer.parallelism.data_parallel_shard_degree": 1} | fields)
    spec = replace(config.model, model=rebuild(config.model.model, {"vocab_size": vocab_size}))
    with pytest.raises(ValueError, match=names):
        check_layout(config.fleet, model_spec=spec, loop=config.loop, num_gpus=0)
