"""The peer of `benchmarks.grpo_vs_trl`: TRL's GRPOTrainer on the same weights, prompts and sampling
settings.

TRL generates with transformers, or with a vLLM engine in its own process (`use_vllm`,
`vllm_mode="colocate"`). On a CPU that engine starts and generates, but cannot take new weights:
vLLM packs each layer's weights for its kernels and drops the parameters that TRL's `sync_weights`
writes to (AttributeError: no `weight_loader`). Server mode needs NCCL. So the vLLM side here keeps
its first weights.

The phases are timed around public calls: the model's or the engine's `generate`, the reward
function, and the trainer's `training_step`.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

TRL_PROMPT, TRL_ANSWER = "prompt", "answer"
"""Columns of TRL's dataset."""
VLLM = {
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_max_model_length": 256,
    "vllm_importance_sampling_correction": False,  # it costs one more forward pass
}
"""Settings of GRPOConfig."""
VLLM_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Read by vLLM when it is imported, which TRL does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Steps that TRL is to run."""

    assets: str
    """Hugging Face folder."""
    prompts: Sequence[tuple[str, str]]
    """Text of the prompt and answer, for all steps."""
    reward: Callable[[str, str], float]
    """Reward of a completion's text for an answer."""
    groups_per_batch: int
    group_size: int
    tokens: int
    """Most new tokens."""
    num_steps: int
    num_threads: int


class PhaseClock:
    """Stopwatch of the phases of each step; a phase inside another one is not part of the outer
    one.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._seconds: dict[str, float] = defaultdict(float)
        self._inner_s = 0.0
        self._step_start = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start, outer_inner_s = time.perf_counter(), self._inner_s
        self._inner_s = 0.0
        try:
            yield
        finally:
            passed = time.perf_counter() - start
            self._seconds[name] += passed - self._inner_s
            self._inner_s = outer_inner_s + passed

    def wrap(self, owner: Any, method: str, name: str) -> None:
        """Replace an object's method by one whose calls are a phase."""
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return original(*args, **kwargs)

        setattr(owner, method, timed)

    def begin(self) -> None:
        self._step_start = time.perf_counter()
        self._seconds.clear()

    def end(self) -> None:
        step_s = time.perf_counter() - self._step_start
        self.steps.append(
            {"step": step_s, **self._seconds, "other": step_s - sum(self._seconds.values())}
        )
        self.begin()

    def callback(self) -> Any:
        """Return a transformers callback that ends a step when the trainer does, and times the
        optimizer.
        """
        from transformers import TrainerCallback

        clock = self

        class Steps(TrainerCallback):
            def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
                clock.begin()

            def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
                self.phase = clock.phase("train")
                self.phase.__enter__()

            def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
                self.phase.__exit__(None, None, None)

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                clock.end()

        return Steps()


def trl_steps(
    work: Workload, *, dtype: str, autocast: bool, vllm: bool, micro_batch: int
) -> tuple[list[dict[str, float]], float]:
    """Return the seconds of each phase of each step and the mean number of new tokens.

    Args:
        dtype: dtype of the model's parameters.
        autocast: compute in bfloat16 on float32 parameters.
        vllm: generate by vLLM, with the first weights at every step.
        micro_batch: samples of a forward and backward pass.
    """
    os.environ |= VLLM_ENVIRONMENT
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer

    torch.set_num_threads(work.num_threads)
    clock, lengths = PhaseClock(), list[int]()

    def reward(
        completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        with clock.phase("reward"):
            lengths.extend(map(len, completion_ids))
            return [work.reward(c, a) for c, a in zip(completions, answer, strict=True)]

    with tempfile.TemporaryDirectory() as folder:
        rows = [{TRL_PROMPT: prompt, TRL_ANSWER: answer} for prompt, answer in work.prompts]
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(work.assets, dtype=getattr(torch, dtype)),
            processing_class=AutoTokenizer.from_pretrained(work.assets),
            reward_funcs=reward,
            train_dataset=Dataset.from_list(rows),
            callbacks=[clock.callback()],
            args=_settings(
                work, folder=folder, autocast=autocast, vllm=vllm, micro_batch=micro_batch
            ),
        )
        clock.wrap(trainer, "training_step", "train")
        if vllm:
            trainer.vllm_generation.sync_weights = lambda: None
            clock.wrap(trainer.vllm_generation, "generate", "generate")
        else:
            clock.wrap(trainer.model, "generate", "generate")
        trainer.train()
    return clock.steps, statistics.mean(lengths)


def _settings(work: Workload, *, folder: str, autocast: bool, vllm: bool, micro_batch: int) -> Any:
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=autocast,
        gradient_checkpointing=False,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=work.groups_per_batch * work.group_size // micro_batch,
        num_generations=work.group_size,
        max_completion_length=work.tokens,
        max_steps=work.num_steps,
        learning_rate=1e-6,
        beta=0.0,
        temperature=1.0,
        shuffle_dataset=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **(VLLM if vllm else {}),
    )
