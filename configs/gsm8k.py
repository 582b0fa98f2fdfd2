"""Mathematics from local files: GSM8K and MATH on GPUs, and a `tiny` one for a CPU.

The file of `tiny` comes with the project; those of GSM8K and MATH are not fetched: docs/tasks_from_data.md
says what they hold. Other places for them:
`--task.train_files my/train.parquet --task.eval_files test my/test.parquet`.
"""

from __future__ import annotations

from actors.controller import Controller
from configs import sum_digits
from rl.tasks.math_problems import MathProblems
from rl.tasks.problem_rows import Columns

TINY = "examples/data/tiny_math.jsonl"
"""Made by examples/data/make_tiny_math.py; from the folder of the project, as all paths here."""
GSM8K_TRAIN = "data/gsm8k/train.jsonl"
GSM8K_TEST = "data/gsm8k/test.jsonl"
MATH_TRAIN = "data/math/train.jsonl"
MATH_TEST = "data/math/test.jsonl"


def tiny() -> Controller.Config:
    """A model of 0.8M parameters, warmed up on the solutions of a file of short problems; two CPU cores."""
    config = sum_digits.tiny()
    config.description = "Qwen3 of 0.8M parameters on short problems of a file, on a CPU"
    config.task = MathProblems.Config(
        train_files=(TINY,),
        held_out=0.1,
        num_eval=128,
        columns=Columns(demonstration="answer"),
        template="{question}",
        reply="hashes",
    )
    config.generator.max_model_len = 256
    config.loop.sampling.max_tokens = 96
    return config


def qwen3_0_6b() -> Controller.Config:
    """Two GPUs: one trains, one generates."""
    return _gsm8k(sum_digits.qwen3_0_6b())


def qwen3_1_7b() -> Controller.Config:
    """Three GPUs: two train, one generates."""
    return _gsm8k(sum_digits.qwen3_1_7b())


def qwen3_4b() -> Controller.Config:
    """Five GPUs: four train, one generates."""
    return _gsm8k(sum_digits.qwen3_4b())


def math_qwen3_1_7b() -> Controller.Config:
    """Three GPUs, MATH: the columns are `problem` and `solution`, the answer is in the solution's box."""
    config = qwen3_1_7b()
    config.description = "Qwen3-1.7B on MATH, on GPUs"
    config.task = MathProblems.Config(
        train_files=(MATH_TRAIN,),
        eval_files={"math_test": MATH_TEST},
        num_eval=500,
        columns=Columns(question="problem", answer="solution"),
        gold="boxed",
        unparsed_gold="skip",
    )
    config.generator.max_model_len = 4096
    config.loop.sampling.max_tokens = 3072
    return config


def _gsm8k(config: Controller.Config) -> Controller.Config:
    config.description = config.description.replace("sum-digits", "GSM8K")
    config.task = MathProblems.Config(
        train_files=(GSM8K_TRAIN,), eval_files={"gsm8k_test": GSM8K_TEST}, num_eval=512
    )
    config.generator.max_model_len = 2048
    config.loop.sampling.max_tokens = 1536
    return config
