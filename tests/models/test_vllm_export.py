"""A folder that we write opens in vLLM's own Qwen3, each time in a process of its own."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rl.models.attention import SequenceLayout
from rl.models.hf import HFFolder, read_parameters, write_hf_folder
from rl.models.logprobs import token_logprobs
from rl.models.qwen3 import model_registry
from rl.models.qwen3.model import Qwen3
from rl.models.starting_point import write_random_model

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
    """What vLLM makes of `TEXTS` with each folder's model."""
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


def write(folder: Path, *, tie: bool, tokenizer: Path) -> None:
    spec = model_registry("tiny")
    assert isinstance(spec.model, Qwen3.Config)
    spec.model.tie_embeddings = tie
    model = spec.model.build()
    model.init_weights(seed=1, std=0.1)
    write_hf_folder(
        folder,
        model.named_parameters(),
        spec.adapter(spec.model),
        dtype=torch.float32,
        max_shard_bytes=10**9 if tie else 500_000,
        tokenizer_from=tokenizer,
    )


def our_logprobs(folder: Path, token_ids: list[int]) -> torch.Tensor:
    opened = HFFolder(folder)
    spec = model_registry("tiny")
    config = spec.from_hf_config(opened.config)
    model = config.build()
    names = [name for name, _ in model.named_parameters()]
    model.load_state_dict(dict(read_parameters(opened, spec.adapter(config), names)))
    tokens = torch.tensor(token_ids)
    length = len(tokens) - 1
    head = partial(token_logprobs, targets_T=tokens[1:], temperatures_T=torch.ones(length))
    layout = SequenceLayout.from_lengths([length])
    with torch.no_grad():
        return model(tokens[:-1], positions=torch.arange(length), sequences=layout, head=head)[0]


@pytest.mark.medium
@pytest.mark.timeout(180)
def test_vllms_own_qwen3_opens_our_folders_with_equal_logprobs(tmp_path):
    tokenizer = write_random_model(tmp_path / "tokenizer", spec=model_registry("tiny"), seed=0)
    folders = [tmp_path / "tied", tmp_path / "untied-in-shards"]
    for folder in folders:
        write(folder, tie=folder.name == "tied", tokenizer=tokenizer)
    for folder, theirs in zip(folders, ask_vllm(*folders), strict=True):
        assert theirs["class"] == "vllm.model_executor.models.qwen3.Qwen3ForCausalLM"
        assert [bytes(i for i in ids if i < 256) for ids in theirs["token_ids"]] == [
            text.replace("<|im_start|>", "").replace("<|im_end|>", "").replace("[ANSWER]", "").encode()
            for text in TEXTS
        ]
        for ids, logprobs in zip(theirs["token_ids"], theirs["logprobs"], strict=True):
            ours = our_logprobs(folder, ids)
            assert ours.std() > 0.5
            torch.testing.assert_close(torch.tensor(logprobs), ours, atol=1e-4, rtol=0)
