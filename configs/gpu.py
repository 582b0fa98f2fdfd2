"""Qwen3 on the GPUs that people have: the half of a config that does not depend on the task.

    qwen3_8b = _on(gpu.QWEN3_8B)  # in a task's module, whose `_on` calls `gpu.config`

Where trainer and generators share GPUs they take turns (`launch.share_gpus`). Where each has GPUs
of its own, generation is a step ahead of training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from actors.config import LaunchConfig
from actors.controller import Controller
from actors.generator import VLLMGenerator
from actors.trainer import PolicyTrainer
from losses.correction import ImportanceCorrection
from losses.policy import GRPOLoss
from rl.config.configurable import Configurable
from rl.distributed.activation_checkpoint import ActivationCheckpointConfig
from rl.distributed.compile import CompileConfig
from rl.distributed.mesh import ParallelismConfig
from rl.loop.loop import Loop
from rl.models.lora import LoRA
from rl.models.spec import model_spec
from rl.rollouts.episode import Sampling
from rl.training.config import TrainingConfig
from rl.training.optimizer import LRSchedule, Optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A Qwen3 checkpoint and its division over GPUs."""

    size: str | None
    """End of the checkpoint's name, such as 0.6B; None: another model, which the caller names."""
    num_gpus: int = 1
    gpu_gb: int = 80
    """Memory of each GPU."""
    shares: bool | None = None
    """`launch.share_gpus`."""
    ahead: bool = False
    """Generation a step ahead of training."""
    lora: bool = False
    shards: int = 1
    """FSDP degree of the trainer."""
    tensor_parallel: int = 1
    """Tensor-parallel degree of the trainer."""
    expert_parallel: int = 1
    num_replicas: int = 1
    """Number of generators."""
    generator_gpus: int = 1
    """GPUs of each generator."""
    microbatch: int = 4096
    """Tokens of a micro-batch."""
    recompute: Literal["none", "selective", "full"] = "none"
    """`trainer.activation_checkpoint.mode`."""
    compile: bool = False
    """`trainer.compile.enable`: the first steps take longer, so for models whose steps are long."""

    @property
    def gpus(self) -> str:
        """The GPUs in words."""
        return f"{'one GPU' if self.num_gpus == 1 else f'{self.num_gpus} GPUs'} of {self.gpu_gb} GB"


QWEN3_0_6B_LORA_24GB = Layout(size="0.6B", gpu_gb=24, lora=True)
QWEN3_0_6B_24GB = Layout(size="0.6B", gpu_gb=24, microbatch=2048)
QWEN3_0_6B = Layout(size="0.6B", microbatch=16_384)
QWEN3_1_7B = Layout(size="1.7B", microbatch=8192)
QWEN3_4B_LORA = Layout(size="4B", lora=True)
QWEN3_4B = Layout(size="4B", num_gpus=8, ahead=True, shards=4, num_replicas=4, compile=True)
QWEN3_8B = Layout(
    size="8B", num_gpus=8, ahead=True, shards=4, num_replicas=4, recompute="selective", compile=True
)
QWEN3_14B = Layout(
    size="14B",
    num_gpus=8,
    ahead=True,
    shards=6,
    num_replicas=2,
    microbatch=8192,
    recompute="full",
    compile=True,
)
# The trainer needs all eight. While generators compute it waits in 490 GB of the machine's memory,
# which has to hold up to three versions of the weights too, 61 GB each.
QWEN3_30B_A3B = Layout(
    size="30B-A3B", num_gpus=8, shares=True, shards=8, expert_parallel=8, num_replicas=4,
    generator_gpus=2,
    recompute="full",
)  # fmt: skip
# Sixteen for training, four for generation, on several machines.
QWEN3_32B = Layout(
    size="32B", num_gpus=20, ahead=True, shards=4, tensor_parallel=4, generator_gpus=4
)


def config(
    layout: Layout, *, name: str, task: Configurable.Config, max_model_len: int, max_tokens: int
) -> Controller.Config:
    """Return the config of a task on a layout; `max_model_len` and `max_tokens` limit samples and
    replies.
    """
    size, model = layout.size, None
    if size is not None:
        model = model_spec("qwen3_moe" if "-A" in size else "qwen3", size)
    config = Controller.Config(
        description=f"Qwen3-{size} on {name}, {'LoRA, ' if layout.lora else ''}{layout.gpus}",
        model=model,
        hf_assets_path=None if size is None else f"Qwen/Qwen3-{size}",
        task=task,
        launch=LaunchConfig(share_gpus=layout.shares),
        trainer=_build_trainer(layout),
        generator=VLLMGenerator.Config(
            dtype="bfloat16",
            max_model_len=max_model_len,
            num_threads=8,
            num_replicas=layout.num_replicas,
            tensor_parallel_degree=layout.generator_gpus,
        ),
        loop=Loop.Config(
            num_steps=100,
            groups_per_batch=32,
            group_size=8,
            sampling=Sampling(max_tokens=max_tokens),
            # Rounding of bfloat16 in two different kernels makes a difference of a few hundredths
            # of a nat.
            max_logprob_diff=0.1,
            eval_every=20,
        ),
    )
    if layout.lora:
        # Adapters beside the base cost a generator on a GPU its CUDA graphs.
        config.trainer.converters = (LoRA.Config(rank=32, alpha=64.0, merge=True),)
        # Adapters need larger steps than whole weights.
        config.trainer.optimizer.lr = 1e-5
    if layout.ahead:
        config.loop.max_off_policy_steps = 1
        # Samples are one step old, so the loss corrects for the policy that drew them.
        config.trainer.loss = GRPOLoss(correction=ImportanceCorrection(high=2.0))
        # Replies go on over an update, rather than be drawn again.
        config.generator.on_update = "keep"
    return config


def _build_trainer(layout: Layout) -> PolicyTrainer.Config:
    return PolicyTrainer.Config(
        # Experts are divided over the ranks that shard parameters, so they add no processes.
        num_procs=layout.shards * layout.tensor_parallel,
        num_threads=8,
        parallelism=ParallelismConfig(
            data_parallel_shard_degree=layout.shards,
            tensor_parallel_degree=layout.tensor_parallel,
            expert_parallel_degree=layout.expert_parallel,
        ),
        optimizer=Optimizer.Config(lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0),
        lr_scheduler=LRSchedule.Config(warmup_steps=5),
        training=TrainingConfig(
            max_tokens_per_microbatch=layout.microbatch,
            param_dtype="bfloat16",
            # Logits of 16,384 tokens at once would take 10 GB in float32.
            logits_chunk_tokens=2048,
        ),
        activation_checkpoint=ActivationCheckpointConfig(mode=layout.recompute),
        compile=CompileConfig(enable=layout.compile),
    )
