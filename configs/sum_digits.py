"""sum-digits: add up the digits of some numbers.

`tiny` takes minutes on a CPU or one GPU; Qwen3 0.6B to 32B run on GPUs (`configs.gpu`).

A function returns a complete config. A variant calls another function and edits the result.
"""

from __future__ import annotations

from collections.abc import Callable

from actors.controller import Controller
from actors.generator import VLLMGenerator
from actors.trainer import PolicyTrainer
from configs import gpu
from losses.correction import ImportanceCorrection
from losses.policy import GRPOLoss
from rl.config.configurable import Configurable
from rl.distributed.mesh import ParallelismConfig
from rl.ledger.config import LedgerConfig
from rl.loop.loop import Loop
from rl.loop.warmup import SupervisedWarmup
from rl.models.qwen3 import model_registry
from rl.models.spec import model_spec
from rl.rollouts.episode import Sampling
from rl.tasks.sum_digits import INSTRUCTION, SumDigits
from rl.training.config import TrainingConfig
from rl.training.optimizer import LRSchedule, Optimizer


def tiny() -> Controller.Config:
    """A model of 0.8M parameters that the run creates and warms up itself; two CPU cores, no
    GPU.
    """
    return Controller.Config(
        description="Qwen3 of 0.8M parameters on sum-digits, on a CPU",
        # On CPUs runs with max_off_policy_steps 0 are bit-reproducible; docs/training.md has the
        # cost.
        batch_invariant=None,
        model=model_registry("tiny"),
        # `hf_assets_path` on the command line may name another model.
        any_model_size=True,
        task=SumDigits.Config(num_integers=2, num_eval=512, haste=0.85),
        warmup=SupervisedWarmup.Config(),
        trainer=PolicyTrainer.Config(
            num_threads=2,
            optimizer=Optimizer.Config(lr=4e-5, betas=(0.9, 0.95), weight_decay=0.0),
            lr_scheduler=LRSchedule.Config(warmup_steps=10),
            training=TrainingConfig(max_tokens_per_microbatch=2048, max_norm=1.0),
        ),
        generator=VLLMGenerator.Config(dtype="float32", max_model_len=128, num_threads=2),
        loop=Loop.Config(
            num_steps=80,
            groups_per_batch=32,
            group_size=8,
            sampling=Sampling(max_tokens=32),
            max_logprob_diff=1e-4,
            eval_every=20,
        ),
        ledger=LedgerConfig(enable=True),
    )


def tiny_async() -> Controller.Config:
    """Generation one step ahead of training, each on its own core."""
    return ahead(tiny())


def tiny_fsdp2() -> Controller.Config:
    """FSDP over two processes: parameters, gradients and optimizer state are sharded."""
    return _split_tiny(shards=2)


def tiny_tp2() -> Controller.Config:
    """Tensor parallelism over two processes, in the trainer and in the generator."""
    config = _split_tiny(tensor_parallel=2)
    # Batch invariance needs gathered logits, which defeats the purpose of tensor parallelism.
    config.batch_invariant = False
    config.generator.tensor_parallel_degree = 2
    config.generator.num_threads = 1
    return config


def tiny_ddp2() -> Controller.Config:
    """Data parallelism: two copies of the model that sum their gradients."""
    return _split_tiny(shards=1, replicas=2)


def tiny_fsdp2_tp2() -> Controller.Config:
    """FSDP over two groups of two tensor-parallel processes; the generator has one process."""
    config = _split_tiny(shards=2, tensor_parallel=2)
    config.batch_invariant = False  # Trainer and generator split sums differently.
    return config


def tiny_pp2() -> Controller.Config:
    """Pipeline parallelism: each of two processes has half of the layers."""
    config = _split_tiny(pipeline=2)
    # Six micro-batches or so: with one each, the two would take turns.
    config.trainer.parallelism.pipeline_parallel_microbatch_size = 32
    return config


def tiny_moe() -> Controller.Config:
    """A mixture-of-experts model of 2.1M parameters: eight experts, two for each token."""
    config = tiny()
    config.description = "Qwen3 MoE of 2.1M parameters on sum-digits, on a CPU"
    config.model = model_spec("qwen3_moe", "tiny")
    config.batch_invariant = False
    # On a GPU the products of experts in float32 wait for the host.
    config.generator.enforce_eager = True
    # If two experts score almost the same, trainer and generator may choose differently. That is
    # rare, but the logprobs then differ by the difference between two experts.
    config.loop.max_logprob_diff = 1e-3
    return config


def tiny_noise() -> Controller.Config:
    """The control experiment: random rewards, from which nothing can be learned."""
    return noise(tiny())


def _on(layout: gpu.Layout) -> Callable[[], Controller.Config]:
    def config() -> Controller.Config:
        task = SumDigits.Config(num_integers=4, num_eval=256, instruction=INSTRUCTION)
        return gpu.config(layout, name="sum-digits", task=task, max_model_len=1024, max_tokens=768)

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
qwen3_32b = _on(gpu.QWEN3_32B)


def ahead(config: Controller.Config) -> Controller.Config:
    """Generate one step ahead of training, each on one CPU core."""
    config.description = f"{config.description}, generation ahead of training"
    config.loop.max_off_policy_steps = 1
    # Samples are one step old, so the loss corrects for the policy that drew them.
    config.trainer.loss = GRPOLoss(correction=ImportanceCorrection(high=2.0))
    # Both compute at the same time, so they share the two cores.
    config.trainer.num_threads = 1
    config.generator.num_threads = 1
    # Replies go on over an update, rather than be drawn again.
    config.generator.on_update = "keep"
    return config


def noise(config: Controller.Config) -> Controller.Config:
    """Give random rewards, from which nothing can be learned."""
    config.description = f"control: {config.description}, with a reward of noise"
    config.task.reward = "noise"  # type: ignore[attr-defined]
    return config


def on_task(
    config: Controller.Config,
    name: str,
    task: Configurable.Config,
    *,
    max_model_len: int | None = None,
    max_tokens: int | None = None,
) -> Controller.Config:
    """Replace the task of a config of this module, and the lengths of samples and replies."""
    config.description = config.description.replace("sum-digits", name)
    config.task = task
    config.generator.max_model_len = max_model_len or config.generator.max_model_len
    config.loop.sampling.max_tokens = max_tokens or config.loop.sampling.max_tokens
    return config


def _split_tiny(
    *, shards: int = -1, replicas: int = 1, tensor_parallel: int = 1, pipeline: int = 1
) -> Controller.Config:
    config = tiny()
    config.trainer.parallelism = ParallelismConfig(
        data_parallel_replicate_degree=replicas,
        data_parallel_shard_degree=shards,
        tensor_parallel_degree=tensor_parallel,
        pipeline_parallel_degree=pipeline,
    )
    # A degree of -1 takes all processes, here one.
    config.trainer.num_procs = abs(shards) * replicas * tensor_parallel * pipeline
    # Several processes on two cores: more threads would wait for each other.
    config.trainer.num_threads = 1
    return config
