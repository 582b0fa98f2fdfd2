"""Decode on the null device and print, as JSON, what a layer launches and what a step calls.

python -m tools.null_gpu run --devices 2 -- -m tests.rehearsal.generator_steps qwen3 --ranks 2
--graphs
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actors.launch.cleanup import free_port
from actors.vllm.config import GeneratorConfig
from actors.vllm.environment import ENVIRONMENT
from actors.vllm.requests import Request
from rl.distributed.process_group import World
from rl.models.decoder import TransformerBlock
from rl.types import SamplingParams
from tests.support.policies import config_folder, small_spec
from tests.support.rehearsal import ONE_ALL_REDUCE
from tools.null_gpu.counters import Counters, read_own, reset_own

HEAD_DIM = 128
NUM_REQUESTS, NUM_STEPS = 4, 10


def decode(family: str, *, graphs: bool) -> dict[str, Any]:
    """Return the launches of a layer, captured and eager, and the calls of a decoding step, by
    name.
    """
    captured, eager = Counter[str](), Counter[str]()
    forward = TransformerBlock.forward

    def counted(block: TransformerBlock, *inputs: Any) -> Any:
        before = launches(read_own())
        out = forward(block, *inputs)
        now = captured if torch.cuda.is_current_stream_capturing() else eager
        now.clear()
        now.update(launches(read_own()) - before)
        return out

    TransformerBlock.forward = counted  # type: ignore[assignment, method-assign]
    from actors.vllm.core import VLLMCore

    spec, world = small_spec(family=family, head_dim=HEAD_DIM, hidden_dim=512), World.from_env()
    config = GeneratorConfig(
        tensor_parallel_degree=world.size, enforce_eager=not graphs, max_model_len=256,
        max_num_seqs=16,
        max_num_batched_tokens=64, gpu_memory_utilization=0.1,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = config_folder(Path(folder) / "assets", spec)
        core = VLLMCore(config=config, model_spec=spec, hf_assets_path=path, world=world)
    core.weights_changed()
    sampling = SamplingParams(max_tokens=100, temperature=0.9)
    for i in range(NUM_REQUESTS):
        core.add(
            Request(id=i, prompt=np.full(5, i, dtype=np.int32), max_tokens=100, sampling=sampling)
        )
    for _ in range(5):
        core.step()
    reset_own()
    num_tokens = sum(len(core.step().tokens) for _ in range(NUM_STEPS))
    own = read_own()
    return {
        "captured": captured,
        "eager": eager,
        "tokens": num_tokens / NUM_STEPS,
        "calls": {name: count / NUM_STEPS for name, count in own.calls.items()},
        "violations": own.violations,
    }


def launches(own: Counters) -> Counter[str]:
    """Return kernels, fills and copies on the device, by name."""
    calls = {
        name: n
        for name, n in own.calls.items()
        if name.startswith("cudaMemset") or name == "copy device to device"
    }
    return Counter(own.kernels | calls)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("family")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--graphs", action="store_true")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT | ONE_ALL_REDUCE)
    other = None
    if arguments.ranks == 2 and "RANK" not in os.environ:
        world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        os.environ.update(world | {"RANK": "0", "LOCAL_RANK": "0"})
        command = [sys.executable, "-m", "tests.rehearsal.generator_steps", *sys.argv[1:]]
        env = os.environ | {"RANK": "1", "LOCAL_RANK": "1"}
        other = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    result = decode(arguments.family, graphs=arguments.graphs)
    if other is not None:
        assert other.wait(60) == 0
    print(json.dumps(result))


if __name__ == "__main__":
    main()
