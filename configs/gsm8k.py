"""Mathematics from local files: GSM8K and MATH on GPUs, and short problems on a CPU.

The file of `tiny` is part of the project. The files of GSM8K and MATH are not downloaded;
docs/tasks.md describes them. To read other files: `--task.train_files my/train.parquet
--task.eval_files test my/test.parquet`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from actors.controller import Controller
from configs import gpu, sum_digits
from rl.tasks.dataset import Columns
from rl.tasks.math_problems import MathProblems

TINY = str(Path(__file__).with_name("tiny_math.jsonl"))
"""File made by examples/data/make_tiny_math.py."""
GSM8K_TRAIN = "data/gsm8k/train.jsonl"
GSM8K_TEST = "data/gsm8k/test.jsonl"
MATH_TRAIN = "data/math/train.jsonl"
MATH_TEST = "data/math/test.jsonl"


def tiny() -> Controller.Config:
    """A model of 0.8M parameters, warmed up on solutions of short problems; two CPU cores, no
    GPU.
    """
    task = MathProblems.Config(
        train_files=(TINY,),
        held_out=0.1,
        num_eval=128,
        columns=Columns(demonstration="answer"),
        template="{question}",
        reply="hashes",
    )
    name = "short problems of a file"
    return sum_digits.on_task(sum_digits.tiny(), name, task, max_model_len=256, max_tokens=96)


def _on(layout: gpu.Layout) -> Callable[[], Controller.Config]:
    # A function and no config: each call gives a fresh config, which callers may edit.
    def config() -> Controller.Config:
        files = {"gsm8k_test": GSM8K_TEST}
        task = MathProblems.Config(train_files=(GSM8K_TRAIN,), eval_files=files, num_eval=512)
        return gpu.config(layout, name="GSM8K", task=task, max_model_len=2048, max_tokens=1536)

    return config


qwen3_0_6b_lora_24gb = _on(gpu.QWEN3_0_6B_LORA_24GB)
qwen3_0_6b_24gb = _on(gpu.QWEN3_0_6B_24GB)
qwen3_0_6b = _on(gpu.QWEN3_0_6B)
qwen3_1_7b = _on(gpu.QWEN3_1_7B)
qwen3_4b_lora = _on(gpu.QWEN3_4B_LORA)
qwen3_4b = _on(gpu.QWEN3_4B)
qwen3_8b = _on(gpu.QWEN3_8B)
qwen3_14b = _on(gpu.QWEN3_14B)
qwen3_30b_a3b = _on(gpu.QWEN3_30B_A3B)


def math_qwen3_1_7b() -> Controller.Config:
    """MATH on one GPU of 80 GB; the reference answer is in the box of the column `solution`."""
    task = MathProblems.Config(
        train_files=(MATH_TRAIN,),
        eval_files={"math_test": MATH_TEST},
        num_eval=500,
        columns=Columns(question="problem", answer="solution"),
        gold="boxed",
        unparsed_gold="skip",
    )
    return sum_digits.on_task(
        sum_digits.qwen3_1_7b(), "MATH", task, max_model_len=4096, max_tokens=3072
    )
