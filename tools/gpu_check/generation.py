"""The generator's engine: CUDA graphs against eager steps and the trainer, sleep, and speed beside
vLLM's own model.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.vllm.environment import ENVIRONMENT
from benchmarks.generator_step import least_s
from benchmarks.processes import Worker
from rl.models.files.hf import HFFolder, read_parameters, write_random_model
from rl.models.model_cost import count_work
from rl.models.spec import model_spec
from rl.observability.machine import measure_limits
from rl.types import SamplingParams
from tools.gpu_check.report import Report

NUM_PROMPTS, NUM_SAMPLES, PROMPT_LENGTH, TOKENS = 16, 8, 40, 128
MAX_MODEL_LEN = 256
LOGPROB_ATOL = 0.03
"""Mean difference of logprobs in nats that bfloat16 explains."""
LEAST_OF_LIMIT, LEAST_OF_VLLM = 0.3, 0.8
IN_THIS_PROCESS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": ENVIRONMENT["VLLM_ENABLE_V1_MULTIPROCESSING"],
    "VLLM_LOGGING_LEVEL": ENVIRONMENT["VLLM_LOGGING_LEVEL"],
    # FlashInfer compiles it with nvcc, which a run does not need.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
LEAST_FREED = 0.9
"""Share of a sleeping engine's memory that must be free."""


def generator(report: Report) -> None:
    spec = model_spec("qwen3", "0.6B")
    with tempfile.TemporaryDirectory() as temporary:
        folder = str(write_random_model(Path(temporary, "model"), spec=spec, seed=0))
        with _worker("EngineSide", folder=folder, eager=False) as graphs:
            sequences, drawn = graphs.call("draw")
            tokens_per_s = graphs.call("tokens_per_s")
            kept, freed = graphs.call("sleep")
            report.same(
                "logprobs after sleep",
                _difference(graphs.call("score", sequences), drawn),
                atol=LOGPROB_ATOL,
            )
        report.figure("freed by sleep", freed / kept)
        report.require(
            freed >= LEAST_FREED * kept,
            f"sleep freed {freed / 2**30:.1f} of {kept / 2**30:.1f} GiB of weights and cache",
        )
        for side, name in (
            ("EngineSide", "logprobs of eager steps"),
            ("TrainerSide", "logprobs of the trainer"),
        ):
            with _worker(side, folder=folder, eager=True) as other:
                report.same(
                    name, _difference(other.call("score", sequences), drawn), atol=LOGPROB_ATOL
                )
        with _worker("VLLMSide", folder=folder, eager=False) as theirs:
            vllms = theirs.call("tokens_per_s")
    report.figure("tokens/s", tokens_per_s)
    report.figure("of vLLM's own model", tokens_per_s / vllms, at_least=LEAST_OF_VLLM)
    work = count_work(spec.model)
    limits = measure_limits(dtype="bfloat16", num_bytes=work.read * 2, device=torch.device("cuda"))
    num = NUM_PROMPTS * NUM_SAMPLES
    shortest_s = least_s(work, limits, sequences=num, tokens=TOKENS, itemsize=2)
    report.figure(
        "of the memory's limit", tokens_per_s * shortest_s / (num * TOKENS), at_least=LEAST_OF_LIMIT
    )


def _worker(side: str, **arguments: Any) -> Worker:
    return Worker(f"tools.gpu_check.generation:{side}", threads=2, **arguments)


