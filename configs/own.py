"""Your model, your data, your reward: `--model NAME --data FILE --reward my_reward:function`.

`relay.grpo` and `relay train --model ...` build these configs. Sizes and numbers that nobody gives
suit the model and the machine: GPUs where there are some, and otherwise CPU cores.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Literal

from actors.config import ParityConfig
from actors.controller import Controller
from actors.generator import VLLMGenerator
from actors.launch.placement import count_gpus
from actors.trainer import PolicyTrainer
from configs import gpu
from rl.loop.loop import Loop
from rl.models.files.assets import count_weight_bytes
from rl.models.lora import LoRA
from rl.rollouts.advantage import Advantage
from rl.rollouts.episode import Sampling
from rl.tasks.dataset import Columns
from rl.tasks.own import OwnTask, find_columns
from rl.training.config import TrainingConfig
from rl.training.optimizer import LRSchedule, Optimizer

SMALL = 10**9
"""Bytes of weights up to which a model counts as small."""
TINY = 5 * 10**7


def grpo(
    model: str | None = None,
    data: tuple[str, ...] = (),
    reward: tuple[str, ...] = (),
    columns: Columns | None = None,
    max_tokens: int | None = None,
) -> Controller.Config:
    """All parameters, with GRPO.

    Args:
        model: `hf_assets_path`.
        data: `task.train_files`.
        reward: `task.reward`.
        columns: `task.columns`; None finds them by their usual names.
        max_tokens: `loop.sampling.max_tokens`; prompts have as much room beside longer replies.
    """
    task = OwnTask.Config(train_files=data, reward=reward, held_out=0.1)
    if columns is not None:
        task.columns = columns
    elif data:
        task.columns = find_columns(data)
    num_gpus, num_bytes = count_gpus(), _count_bytes(model)
    if num_gpus:
        config = _on_gpus(
            task,
            num_gpus=num_gpus,
            num_bytes=num_bytes,
            max_tokens=1024 if max_tokens is None else max_tokens,
        )
    else:
        config = _on_cpu(
            task, num_bytes=num_bytes, max_tokens=128 if max_tokens is None else max_tokens
        )
    config.description = f"{model} on {', '.join(data)}"
    config.hf_assets_path = model
    config.any_model_size = True
    return config


def lora(
    model: str | None = None,
    data: tuple[str, ...] = (),
    reward: tuple[str, ...] = (),
    columns: Columns | None = None,
    max_tokens: int | None = None,
) -> Controller.Config:
    """Adapters of rank 16 on all layers, with GRPO; the model's own weights stay."""
    config = grpo(model, data, reward, columns, max_tokens)
    config.description = f"{config.description}, with LoRA"
    # On GPUs adapters beside the base would cost the generators their CUDA graphs.
    config.trainer.converters = (LoRA.Config(rank=16, alpha=32.0, merge=count_gpus() > 0),)
    # Adapters need larger steps than whole weights.
    config.trainer.optimizer.lr *= 20
    config.parity.max_logprob_diff = 0.3
    return config


def _count_bytes(model: str | None) -> int | None:
    """Return the size of a model's weights in bytes, or None if nobody knows it.

    The size is the same before and after a download, on which no number of a run may depend.
    """
    if model is None:
        return None
    try:
        return count_weight_bytes(model)
    except ValueError:
        # The run says what is wrong with the model, when it looks for everything else too.
        return None


def _on_cpu(task: OwnTask.Config, *, num_bytes: int | None, max_tokens: int) -> Controller.Config:
    """Return a config for the cores of this machine, which trainer and generator use in turns."""
    is_tiny = num_bytes is not None and num_bytes < TINY
    dtype: Literal["float32", "bfloat16"] = "float32" if is_tiny else "bfloat16"
    num_threads = max(1, len(os.sched_getaffinity(0)))
    task.num_eval = 64
    return Controller.Config(
        model=None,
        task=task,
        # A policy that has moved far from its start finds the fixed text unlikely, and rounding in
        # bfloat16 then made a difference of 0.14; wrong weights make one of several nats.
        parity=ParityConfig(max_logprob_diff=None if is_tiny else 0.3),
        trainer=PolicyTrainer.Config(
            num_threads=num_threads,
            optimizer=Optimizer.Config(lr=2e-5, betas=(0.9, 0.95), weight_decay=0.0),
            lr_scheduler=LRSchedule.Config(warmup_steps=5),
            training=TrainingConfig(max_tokens_per_microbatch=3072, param_dtype=dtype),
        ),
        generator=VLLMGenerator.Config(
            dtype=dtype, max_model_len=512 + max_tokens, num_threads=num_threads
        ),
        loop=Loop.Config(
            num_steps=80,
            groups_per_batch=16,
            group_size=8,
            advantage=Advantage(scale="group_std"),
            sampling=Sampling(max_tokens=max_tokens),
            # Two bfloat16 kernels round differently.
            max_logprob_diff=1e-3 if is_tiny else 0.1,
            long_prompts="drop",
            eval_every=10,
        ),
    )


def _on_gpus(
    task: OwnTask.Config, *, num_gpus: int, num_bytes: int | None, max_tokens: int
) -> Controller.Config:
    """Return a config for the GPUs of this machine: one is shared, several are divided."""
    task.num_eval = 256
    layout = gpu.Layout(size=None, num_gpus=num_gpus, microbatch=8192)
    if num_gpus > 1:
        num_trainers = max(1, num_gpus // 2)
        layout = replace(
            layout,
            ahead=True,
            shards=num_trainers,
            num_replicas=num_gpus - num_trainers,
            recompute="selective",
        )
    config = gpu.config(
        layout, name="", task=task, max_model_len=1024 + max_tokens, max_tokens=max_tokens
    )
    config.loop.long_prompts = "drop"
    config.loop.advantage = Advantage(scale="group_std")
    if num_bytes is not None and num_bytes <= SMALL:
        config.trainer.optimizer.lr = 1e-5
    return config
