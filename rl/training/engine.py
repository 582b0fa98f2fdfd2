"""The training engine: gradients, steps, logprobs and checkpoints of one policy, in any layout.

Every rank makes one and calls the same methods with the same arguments in the same order;
each takes its share of the samples and all return the same numbers. A single process needs
no process group.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from losses.grpo import GRPOLoss
from losses.types import Loss
from rl.config.configurable import Configurable
from rl.distributed.expert_parallel import build_expert_mesh
from rl.distributed.mesh import DataRank, ParallelismConfig, build_mesh
from rl.distributed.process_group import (
    CommConfig,
    World,
    awaiting,
    barrier,
    connect,
    disconnect,
    set_timeout,
)
from rl.distributed.seeds import seed_everything
from rl.distributed.sharding import ShardingOptions
from rl.models.hf import HFFolder
from rl.models.spec import ModelSpec
from rl.rollouts.packing import PackedBatch
from rl.training import checkpoint
from rl.training.accumulate import MicroBatchSums, StepState, loss_inputs
from rl.training.checkpoint import CheckpointConfig
from rl.training.config import Dtype, TrainingConfig
from rl.training.errors import NonFiniteLossError
from rl.training.experts import ExpertBalance, check_experts
from rl.training.failures import write_batch
from rl.training.gradients import clip_factor, global_norm, scale_gradients, sum_partial_gradients
from rl.training.optimizer import Optimizer
from rl.training.policy import Policy
from rl.training.schedule import LRSchedule
from rl.types import ForwardBackwardResult, OptimParams, OptimStepResult, TrainingSample


class TrainingEngine(Configurable):
    """One policy in training. `policy_version` counts its optimizer steps.

    A call of `forward_backward` or `optim_step` that fails on its way leaves no gradient
    accumulated, of earlier calls neither.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        optimizer: Optimizer.Config = field(default_factory=Optimizer.Config)
        lr_scheduler: LRSchedule.Config = field(default_factory=LRSchedule.Config)
        parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
        comm: CommConfig = field(default_factory=CommConfig)
        loss: Loss = field(default_factory=GRPOLoss)
        """Of `forward_backward` calls that bring none."""
        training: TrainingConfig = field(default_factory=TrainingConfig)
        checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
        experts: ExpertBalance.Config = field(default_factory=ExpertBalance.Config)

    def __init__(
        self,
        *,
        config: Config,
        model_spec: ModelSpec,
        hf_assets_path: str | None,
        device: torch.device | str | None = None,
        world: World | None = None,
        failure_folder: str | None = None,
    ) -> None:
        """
        Args:
            hf_assets_path: Hugging Face folder that gives sizes, weights and, to what is
                exported, the tokenizer; None draws the spec's model at random.
            device: None takes this process's GPU, or the CPU where there is none.
            world: None reads it from the environment.
            failure_folder: receives the batch on which a loss was not finite.

        Raises:
            ValueError: degrees that do not multiply to the world size or do not divide the
                model, an incomplete folder or one of another architecture.
            TimeoutError: not all ranks appeared in time.
        """
        world = World.from_env() if world is None else world
        degrees = config.parallelism.degrees(world.size)
        folder = None if hf_assets_path is None else HFFolder(hf_assets_path, tokenizer=True)
        if folder is not None:
            model_spec = replace(model_spec, model=model_spec.from_hf_config(folder.config))
        check_experts(model_spec.model, degrees=degrees, balance=config.experts)  # type: ignore[arg-type]
        self.config = config
        self.hf_assets_path = hf_assets_path
        self.failure_folder = failure_folder
        self.device = world.default_device() if device is None else torch.device(device)
        self._made_group = connect(world=world, device=self.device, comm=config.comm)
        self.mesh = build_mesh(degrees, device_type=self.device.type)
        self.expert_mesh = build_expert_mesh(self.mesh, degree=degrees.ep)
        self.policy = self._build_policy(model_spec)
        self.experts: ExpertBalance = config.experts.build(
            model=self.policy.model, mesh=self.mesh, device=self.device
        )
        if folder is None:
            self.policy.init_weights()
        else:
            self.policy.load_hf(folder)
        self.optimizer: Optimizer = config.optimizer.build(parameters=self.policy.parameters.values())
        self.schedule: LRSchedule = config.lr_scheduler.build()
        self.policy_version = 0
        self._step = StepState()
        barrier()
        for mesh in (self.mesh, self.expert_mesh):
            set_timeout(mesh, timeout_s=config.comm.train_timeout_s)

    def _build_policy(self, spec: ModelSpec) -> Policy:
        training = self.config.training
        seed_everything(
            training.seed, offset=DataRank.of(self.mesh).index, deterministic=training.deterministic
        )
        options = ShardingOptions(
            param_dtype=getattr(torch, training.param_dtype),
            reduce_dtype=getattr(torch, training.reduce_dtype),
            reshard_after_forward=self.config.parallelism.reshard_after_forward,
            expert_mesh=self.expert_mesh,
            expert_tensor_parallel=self.config.parallelism.expert_tensor_parallel_degree > 1,
        )
        return Policy(spec=spec, mesh=self.mesh, device=self.device, training=training, options=options)

    def forward_backward(
        self, samples: Sequence[TrainingSample], *, loss: Loss | None = None
    ) -> ForwardBackwardResult:
        """Add the gradient of the summed loss over `samples`; k calls on parts equal one call.

        Raises:
            ValueError: for no samples, one that does not fit a micro-batch, or a loss that
                asks for a denominator where an earlier one of this step did not.
            NonFiniteLossError: the summed loss is NaN or infinite.
        """
        started = time.perf_counter()
        if not samples:
            raise ValueError("forward_backward got no samples")
        batches = self.policy.pack(samples)
        sums = MicroBatchSums(device=self.device)
        with self._dropping_gradient_on_error(f"forward_backward of step {self.policy_version}"):
            for batch in batches:
                self._accumulate(batch.to(self.device), self.config.loss if loss is None else loss, sums)
            totals = sums.reduce(mesh=self.mesh)
            expert_load = self.experts.reduce()
            self._step.add(samples=samples, denominator=totals.denominator)
            if not math.isfinite(totals.loss):
                self._stop_on_non_finite(f"loss {totals.loss}")
        return totals.result(samples, time_s=time.perf_counter() - started, expert_load=expert_load)

    def _accumulate(self, batch: PackedBatch, loss: Loss, sums: MicroBatchSums) -> None:
        logprobs_T, entropy_T = self.policy.forward(batch)
        self.experts.count(self.policy.real_tokens(batch))
        inputs = loss_inputs(batch, logprobs_T)
        output = loss(inputs)
        self._step.check_denominator(output.denominator)
        # A micro-batch of padding alone goes backward too: FSDP's ranks reduce together.
        loss_sum = output.loss_sum if batch.num_sequences else 0.0 * logprobs_T.sum()
        loss_sum.backward()
        sums.add(inputs, output, entropy_T)

    def optim_step(self, params: OptimParams | None = None) -> OptimStepResult:
        """Divide by the accumulated denominator, clip, step, clear the gradient.

        Args:
            params: replaces settings for this step; its `lr` replaces the schedule's.

        Raises:
            ValueError: nothing is accumulated, no token was valid, or a setting is out of
                range; nothing was updated and the gradient is still there.
            NonFiniteLossError: the gradient's norm is NaN or infinite; nothing was updated.
        """
        started = time.perf_counter()
        lr = self.config.optimizer.lr * self.schedule.factor(self.policy_version)
        settings = self.optimizer.settings(lr=lr, params=params)
        max_norm = _max_norm(self.config.training, params)
        scale = self._step.scale()
        parameters = list(self.policy.parameters.values())
        with self._dropping_gradient_on_error(f"optim_step {self.policy_version}"):
            sum_partial_gradients(parameters)
            grad_norm = global_norm(parameters, mesh=self.mesh) * scale
            if not math.isfinite(grad_norm):
                self._stop_on_non_finite(f"gradient norm {grad_norm}")
            scale_gradients(parameters, scale * clip_factor(grad_norm, max_norm=max_norm))
            self.optimizer.step(settings)
            self.experts.step()
        self._drop_gradient()
        self.policy_version += 1
        return OptimStepResult(
            grad_norm=grad_norm,
            lr=settings["lr"],
            policy_version=self.policy_version,
            time_s=time.perf_counter() - started,
        )

    def compute_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """[T] float32 nats for each sample, entry t of token t, entry 0 is 0; on every rank."""
        with awaiting("compute_logprobs"):
            return self.policy.logprobs(samples) if samples else []

    def save_checkpoint(self, folder: str) -> None:
        """Write weights, optimizer, version and random states; the folder appears whole or not at all.

        Raises:
            FileExistsError: the folder is already there.
            ValueError: a gradient is accumulated, which a checkpoint does not hold.
        """
        if self._step.num_calls:
            raise ValueError("save_checkpoint with a gradient accumulated: call optim_step first")
        with awaiting(f"save_checkpoint of step {self.policy_version}"):
            checkpoint.save(
                folder,
                parameters=self.policy.parameters,
                buffers=self.policy.buffers,
                optimizer=self.optimizer,
                policy_version=self.policy_version,
            )

    def load_checkpoint(self, folder: str) -> int:
        """Continue from a folder of `save_checkpoint`, or start at step 0 from a Hugging Face one.

        An accumulated gradient is dropped. Returns the policy version.

        Raises:
            ValueError: the folder is neither, is incomplete, or is of another architecture.
        """
        self._drop_gradient()
        with awaiting(f"load_checkpoint from {folder}"):
            if checkpoint.is_checkpoint(folder):
                self.policy_version = checkpoint.load(
                    folder,
                    parameters=self.policy.parameters,
                    buffers=self.policy.buffers,
                    optimizer=self.optimizer,
                )
            else:
                self.policy.load_hf(HFFolder(folder))
                self.optimizer.reset()
                self.policy_version = 0
        return self.policy_version

    def export_hf(self, folder: str, *, dtype: Dtype | None = None) -> None:
        """Write a Hugging Face folder, with the tokenizer of the assets where there are any.

        Args:
            dtype: of the file; None takes `checkpoint.export_dtype`.

        Raises:
            FileExistsError: the folder is there and not empty.
        """
        stored_as = getattr(torch, dtype or self.config.checkpoint.export_dtype)
        with awaiting(f"export_hf of step {self.policy_version}"):
            self.policy.export_hf(folder, dtype=stored_as, tokenizer_from=self.hf_assets_path)

    def model_state_dict(self) -> dict[str, Tensor]:
        """The parameters themselves, without gradient, by name, and the persistent buffers.

        DTensors wherever a mesh shards them.
        """
        parameters = {name: parameter.detach() for name, parameter in self.policy.parameters.items()}
        return parameters | self.policy.buffers

    def close(self) -> None:
        """Leave the process group that this engine joined."""
        if self._made_group:
            disconnect()
            self._made_group = False

    @contextmanager
    def _dropping_gradient_on_error(self, what: str) -> Iterator[None]:
        done = False
        try:
            with awaiting(what):
                yield
            done = True
        finally:
            if not done:
                self.policy.release()
                self._drop_gradient()

    def _drop_gradient(self) -> None:
        for parameter in self.policy.parameters.values():
            parameter.grad = None
        self._step = StepState()
        self.experts.forget()

    def _stop_on_non_finite(self, what: str) -> NoReturn:
        """Save the samples of the step and raise; the quantity is the same on every rank."""
        file = None
        if self.failure_folder is not None:
            file = Path(self.failure_folder) / f"nan_batch_version_{self.policy_version}.npz"
            if self.mesh is None or dist.get_rank() == 0:
                write_batch(file, self._step.samples)
        raise NonFiniteLossError(what, self.policy_version, None if file is None else str(file))


def _max_norm(training: TrainingConfig, params: OptimParams | None) -> float:
    if params is None or params.max_norm is None:
        return training.max_norm
    if not params.max_norm > 0.0:
        raise ValueError(f"max_norm={params.max_norm}: must be above 0, or inf for no clipping")
    return params.max_norm
