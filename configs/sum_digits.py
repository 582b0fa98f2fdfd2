"""Runs on sum-digits: `tiny` on a CPU in minutes, Qwen3 0.6B to 32B on GPUs.

A config is a function that returns a complete one; a variant calls another and edits it.
"""

from __future__ import annotations

from actors.controller import Controller
from actors.generator import VLLMGenerator
from actors.trainer import PolicyTrainer
from rl.distributed.mesh import ParallelismConfig
from rl.loop import Sampling, SyncLoop
from rl.models.qwen3 import model_registry
from rl.supervised import SupervisedWarmup
from rl.tasks.sum_digits import SumDigits
from rl.training.config import TrainingConfig
from rl.training.optimizer import Optimizer
from rl.training.schedule import LRSchedule


def tiny() -> Controller.Config:
    """A model of 0.6M parameters that this run makes and warms up itself; two CPU cores, no GPU."""
    return Controller.Config(
        description="Qwen3 of 0.6M parameters on sum-digits, on a CPU",
        model=model_registry("tiny"),
        any_model_size=True,
        task=SumDigits.Config(num_integers=2, num_eval=256),
        warmup=SupervisedWarmup.Config(),
        trainer=PolicyTrainer.Config(
            num_threads=2,
            optimizer=Optimizer.Config(lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0),
            lr_scheduler=LRSchedule.Config(warmup_steps=5),
            training=TrainingConfig(max_tokens_per_microbatch=16_384, max_norm=1.0),
        ),
        generator=VLLMGenerator.Config(dtype="float32", max_model_len=128, num_threads=2),
        loop=SyncLoop.Config(
            num_steps=120,
            num_prompts=32,
            num_samples=8,
            sampling=Sampling(max_tokens=32),
            max_logprob_diff=1e-4,
            eval_every=20,
        ),
    )


def tiny_fsdp2() -> Controller.Config:
    """Parameters, gradients and optimizer state split over two processes."""
    return _tiny_on(ParallelismConfig(data_parallel_shard_degree=2), num_procs=2)


def tiny_tp2() -> Controller.Config:
    """Every layer split over two processes, in the trainer and in the generator."""
    config = _tiny_on(ParallelismConfig(tensor_parallel_degree=2), num_procs=2)
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
    return _tiny_on(ParallelismConfig(data_parallel_shard_degree=2, tensor_parallel_degree=2), num_procs=4)


def tiny_noise() -> Controller.Config:
    """The control: rewards drawn by chance, from which nothing can be learnt."""
    config = tiny()
    config.description = "control: tiny with a reward of noise"
    assert isinstance(config.task, SumDigits.Config)
    config.task.reward = "noise"
    return config


def _tiny_on(parallelism: ParallelismConfig, *, num_procs: int) -> Controller.Config:
    config = tiny()
    config.trainer.parallelism = parallelism
    config.trainer.num_procs = num_procs
    config.trainer.num_threads = 1
    return config
