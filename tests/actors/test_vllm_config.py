"""Generator settings that are refused without starting an engine."""

import subprocess
import sys
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from actors.generator import VLLMGenerator
from actors.vllm import core, model
from actors.vllm.engine import GeneratorEngine
from actors.vllm.requests import check_call, check_sequences
from rl.distributed.process_group import World
from rl.models.files.hf import write_hf_folder
from rl.types import Completion, SamplingParams
from tests.support.fp8_folders import quantize_folder
from tests.support.policies import VOCAB_SIZE, random_model, small_spec

MODEL = small_spec().model


def test_head_dim_above_all_that_attention_supports_is_refused(monkeypatch):
    backend = Mock(
        **{"supports_head_size.return_value": False, "get_name.return_value": "FLASH_ATTN"}
    )
    backend.get_supported_head_sizes.return_value = [64, 128]
    monkeypatch.setattr(model, "get_attn_backend", Mock(return_value=backend))
    assert model._choose_kernel_head_dim(80) == 128
    with pytest.raises(
        ValueError, match=r"head_dim=160: must be at most 128, .* FLASH_ATTN supports"
    ):
        model._choose_kernel_head_dim(160)


@pytest.mark.parametrize(
    ("settings", "num_tokens"),
    [
        ({"dtype": "float32"}, 8 * 32),
        ({"dtype": "bfloat16", "tensor_parallel_degree": 2}, 35 * 32),
    ],
)
def test_cache_of_a_rank_holds_its_heads_only(settings, num_tokens):
    # A token takes 2 x 2 layers x 2 heads x 32 places x 4 bytes = 1 KiB, a block of 32 tokens 32
    # KiB.
    config = VLLMGenerator.Config(cpu_kv_cache_gib=9 / 2**15, **settings)
    assert config.count_cpu_cache_tokens(MODEL) == num_tokens


def test_cache_is_no_larger_than_twice_what_can_run_at_once():
    config = VLLMGenerator.Config(dtype="float32", max_num_seqs=10, max_model_len=40)
    # 40 tokens take two blocks; one more block stays empty.
    assert config.count_cpu_cache_bytes(MODEL) == (2 * 10 * 2 + 1) * 32 * 2**10
    assert config.count_cpu_cache_tokens(MODEL) == 2 * 10 * 2 * 32
    small = replace(config, cpu_kv_cache_gib=2**-12)
    assert small.count_cpu_cache_bytes(MODEL) == 2**18


def test_cache_that_is_too_small_for_a_request_is_refused():
    config = VLLMGenerator.Config(dtype="float32", max_model_len=256, cpu_kv_cache_gib=9 / 2**15)
    config.check_model(MODEL, on_gpu=False)
    says = "generator.cpu_kv_cache_gib=0.0002.* of 224 tokens, fewer than"
    with pytest.raises(ValueError, match=says):
        replace(config, cpu_kv_cache_gib=8 / 2**15).check_model(MODEL, on_gpu=False)


BEGUN = Completion(
    token_ids=np.array([3, 4], dtype=np.int32),
    logprobs=np.zeros(2, dtype=np.float32),
    policy_versions=np.zeros(2, dtype=np.int32),
    finish_reason="abort",
)
ONE = np.zeros(1)
LIMITS: dict[str, Any] = {"max_model_len": 256, "vocab_size": VOCAB_SIZE}


@pytest.mark.parametrize(
    ("prompt", "settings", "begun", "message"),
    [
        (
            np.zeros(157),
            {"max_tokens": 100},
            None,
            "prompt 0 has 157 tokens, and may get 100: more than gen",
        ),
        (np.zeros(0), {}, None, "prompt 0 is empty"),
        (np.array([3, VOCAB_SIZE]), {}, None, "prompt 0 has token id 64: must be 0 to 63"),
        (np.array([-1, 3]), {}, None, "prompt 0 has token id -1: must be 0 to 63"),
        (
            ONE,
            {"temperature": 0.005},
            None,
            r"temperature=0.005: must be 0 \(greedy\) or at least 0.01",
        ),
        (ONE, {"top_p": 0.0}, None, "sampling.top_p=0.0: must be above 0, at most 1"),
        (
            ONE,
            {},
            [[BEGUN, BEGUN]],
            "begun must have sampling.num_samples=1 completions for each of 1 prom",
        ),
        (
            ONE,
            {"max_tokens": 1},
            [[BEGUN]],
            "begun must have .* of at most sampling.max_tokens=1 tokens",
        ),
    ],
)
def test_call_that_cannot_be_served_is_refused(prompt, settings, begun, message):
    sampling = SamplingParams(**({"max_tokens": 5} | settings))
    check_call([np.zeros(156)], SamplingParams(max_tokens=100), [[BEGUN]], **LIMITS)
    with pytest.raises(ValueError, match=message):
        check_call([prompt], sampling, begun, **LIMITS)


def test_sequence_that_cannot_be_scored_is_refused():
    check_sequences([np.zeros(256)], **LIMITS)
    with pytest.raises(
        ValueError, match=r"sequence 1 has 257 tokens.* more than generator\.max_model_len=256"
    ):
        check_sequences([np.zeros(1), np.zeros(257)], **LIMITS)


def test_engine_needs_as_many_processes_as_its_degree(tmp_path):
    config = GeneratorEngine.Config(tensor_parallel_degree=2)
    with pytest.raises(
        ValueError, match="tensor_parallel_degree=2 needs as many processes: there are 1"
    ):
        GeneratorEngine(
            config=config, model_spec=small_spec(), hf_assets_path=str(tmp_path), world=World()
        )


@pytest.mark.medium
def test_reading_the_config_does_not_import_vllm():
    code = (
        "import actors.generator, sys; actors.generator.VLLMGenerator.Config(); print('vllm' "
        "in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert run.stdout == "False\n", run.stderr


def test_engine_has_the_prefix_cache_of_the_config_and_no_quantization_of_the_folder(tmp_path):
    spec = small_spec()
    params = random_model(spec, seed=0).named_parameters()
    write_hf_folder(tmp_path / "hf", params, spec.adapter(spec.model), dtype=torch.bfloat16)
    quantize_folder(tmp_path / "hf", block=(16, 16))
    for caches in (True, False):
        arguments = core.build_engine_args(
            VLLMGenerator.Config(
                dtype="float32",
                max_model_len=64,
                cpu_kv_cache_gib=0.01,
                enable_prefix_caching=caches,
            ),
            model=spec.model,
            architecture=model.register_policy(spec),
            hf_assets_path=str(tmp_path / "hf"),
        )
        config = arguments.create_engine_config()
        assert config.quant_config is None
        assert config.cache_config.enable_prefix_caching == caches
