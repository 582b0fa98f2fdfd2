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
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from losses.grpo import GRPOLoss
from losses.types import Loss
from rl.config.configurable import Configurable
from rl.distributed import flight_recorder
from rl.distributed.activation_checkpoint import ActivationCheckpointConfig
from rl.distributed.compile import CompileConfig
from rl.distributed.mesh import ParallelismConfig, build_mesh
from rl.distributed.process_group import (
    CommConfig,
    World,
    awaiting,
    barrier,
    connect,
    disconnect,
    set_timeout,
)
from rl.models.buffers import persistent_buffers
from rl.models.hf import HFFolder
from rl.models.spec import ModelSpec
from rl.rollouts.packing import PackedBatch
from rl.training import checkpoint
from rl.training.accumulate import MicroBatchSums, StepState, loss_inputs
from rl.training.checkpoint import CheckpointConfig
from rl.training.config import Dtype, TrainingConfig
from rl.training.failures import non_finite
from rl.training.garbage import GarbageCollector
from rl.training.gradients import clip_factor, global_norm, scale_gradients, sum_partial_gradients
from rl.training.optimizer import Optimizer
from rl.training.reference import ReferenceConfig, make_reference, with_reference
from rl.training.schedule import LRSchedule
from rl.training.start import build_policy, check_start
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
        reference: ReferenceConfig = field(default_factory=ReferenceConfig)
        training: TrainingConfig = field(default_factory=TrainingConfig)
        checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
        activation_checkpoint: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
        compile: CompileConfig = field(default_factory=CompileConfig)

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
            failure_folder: receives the batch on which a loss was not finite, and the latest
                collectives when one failed.

        Raises:
            ValueError: degrees that do not multiply to the world size or do not divide the
                model, an incomplete folder or one of another architecture.
            TimeoutError: not all ranks appeared in time.
        """
        world = World.from_env() if world is None else world
        self.device = world.default_device() if device is None else torch.device(device)
        start = check_start(config, model_spec, hf_assets_path, world_size=world.size, device=self.device)
        self.config = config
        self.hf_assets_path = hf_assets_path
        self.failure_folder = failure_folder
        if failure_folder is not None:
            flight_recorder.name_file_of_watchdog(failure_folder)
        # What lives on the host is copied by FSDP, which wants a mesh, of one process too.
        offload = config.training.cpu_offload
        self._made_group = connect(world=world, device=self.device, comm=config.comm, always=offload)
        self.mesh = build_mesh(start.degrees, device_type=self.device.type, always=offload)
        build = partial(build_policy, config, start.spec, mesh=self.mesh, device=self.device)
        self.policy = build(config.training)
        if start.folder is None:
            self.policy.init_weights()
        else:
            self.policy.load_hf(start.folder)
        self.reference = make_reference(config.reference, policy=self.policy, build=build)
        self.optimizer: Optimizer = config.optimizer.build(
            parameters=self.policy.parameters, adapter=start.spec.adapter(start.spec.model)
        )
        self.schedule: LRSchedule = config.lr_scheduler.build()
        self.policy_version = 0
        self._step = StepState()
        self._garbage = GarbageCollector(
            every_steps=config.training.gc_every_steps, debug=config.training.gc_debug
        )
        barrier()
        set_timeout(self.mesh, timeout_s=config.comm.train_timeout_s)

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
        loss = self.config.loss if loss is None else loss
        batches = self.policy.pack(samples)
        sums = MicroBatchSums(device=self.device)
        with self._dropping_gradient_on_error(f"forward_backward of step {self.policy_version}"):
            for batch in with_reference(batches, reference=self.reference, loss=loss):
                self._accumulate(batch.to(self.device), loss, sums)
            totals = sums.reduce(mesh=self.mesh)
            self._step.add(samples=samples, denominator=totals.denominator)
            if not math.isfinite(totals.loss):
                self._stop_on_non_finite(f"loss {totals.loss}")
        return totals.result(samples, time_s=time.perf_counter() - started)

    def _accumulate(self, batch: PackedBatch, loss: Loss, sums: MicroBatchSums) -> None:
        logprobs_T, entropy_T = self.policy.forward(batch)
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
        self._drop_gradient()
        self.policy_version += 1
        self._garbage.after_step(self.policy_version)
        return OptimStepResult(
            grad_norm=grad_norm,
            lr=settings["lr"],
            policy_version=self.policy_version,
            time_s=time.perf_counter() - started,
        )

    def compute_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """[T] float32 nats for each sample, entry t of token t, entry 0 is 0; on every rank."""
        with awaiting("compute_logprobs", record_in=self.failure_folder):
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
                    folder, parameters=self.policy.parameters, optimizer=self.optimizer
                )
            else:
                self.policy.load_hf(HFFolder(folder))
                self.optimizer.reset()
                self.policy_version = 0
                if self.reference is not None:
                    self.reference.follow(self.policy)
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
        """The parameters themselves, without gradient, by name, DTensors wherever a mesh shards them;
        and the persistent buffers, which every rank has the same."""
        parameters = {name: parameter.detach() for name, parameter in self.policy.parameters.items()}
        return parameters | persistent_buffers(self.policy.model)

    def buffer_names(self) -> set[str]:
        """What of `model_state_dict` are buffers: they keep their dtype wherever the weights go."""
        return set(persistent_buffers(self.policy.model))

    def close(self) -> None:
        """Leave the process group that this engine joined."""
        self._garbage.close()
        if self._made_group:
            disconnect()
            self._made_group = False

    @contextmanager
    def _dropping_gradient_on_error(self, what: str) -> Iterator[None]:
        done = False
        try:
            with awaiting(what, record_in=self.failure_folder):
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

    def _stop_on_non_finite(self, what: str) -> NoReturn:
        """Save the samples of the step and raise; the quantity is the same on every rank."""
        raise non_finite(
            what,
            policy_version=self.policy_version,
            samples=self._step.samples,
            folder=self.failure_folder,
        )


def _max_norm(training: TrainingConfig, params: OptimParams | None) -> float:
    if params is None or params.max_norm is None:
        return training.max_norm
    if not params.max_norm > 0.0:
        raise ValueError(f"max_norm={params.max_norm}: must be above 0, or inf for no clipping")
    return params.max_norm