def _difference(got: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """Return the mean absolute difference of the drawn tokens' logprobs."""
    return float(
        np.mean([np.abs(a[-len(b) :] - b).mean() for a, b in zip(got, wanted, strict=True)])
    )


class EngineSide:
    """relay's engine in this process."""

    def __init__(self, *, folder: str, eager: bool) -> None:
        from actors.vllm.engine import GeneratorEngine

        self._spec, self._opened = model_spec("qwen3", "0.6B"), HFFolder(folder)
        config = GeneratorEngine.Config(
            dtype="bfloat16",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=NUM_PROMPTS * NUM_SAMPLES,
            gpu_memory_utilization=0.5,
            enforce_eager=eager,
            can_sleep=not eager,
        )
        self._runner = asyncio.Runner()
        self._engine = GeneratorEngine(config=config, model_spec=self._spec, hf_assets_path=folder)
        self._runner.run(self._engine.start())
        self._update(1)

    def _update(self, version: int) -> None:
        async def write(state_dict: dict[str, Tensor]) -> None:
            adapter = self._spec.adapter(self._spec.model)
            names = self._opened.list_present(state_dict, adapter)
            for name, tensor in read_parameters(self._opened, adapter, names):
                state_dict[name].copy_(tensor)

        self._runner.run(self._engine.update_weights(write, version=version))

    def _generate(self, *, tokens: int, seed: int) -> tuple[list[np.ndarray], Any]:
        random = np.random.default_rng(seed)
        prompts = [
            random.integers(0, 1000, PROMPT_LENGTH).astype(np.int32) for _ in range(NUM_PROMPTS)
        ]
        sampling = SamplingParams(max_tokens=tokens, num_samples=NUM_SAMPLES, seed=seed)
        return prompts, self._runner.run(self._engine.generate(prompts, sampling=sampling))

    def draw(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return one completion of each prompt with its prompt, [T] each, and the logprobs it was
        drawn with.
        """
        prompts, completions = self._generate(tokens=32, seed=0)
        firsts = [of_prompt[0] for of_prompt in completions]
        whole = [np.concatenate([p, c.token_ids]) for p, c in zip(prompts, firsts, strict=True)]
        return whole, [np.asarray(c.logprobs) for c in firsts]

    def score(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        return self._runner.run(self._engine.compute_logprobs(sequences))

    def tokens_per_s(self) -> float:
        best = 0.0
        for seed in (1, 2):
            started = time.perf_counter()
            self._generate(tokens=TOKENS, seed=seed)
            best = max(best, NUM_PROMPTS * NUM_SAMPLES * TOKENS / (time.perf_counter() - started))
        return best

    def sleep(self) -> tuple[int, int]:
        """Sleep and wake; return the bytes of weights and cache, and how many sleep gave back."""
        from vllm.device_allocator.cumem import CuMemAllocator

        kept = CuMemAllocator.get_instance().get_current_usage()
        awake = torch.cuda.mem_get_info()[0]
        self._runner.run(self._engine.sleep())
        freed = torch.cuda.mem_get_info()[0] - awake
        self._runner.run(self._engine.wake())
        self._update(2)
        return kept, freed


class TrainerSide:
    """The trainer's engine in this process."""

    def __init__(self, *, folder: str, eager: bool) -> None:
        from rl.training.engine import TrainingEngine

        self._engine = TrainingEngine(
            config=TrainingEngine.Config(),
            model_spec=model_spec("qwen3", "0.6B"),
            hf_assets_path=folder,
            device="cuda",
        )

    def score(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        from tools.gpu_check.training import samples_of

        return self._engine.compute_logprobs(samples_of(sequences))


class VLLMSide:
    """vLLM's own model and sampler in this process."""

    def __init__(self, *, folder: str, eager: bool) -> None:
        os.environ |= IN_THIS_PROCESS
        import vllm

        self._llm = vllm.LLM(
            model=folder, dtype="bfloat16", max_model_len=MAX_MODEL_LEN,
            max_num_seqs=NUM_PROMPTS * NUM_SAMPLES,
            gpu_memory_utilization=0.5, skip_tokenizer_init=True, enforce_eager=eager,
        )  # fmt: skip

    def tokens_per_s(self) -> float:
        import vllm

        best = 0.0
        for seed in (1, 2):
            random = np.random.default_rng(seed)
            prompts = [
                {"prompt_token_ids": random.integers(0, 1000, PROMPT_LENGTH).tolist()}
                for _ in range(NUM_PROMPTS)
            ]
            sampling = vllm.SamplingParams(
                n=NUM_SAMPLES, max_tokens=TOKENS, ignore_eos=True, logprobs=0, detokenize=False
            )
            started = time.perf_counter()
            self._llm.generate(prompts, sampling, use_tqdm=False)
            best = max(best, NUM_PROMPTS * NUM_SAMPLES * TOKENS / (time.perf_counter() - started))
        return best
