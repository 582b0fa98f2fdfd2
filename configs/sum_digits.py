"""Runs on sum-digits: `tiny` on a CPU in minutes, Qwen3 0.6B to 32B on GPUs.

A config is a function that returns a complete one; a variant calls another and edits it.
"""

from __future__ import annotations

from actors.controller import Controller
from actors.generator import VLLMGenerator
from actors.trainer import PolicyTrainer
from losses.correction import ImportanceCorrection
from losses.grpo import GRPOLoss
from rl.distributed.mesh import ParallelismConfig
from rl.loop import Loop
from rl.models import qwen3_moe
from rl.models.qwen3 import model_registry
from rl.rollouts.settings import Sampling
from rl.supervised import SupervisedWarmup
from rl.tasks.sum_digits import INSTRUCTION, SumDigits
from rl.training.config import TrainingConfig
from rl.training.optimizer import Optimizer
from rl.training.schedule import LRSchedule


def tiny() -> Controller.Config:
    """A model of 0.8M parameters that this run makes and warms up itself; two CPU cores, no GPU."""
    return Controller.Config(
        description="Qwen3 of 0.8M parameters on sum-digits, on a CPU",
        # Makes a run with max_policy_age 0 the same each time; its cost is in docs/batch_invariance.md.
        batch_invariant=True,
        model=model_registry("tiny"),
        any_model_size=True,
        task=SumDigits.Config(num_integers=2, num_eval=512, haste=0.85),
        warmup=SupervisedWarmup.Config(),
        trainer=PolicyTrainer.Config(
            num_threads=2,
            optimizer=Optimizer.Config(lr=4e-5, betas=(0.9, 0.95), weight_decay=0.0),
            lr_scheduler=LRSchedule.Config(warmup_steps=10),
            training=TrainingConfig(max_tokens_per_microbatch=2048, max_norm=1.0),
        ),
        # Short prompts share cache blocks only if the blocks are short too.
        generator=VLLMGenerator.Config(dtype="float32", max_model_len=128, block_size=32, num_threads=2),
        loop=Loop.Config(
            num_steps=80,
            num_prompts=32,
            num_samples=8,
            sampling=Sampling(max_tokens=32),
            max_logprob_diff=1e-4,
            eval_every=20,
        ),
    )


def tiny_async() -> Controller.Config:
    """Generation runs one step ahead of training, each on a core of its own."""
    config = tiny()
    config.description = "Qwen3 of 0.8M parameters on sum-digits, generation ahead of training, on a CPU"
    config.loop.max_policy_age = 1
    config.trainer.loss = GRPOLoss(correction=ImportanceCorrection(high=2.0))
    config.trainer.num_threads = config.generator.num_threads = 1
    config.generator.on_update = "keep"
    return config


def tiny_fsdp2() -> Controller.Config:
    """Parameters, gradients and optimizer state split over two processes."""
    return _tiny_on(ParallelismConfig(data_parallel_shard_degree=2), num_procs=2)


def tiny_tp2() -> Controller.Config:
    """Every layer split over two processes, in the trainer and in the generator."""
    config = _tiny_on(ParallelismConfig(tensor_parallel_degree=2), num_procs=2)
    # It would ask for logits that are gathered, which is not how tensor parallelism is meant to be used.
    config.batch_invariant = False
    config.generator.tensor_parallel_degree = 2
    config.generator.num_threads = 1
    return config


def tiny_ddp2() -> Controller.Config:
    """Two copies of the model that sum their gradients."""
    return _tiny_on(
        ParallelismConfig(data_parallel_replicate_degree=2, data_parallel_shard_degree=1), num_procs=2
    )


def tiny_fsdp2_tp2() -> Controller.Config:
    """FSDP over two groups of two tensor-parallel processes; the generator on one."""
    config = _tiny_on(ParallelismConfig(data_parallel_shard_degree=2, tensor_parallel_degree=2), num_procs=4)
    config.batch_invariant = False  # Trainer and generator split sums differently.
    return config


def tiny_moe() -> Controller.Config:
    """A mixture of eight experts, two for each token, of 2.1M parameters."""
    config = tiny()
    config.description = "Qwen3 MoE of 2.1M parameters on sum-digits, on a CPU"
    config.model = qwen3_moe.model_registry("tiny")
    config.batch_invariant = False
    # Where two experts score alike to the last bits, trainer and generator may choose differently: rare,
    # but then the difference is that of two experts.
    config.loop.max_logprob_diff = 1e-3
    return config


