"""What is refused of the generator's settings, and how long that takes: nothing is started."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from actors.generator import VLLMGenerator, generator_env
from actors.vllm.engine import GeneratorEngine
from actors.vllm.memory import cpu_cache_tokens
from rl.distributed.process_group import World
from tests.support.policies import small_spec

MODEL = small_spec().model
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "cpu_kv_cache_gib": 0.05}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_degree": 0}, "generator.tensor_parallel_degree=0: must be above 0"),
        ({"max_num_seqs": -1}, "generator.max_num_seqs=-1: must be above 0"),
        ({"cpu_kv_cache_gib": 0.0}, "generator.cpu_kv_cache_gib=0.0: must be above 0"),
        ({"rank_timeout_s": float("nan")}, "generator.rank_timeout_s=nan: must be above 0"),
        ({"max_model_len": 1}, "generator.max_model_len=1: must be at least 2"),
        (
            {"max_num_seqs": 128, "max_num_batched_tokens": 127},
            "generator.max_num_batched_tokens=127: must be at least max_num_seqs=128",
        ),
        ({"gpu_memory_utilization": 1.2}, "generator.gpu_memory_utilization=1.2: must be above 0, at most 1"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        VLLMGenerator.Config(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_degree": 4}, "generator.tensor_parallel_degree=4 does not divide num_kv_heads=2"),
        ({"max_model_len": 257}, "generator.max_model_len=257 is more than the model's max_positions=256"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        VLLMGenerator.Config(**(SETTINGS | settings)).check_model(MODEL)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a CPU's cache")
def test_settings_that_do_not_fit_a_cpu_are_refused_by_name():
    with pytest.raises(ValueError, match=r"generator.block_size=48: must be a multiple of 32 on a CPU"):
        VLLMGenerator.Config(**SETTINGS, block_size=48).check_model(MODEL)
    # A token takes 2 x 2 layers x 2 heads x 32 places x 4 bytes = 1 KiB, a block of 32 tokens 32 KiB.
    settings = SETTINGS | {"cpu_kv_cache_gib": 8 / 2**15}
    message = "generator.cpu_kv_cache_gib=0.000244141 holds the keys and values of 224 tokens, fewer than"
    with pytest.raises(ValueError, match=message):
        VLLMGenerator.Config(**settings).check_model(MODEL)
    VLLMGenerator.Config(**settings | {"cpu_kv_cache_gib": 9 / 2**15}).check_model(MODEL)


def test_a_ranks_share_of_the_cache_is_of_its_heads_in_its_precision():
    sizes: dict[str, Any] = {"cache_gib": 9 / 2**15, "block_size": None}
    assert cpu_cache_tokens(MODEL, dtype="float32", tensor_parallel_degree=1, **sizes) == 8 * 32
    assert cpu_cache_tokens(MODEL, dtype="float32", tensor_parallel_degree=2, **sizes) == 17 * 32
    assert cpu_cache_tokens(MODEL, dtype="bfloat16", tensor_parallel_degree=2, **sizes) == 35 * 32
    sizes["block_size"] = 64
    assert cpu_cache_tokens(MODEL, dtype="float32", tensor_parallel_degree=1, **sizes) == 3 * 64


def test_an_engine_needs_as_many_processes_as_its_degree(tmp_path):
    config = GeneratorEngine.Config(tensor_parallel_degree=2)
    with pytest.raises(ValueError, match="tensor_parallel_degree=2 needs as many processes: there are 1"):
        GeneratorEngine(config=config, model_spec=small_spec(), hf_assets_path=str(tmp_path), world=World())


def test_the_config_is_the_actors_and_says_what_its_processes_need():
    config = VLLMGenerator.Config(num_threads=3)
    assert config.owner is VLLMGenerator
    env = generator_env(config)
    assert env["OMP_NUM_THREADS"] == "3"
    assert env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@pytest.mark.medium
def test_reading_the_config_does_not_import_vllm():
    code = (
        "import actors.generator, sys; actors.generator.VLLMGenerator.Config(); print('vllm' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert run.stdout == "False\n", run.stderr
