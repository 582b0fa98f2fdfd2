"""What a training engine is told: the configs of its components, and whether they go together."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.distributed.device_mesh import DeviceMesh

from losses.grpo import GRPOLoss
from losses.types import Loss, uses_entropy
from rl.config.configurable import Configurable
from rl.config.tree import check_fields
from rl.distributed.activation_checkpoint import ActivationCheckpointConfig
from rl.distributed.async_tensor_parallel import check_peer_access
from rl.distributed.compile import CompileConfig
from rl.distributed.mesh import Degrees, ParallelismConfig
from rl.distributed.process_group import CommConfig
from rl.distributed.sharding import ShardingOptions
from rl.models.converters.converter import ModelConverter, ModelConverters
from rl.models.qwen3.model import Qwen3
from rl.models.spec import ModelSpec
from rl.training.batch_invariant import check_batch_invariant, check_trainers_machine
from rl.training.checkpointer import Checkpointer
from rl.training.config import TrainingConfig
from rl.training.experts import ExpertBalance, check_experts
from rl.training.layout import check_layout, check_selective_option
from rl.training.memory import MemoryEstimate, MemoryOptions, check_device_memory, estimate
from rl.training.optimizer import Optimizer
from rl.training.policy import check_sequence_length
from rl.training.reference import ReferenceConfig, check_reference
from rl.training.schedule import LRSchedule


@dataclass(kw_only=True, slots=True)
class EngineConfig(Configurable.Config):
    """Fields of `TrainingEngine.Config`."""

    optimizer: Optimizer.Config = field(default_factory=Optimizer.Config)
    lr_scheduler: LRSchedule.Config = field(default_factory=LRSchedule.Config)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    loss: Loss = field(default_factory=GRPOLoss)
    """Of `forward_backward` calls that bring none."""
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: Checkpointer.Config = field(default_factory=Checkpointer.Config)
    activation_checkpoint: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    converters: tuple[ModelConverter.Config, ...] = ()
    """Changes to the model before it is sharded, in order: LoRA, Float8, your own."""
    print_after_conversion: bool = False
    """Log the model's modules after the converters, on the first rank at level INFO."""
    experts: ExpertBalance.Config = field(default_factory=ExpertBalance.Config)

    def check(self, spec: ModelSpec, *, world_size: int, device: torch.device) -> Degrees:
        """Degrees of a trainer of `world_size` processes of this model.

        Raises:
            ValueError: names the field that cannot be as it is, beside the others or with this model.
        """
        check_fields(self)  # One may have been edited since.
        spec.check_layout(spec.model, self.parallelism)
        degrees = check_layout(
            parallelism=self.parallelism,
            activation_checkpoint=self.activation_checkpoint,
            compile=self.compile,
            world_size=world_size,
            device_type=device.type,
        )
        # Somebody may ask for its logprobs, whatever the loss.
        check_reference(self.reference, loss=self.loss, kl_in_reward=self.reference.enable)
        check_sequence_length(spec, self.training)
        self.check_model(spec)
        check_trainers_machine(self, spec, device=device, tensor_parallel_degree=degrees.tp)
        if self.parallelism.async_tensor_parallel:
            check_peer_access(device=device, num_devices=degrees.tp)
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            need = self.estimate_memory(spec, degrees=degrees, on_gpu=True)
            check_device_memory(need, device_bytes=total, compiled=self.compile.enable)
        return degrees

    def estimate_memory(self, spec: ModelSpec, *, degrees: Degrees, on_gpu: bool) -> MemoryEstimate:
        """What one rank needs."""
        options = MemoryOptions(
            parallelism=self.parallelism,
            optimizer=self.optimizer,
            activation_checkpoint=self.activation_checkpoint,
            reference=self.reference.enable,
            entropy_gradient=uses_entropy(self.loss),
            converters=ModelConverters(
                self.converters, spec=spec, degrees=degrees, device=torch.device("meta")
            ),
        )
        model: Qwen3.Config = spec.model  # type: ignore[assignment]
        return estimate(model, degrees=degrees, training=self.training, options=options, on_gpu=on_gpu)

    def check_model(self, spec: ModelSpec) -> None:
        """Raise ValueError for what this model has no use for, or cannot do: experts, layers."""
        model: Qwen3.Config = spec.model  # type: ignore[assignment]
        check_experts(model, balance=self.experts, converters=self.converters)
        check_selective_option(self.activation_checkpoint, num_layers=model.num_layers)
        check_batch_invariant(self, spec)

    def sharding_options(
        self, training: TrainingConfig, *, expert_mesh: DeviceMesh | None
    ) -> ShardingOptions:
        """Of a policy that is trained, or only kept, as `training` says."""
        parallelism = self.parallelism
        return ShardingOptions(
            param_dtype=getattr(torch, training.param_dtype),
            reduce_dtype=getattr(torch, training.reduce_dtype),
            reshard_after_forward=parallelism.reshard_after_forward,
            loss_parallel=parallelism.loss_parallel,
            async_tensor_parallel=parallelism.async_tensor_parallel,
            cpu_offload=training.cpu_offload,
            activation_checkpoint=self.activation_checkpoint,
            compile=self.compile,
            expert_mesh=expert_mesh,
            expert_tensor_parallel=parallelism.expert_tensor_parallel_degree > 1,
        )