def tiny_noise() -> Controller.Config:
    """The control: rewards drawn by chance, from which nothing can be learnt."""
    config = tiny()
    config.description = "control: tiny with a reward of noise"
    assert isinstance(config.task, SumDigits.Config)
    config.task.reward = "noise"
    return config


def qwen3_0_6b() -> Controller.Config:
    """Two GPUs: one trains, one generates."""
    return _qwen3("0.6B", trainer=ParallelismConfig(), num_procs=1, max_tokens=16_384)


def qwen3_1_7b() -> Controller.Config:
    """Three GPUs: two train, one generates."""
    return _qwen3(
        "1.7B", trainer=ParallelismConfig(data_parallel_shard_degree=2), num_procs=2, max_tokens=8192
    )


def qwen3_4b() -> Controller.Config:
    """Five GPUs: four train, one generates."""
    return _qwen3("4B", trainer=ParallelismConfig(data_parallel_shard_degree=4), num_procs=4, max_tokens=8192)


def qwen3_8b() -> Controller.Config:
    """Six GPUs: four train, two generate."""
    config = _qwen3(
        "8B", trainer=ParallelismConfig(data_parallel_shard_degree=4), num_procs=4, max_tokens=4096
    )
    config.generator.tensor_parallel_degree = 2
    return config


def qwen3_14b() -> Controller.Config:
    """Ten GPUs: eight train (FSDP 4 x TP 2), two generate."""
    parallelism = ParallelismConfig(data_parallel_shard_degree=4, tensor_parallel_degree=2)
    config = _qwen3("14B", trainer=parallelism, num_procs=8, max_tokens=4096)
    config.generator.tensor_parallel_degree = 2
    return config


def qwen3_32b() -> Controller.Config:
    """Twenty GPUs: sixteen train (FSDP 4 x TP 4), four generate."""
    parallelism = ParallelismConfig(data_parallel_shard_degree=4, tensor_parallel_degree=4)
    config = _qwen3("32B", trainer=parallelism, num_procs=16, max_tokens=4096)
    config.generator.tensor_parallel_degree = 4
    return config


def qwen3_30b_a3b() -> Controller.Config:
    """Eighteen GPUs: sixteen train (FSDP, the experts over groups of eight), two generate."""
    parallelism = ParallelismConfig(data_parallel_shard_degree=16, expert_parallel_degree=8)
    config = _qwen3("32B", trainer=parallelism, num_procs=16, max_tokens=4096)
    config.description = "Qwen3-30B-A3B on sum-digits, on GPUs"
    config.model = qwen3_moe.model_registry("30B-A3B")
    config.hf_assets_path = "assets/Qwen3-30B-A3B"
    # Eight experts' inputs and results for each token are more than fits beside the rest.
    config.trainer.activation_checkpoint.mode = "selective"
    config.generator.tensor_parallel_degree = 2
    return config


def _qwen3(flavor: str, *, trainer: ParallelismConfig, num_procs: int, max_tokens: int) -> Controller.Config:
    """A Qwen3 checkpoint on GPUs of 80 GB; `max_tokens` of a micro-batch."""
    return Controller.Config(
        description=f"Qwen3-{flavor} on sum-digits, on GPUs",
        model=model_registry(flavor),
        hf_assets_path=f"assets/Qwen3-{flavor}",
        task=SumDigits.Config(num_integers=4, num_eval=256, instruction=INSTRUCTION),
        trainer=PolicyTrainer.Config(
            num_procs=num_procs,
            num_threads=8,
            parallelism=trainer,
            optimizer=Optimizer.Config(lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0),
            lr_scheduler=LRSchedule.Config(warmup_steps=5),
            training=TrainingConfig(
                max_tokens_per_microbatch=max_tokens, param_dtype="bfloat16", logits_chunk_tokens=2048
            ),
        ),
        generator=VLLMGenerator.Config(
            dtype="bfloat16", max_model_len=1024, enforce_eager=False, num_threads=8
        ),
        loop=Loop.Config(
            num_steps=100,
            num_prompts=32,
            num_samples=8,
            sampling=Sampling(max_tokens=768),
            # bfloat16 in two different kernels: rounding alone gives a few hundredths of a nat.
            max_logprob_diff=0.1,
            eval_every=20,
        ),
    )


def _tiny_on(parallelism: ParallelismConfig, *, num_procs: int) -> Controller.Config:
    config = tiny()
    config.trainer.parallelism = parallelism
    config.trainer.num_procs = num_procs
    config.trainer.num_threads = 1
    return config
