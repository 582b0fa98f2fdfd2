"""Exported folders of each family open in vLLM's own implementation, in another process."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples import custom_model
from rl.models.files.hf import HFFolder, read_parameters, write_hf_folder, write_random_model
from rl.models.layers.rope import Llama3Scaling, YarnScaling
from rl.models.lora import LoRA
from rl.models.spec import ModelSpec, model_spec, spec_from_hf
from rl.training.engine import TrainingEngine
from tests.support.policies import sequence_logprobs
from tests.training.parts import make_sample

TEXTS = ["4+7=11+8=19 [ANSWER] 19", "<|im_start|>user\nWas ist größer, 3 oder 5?<|im_end|>\n" * 3]

ENGINE = """
import gc, json, sys
from vllm import LLM, SamplingParams
from vllm.model_executor.models import registry

# Otherwise another process imports vllm to look at each class.
registry._run_in_subprocess = lambda look: look()

def ask(folder, texts):
    llm = LLM(model=folder, dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=8)
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    outputs = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0))
    logprobs = [
        [at[i].logprob for i, at in zip(o.prompt_token_ids[1:], o.prompt_logprobs[1:], strict=True)]
        for o in outputs
    ]
    return {"class": f"{type(model).__module__}.{type(model).__name__}", "logprobs": logprobs,
            "token_ids": [list(o.prompt_token_ids) for o in outputs]}

def main(texts, *folders):
    answers = []
    for folder in folders:
        answers.append(ask(folder, texts))
        gc.collect()
    print("RESULT" + json.dumps(answers))

main(json.loads(sys.argv[1]), *sys.argv[2:])
"""


def ask_vllm(*folders: Path) -> list[dict[str, Any]]:
    """Return vLLM's results on `TEXTS` with each folder's model."""
    return run_vllm(ENGINE, json.dumps(TEXTS), *map(str, folders))


def run_vllm(program: str, *arguments: str) -> Any:
    """Return the value that a program prints as JSON after RESULT, in another process."""
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    run = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        stdin=subprocess.DEVNULL,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    (line,) = (line for line in run.stdout.splitlines() if line.startswith("RESULT"))
    return json.loads(line.removeprefix("RESULT"))


def our_logprobs(folder: Path, token_ids: list[int]) -> torch.Tensor:
    opened = HFFolder(folder)
    spec = spec_from_hf(opened.config)
    model, adapter = spec.model.build(), spec.adapter(spec.model)
    # Buffers, such as a router's bias, may be missing.
    names = opened.list_present(model.state_dict(), adapter)
    assert {name for name, _ in model.named_parameters()} <= set(names)
    model.load_state_dict(dict(read_parameters(opened, adapter, names)), strict=False)
    return torch.from_numpy(sequence_logprobs(model, np.asarray(token_ids))[1:]).float()


def write(folder: Path, *, spec: ModelSpec, tie: bool, tokenizer: Path) -> None:
    spec.model.tie_embeddings = tie
    model = spec.model.build()
    model.init_weights(seed=1, std=0.1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(3))
    write_hf_folder(
        folder,
        model.named_parameters(),
        spec.adapter(spec.model),
        dtype=torch.float32,
        max_shard_bytes=10**9 if tie else 500_000,
        tokenizer_from=tokenizer,
    )


def adapted_engine(base: Path) -> TrainingEngine:
    """Build an engine whose adapters' products are as large as the weights."""
    config = TrainingEngine.Config(converters=(LoRA.Config(rank=4, alpha=4.0),))
    engine = config.build(
        model_spec=model_spec("qwen3", "tiny"), hf_assets_path=str(base), device="cpu"
    )
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in engine.policy.trained_parameters.values():
            parameter.normal_(std=0.25, generator=generator)
    return engine


def logprobs_of(engine: TrainingEngine, token_ids: list[int]) -> torch.Tensor:
    sample = dataclasses.replace(
        make_sample(length=len(token_ids), seed=0), token_ids=np.asarray(token_ids, dtype=np.int32)
    )
    return torch.from_numpy(engine.compute_logprobs([sample])[0][1:])


def with_all_switches(family: str) -> ModelSpec:
    spec = model_spec(family, "tiny")
    block: Any = spec.model.block
    if family == "llama":
        spec.model.rope.scaling = Llama3Scaling(
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=128,
        )
        block.attention.qkv_bias = block.attention.o_bias = block.feed_forward.bias = True
    if family == "qwen2":
        # vLLM's Qwen2 knows no other head size than the width over the number of heads.
        block.attention.num_heads = spec.model.dim // block.attention.head_dim
        spec.model.rope.scaling = YarnScaling(factor=8.0, original_max_position_embeddings=128)
    return spec


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_vllm_opens_exported_folders_with_equal_logprobs(tmp_path):
    classes = {
        "gemma3_text": "gemma3.Gemma3ForCausalLM",
        "mistral": "mistral.MistralForCausalLM",
        "llama": "llama.LlamaForCausalLM",
        "qwen2": "qwen2.Qwen2ForCausalLM",
        custom_model.GraniteAdapter.model_type: "granite.GraniteForCausalLM",
        "qwen3_moe": "qwen3_moe.Qwen3MoeForCausalLM",
        "adapters-merged": "qwen3.Qwen3ForCausalLM",
    }
    tokenizer = write_random_model(tmp_path / "tokenizer", spec=model_spec("qwen3", "tiny"), seed=0)
    base, *folders = (tmp_path / name for name in ("qwen3", *classes))
    for folder in (base, *folders[:-1]):
        # Untied models are written in shards.
        tie = folder.name not in ("mistral", "granite", "qwen3_moe")
        write(folder, spec=with_all_switches(folder.name), tie=tie, tokenizer=tokenizer)
    engine = adapted_engine(base)
    engine.export_hf(str(folders[-1]))
    for folder, name, theirs in zip(folders, classes.values(), ask_vllm(*folders), strict=True):
        assert theirs["class"] == f"vllm.model_executor.models.{name}"
        assert [bytes(i for i in ids if i < 256) for ids in theirs["token_ids"]] == [
            text.replace("<|im_start|>", "")
            .replace("<|im_end|>", "")
            .replace("[ANSWER]", "")
            .encode()
            for text in TEXTS
        ]
        for ids, logprobs in zip(theirs["token_ids"], theirs["logprobs"], strict=True):
            ours = our_logprobs(folder, ids)
            assert ours.std() > 0.3
            torch.testing.assert_close(torch.tensor(logprobs), ours, atol=1e-4, rtol=0)
            if folder.name == "adapters-merged":
                adapted = logprobs_of(engine, ids)
                torch.testing.assert_close(torch.tensor(logprobs), adapted, atol=1e-4, rtol=0)
                assert (adapted - our_logprobs(base, ids)).abs().max() > 0.1
