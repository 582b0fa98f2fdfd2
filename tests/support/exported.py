"""Hugging Face folders written by relay, read by other libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rl.models import qwen3, qwen3_moe
from rl.models.attention import SequenceLayout
from rl.models.hf import HFFolder, read_parameters
from rl.models.logprobs import token_logprobs

TEXTS = ["4+7=11+8=19 [ANSWER] 19", "<|im_start|>user\nWas ist größer, 3 oder 5?<|im_end|>\n" * 3]

ENGINE = """
import gc, json, sys
from vllm import LLM, SamplingParams

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
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-c", ENGINE, json.dumps(TEXTS), *map(str, folders)]
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=150, stdin=subprocess.DEVNULL
    )
    assert run.returncode == 0, run.stderr[-4000:]
    (line,) = (line for line in run.stdout.splitlines() if line.startswith("RESULT"))
    return json.loads(line.removeprefix("RESULT"))


def our_logprobs(folder: Path, token_ids: list[int]) -> torch.Tensor:
    opened = HFFolder(folder)
    family = {"qwen3": qwen3, "qwen3_moe": qwen3_moe}[opened.config["model_type"]]
    spec = family.model_registry("tiny")
    config = spec.adapter.config_from_hf(opened.config)
    model = config.build()
    adapter = spec.adapter(config)
    # Buffers, such as a router's bias, may be missing.
    names = opened.present(model.state_dict(), adapter)
    assert {name for name, _ in model.named_parameters()} <= set(names)
    model.load_state_dict(dict(read_parameters(opened, adapter, names)), strict=False)
    tokens = torch.tensor(token_ids)
    length = len(tokens) - 1
    head = partial(token_logprobs, targets_T=tokens[1:], temperatures_T=torch.ones(length))
    layout = SequenceLayout.from_lengths([length])
    with torch.no_grad():
        return model(tokens[:-1], positions=torch.arange(length), sequences=layout, head=head)[0]
