"""The training engine: gradients, steps, logprobs and checkpoints of one policy, in any layout.

Every rank makes one and calls the same methods with the same arguments in the same order;
each takes its share of the samples and all return the same numbers. A single process needs
no process group.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from losses.types import Loss
from rl.config.configurable import Configurable
from rl.distributed.process_group import (
    World,
    awaiting,
    barrier,
)
from rl.models.buffers import persistent_buffers
from rl.models.hf import HFFolder
from rl.models.spec import ModelSpec
from rl.training.checkpointer import Checkpointer
from rl.training.config import Dtype, TrainingConfig
from rl.training.engine_config import EngineConfig
from rl.training.errors import unwritten
from rl.training.experts import ExpertBalance
from rl.training.garbage import GarbageCollector
from rl.training.gradient_accumulator import GradientAccumulator
from rl.training.optimizer import Optimizer
from rl.training.place import Place
from rl.training.policy import Policy
from rl.training.reference import make_reference, there
from rl.training.schedule import LRSchedule
from rl.training.starting_weights import StartingWeights
from rl.types import ForwardBackwardResult, LoopPosition, OptimParams, OptimStepResult, TrainingSample

logger = logging.getLogger(__name__)


class TrainingEngine(Configurable):
    """One policy in training. `policy_version` counts its optimizer steps.

    A call of `forward_backward` or `optim_step` that fails on its way leaves no gradient
    accumulated, of earlier calls neither.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(EngineConfig):
        pass

    def __init__(
        self,
        *,
        config: Config,
        model_spec: ModelSpec,
        hf_assets_path: str | None,
        device: torch.device | str | None = None,
        world: World | None = None,
        failure_folder: str | None = None,
        place: Place | None = None,
    ) -> None:
        """
        Args:
            hf_assets_path: Hugging Face folder of sizes, weights and tokenizer; None draws a random model.
            device: None takes this process's GPU, or the CPU where there is none.
            world: None reads it from the environment.
            failure_folder: receives the batch of a loss that is not finite, and collectives of a failure.
            place: of several engines, taken and left by their owner; None takes one for this engine.

        Raises:
            ValueError: degrees that do not multiply to the world size or do not divide the
                model, an incomplete folder or one of another architecture.
            TimeoutError: not all ranks appeared in time.
        """
        world = World.from_env() if world is None else world
        self.device = world.default_device() if device is None else torch.device(device)
        folder, model_spec = _of_folder(hf_assets_path, model_spec)
        degrees = config.check(model_spec, world_size=world.size, device=self.device)
        self.config = config
        self.hf_assets_path = hf_assets_path
        self.failure_folder = failure_folder
        self._place = Place.take(
            config, degrees=degrees, world=world, device=self.device, record_in=failure_folder, shared=place
        )
        self.mesh = self._place.mesh
        make_policy = partial(self._place.make_policy, model_spec)
        self.policy = make_policy(config.training)
        self.experts: ExpertBalance = config.experts.build(
            model=self.policy.model, mesh=self.mesh, device=self.device
        )
        _set_weights(self.policy, folder)
        self.reference = make_reference(config.reference, policy=self.policy, build=make_policy)
        self.optimizer: Optimizer = config.optimizer.build(
            parameters=self.policy.trained_parameters, adapter=self.policy.trained_adapter
        )
        self.schedule: LRSchedule = config.lr_scheduler.build()
        self.checkpointer: Checkpointer = config.checkpoint.build(
            policy=self.policy, optimizer=self.optimizer
        )
        self._start = StartingWeights(folder, checkpointer=self.checkpointer, reference=self.reference)
        self.policy_version = 0
        self._gradient = GradientAccumulator(
            policy=self.policy, reference=self.reference, experts=self.experts, failure_folder=failure_folder
        )
        self._step = self._gradient.state
        self._garbage = GarbageCollector(
            every_steps=config.training.gc_every_steps, debug=config.training.gc_debug
        )
        barrier()
        self._place.set_timeout(config.comm.train_timeout_s)

    def forward_backward(
        self,
        samples: Sequence[TrainingSample],
        *,
        loss: Loss | None = None,
        return_logprobs: bool | Sequence[int] = False,
    ) -> ForwardBackwardResult:
        """Add the gradient of the summed loss over `samples`; k calls on parts equal one call.

        Args:
            return_logprobs: with those of all targets in the result, on every rank; or of the samples at
                these places alone, in this order.

        Raises:
            ValueError: no samples, one that fits no micro-batch, losses with and without a denominator, or
                logprobs of a sample that is not there.
            NonFiniteLossError: the summed loss is NaN or infinite.
        """
        return self._gradient.add(
            samples,
            loss=self.config.loss if loss is None else loss,
            version=self.policy_version,
            return_logprobs=return_logprobs,
        )

    def forward(
        self, samples: Sequence[TrainingSample], *, loss: Loss | None = None
    ) -> ForwardBackwardResult:
        """What `forward_backward` would return, with logprobs; the gradient stays as it is.

        Raises:
            ValueError: no samples, or one that fits no micro-batch.
            NonFiniteLossError: the summed loss is NaN or infinite.
        """
        loss = self.config.loss if loss is None else loss
        return self._gradient.evaluate(samples, loss=loss, version=self.policy_version)

    def optim_step(self, params: OptimParams | None = None, *, allow_empty: bool = False) -> OptimStepResult:
        """Divide by the accumulated denominator, clip, step, clear the gradient.

        Args:
            params: replaces settings for this step; its `lr` replaces the schedule's.
            allow_empty: where nothing is accumulated, or no token was valid, step with a gradient of zero:
                the optimizer's running means decay, and so do the weights.

        Raises:
            ValueError: nothing is accumulated, no token was valid, or a setting is out of range; all stays.
            NonFiniteLossError: the gradient's norm is NaN or infinite; nothing was updated.
        """
        started = time.perf_counter()
        lr = self.config.optimizer.lr * self.schedule.factor(self.policy_version)
        settings = self.optimizer.settings(lr=lr, params=params)
        max_norm = _max_norm(self.config.training, params)
        scale = self._step.scale(allow_empty=allow_empty)
        with self._gradient.dropped_on_error(f"optim_step {self.policy_version}"):
            grad_norm = self._gradient.finish(scale=scale, max_norm=max_norm, version=self.policy_version)
            self.optimizer.step(settings)
            self.policy.converters.post_optimizer_hook(self.policy.model)
            self.experts.step()
        self.drop_gradient()
        self.policy_version += 1
        self._garbage.after_step(self.policy_version)
        return OptimStepResult(
            grad_norm=grad_norm,
            lr=settings["lr"],
            policy_version=self.policy_version,
            time_s=time.perf_counter() - started,
        )

    def drop_gradient(self) -> None:
        """Forget what `forward_backward` has accumulated since the last step."""
        self._gradient.drop()

    def compute_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """[T] float32 nats for each sample, entry t of token t, entry 0 is 0; on every rank.

        [T, K] for a sample with K targets.
        """
        with awaiting("compute_logprobs", record_in=self.failure_folder):
            return self.policy.logprobs(samples) if samples else []

    def compute_reference_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """The same, of the frozen reference policy; raises ValueError where reference.enable is False."""
        with awaiting("compute_reference_logprobs", record_in=self.failure_folder):
            return there(self.reference).logprobs(samples) if samples else []

    def save_checkpoint(
        self,
        folder: str,
        *,
        position: LoopPosition | None = None,
        model_only: bool = False,
        wait: bool = True,
        attachments: Mapping[str, bytes] | None = None,
    ) -> None:
        """Let a folder with weights, optimizer, version and random states appear, as `Checkpointer.save`.

        Raises:
            FileExistsError: the folder is already there.
            ValueError: a gradient is accumulated, which a checkpoint does not hold.
            CheckpointError: it could not be written, or the one before that was in the background.
        """
        if self._step.num_calls:
            raise ValueError("save_checkpoint with a gradient accumulated: call optim_step first")
        state = self._start.saved_state(self.policy_version, position=position, model_only=model_only)
        with awaiting(f"save_checkpoint of step {self.policy_version}"):
            self.checkpointer.save(folder, state, wait=wait, attachments=attachments)

    def load_checkpoint(
        self, folder: str, *, model_only: bool = False, exclude: Sequence[str] | None = None
    ) -> int:
        """Continue from a folder of `save_checkpoint`, or start at step 0 from a Hugging Face one or,
        with the weights that are loaded, from an adapter in PEFT's format.

        An accumulated gradient is dropped. Where the policy starts at step 0, so does the reference policy,
        else it is that of the run that saved. Returns the policy version.

        Raises:
            ValueError: the folder is none of these, incomplete, damaged or of another architecture, or
                the reference policy's weights are gone.
        """
        self.drop_gradient()
        with awaiting(f"load_checkpoint from {folder}"):
            self.policy_version = self._start.load(
                folder, policy_version=self.policy_version, model_only=model_only, exclude=exclude
            )
        return self.policy_version

    def export_hf(self, folder: str, *, dtype: Dtype | None = None) -> None:
        """Write a Hugging Face folder, with the tokenizer of the assets where there are any.

        Args:
            dtype: of the file; None takes `checkpoint.export_dtype`.

        Raises:
            FileExistsError: the folder is there and not empty.
            CheckpointError: it could not be written; nothing of it remains.
        """
        stored_as = getattr(torch, dtype or self.config.checkpoint.export_dtype)
        with awaiting(f"export_hf of step {self.policy_version}"), unwritten(folder):
            self.policy.export_hf(folder, dtype=stored_as, tokenizer_from=self.hf_assets_path)

    def save_adapter(self, folder: str) -> None:
        """Write LoRA's adapters as a folder that PEFT opens.

        Raises:
            FileExistsError: the folder is there and not empty.
            CheckpointError: it could not be written; nothing of it remains.
            ValueError: there is no LoRA among the converters.
        """
        with awaiting(f"save_adapter of step {self.policy_version}"), unwritten(folder):
            self.policy.save_adapter(folder)

    def model_state_dict(self) -> dict[str, Tensor]:
        """The plain model's parameters by name, without gradient, DTensors wherever a mesh shards them;
        and the persistent buffers, which every rank has the same.

        The parameters themselves, except where a converter has its part in them: LoRA's are merged.
        """
        with awaiting("model_state_dict"):
            return dict(self.policy.plain_tensors()) | persistent_buffers(self.policy.model)

    def buffer_names(self) -> set[str]:
        """What of `model_state_dict` are buffers: they keep their dtype wherever the weights go."""
        return set(persistent_buffers(self.policy.model))

    def close(self) -> None:
        """Wait for a checkpoint being written, and leave the process group that this engine joined."""
        self._garbage.close()
        try:
            self.checkpointer.close()
        finally:
            self._place.leave()


def _of_folder(path: str | None, spec: ModelSpec) -> tuple[HFFolder | None, ModelSpec]:
    """A Hugging Face folder, and a model of its sizes; `spec` as it is where there is none."""
    if path is None:
        return None, spec
    folder = HFFolder(path, tokenizer=True)
    return folder, replace(spec, model=spec.from_hf_config(folder.config))


def _set_weights(policy: Policy, folder: HFFolder | None) -> None:
    """Those of the folder, or drawn ones."""
    if folder is None:
        policy.init_weights()
    else:
        policy.load_hf(folder)


def _max_norm(training: TrainingConfig, params: OptimParams | None) -> float:
    if params is None or params.max_norm is None:
        return training.max_norm
    if not params.max_norm > 0.0:
        raise ValueError(f"max_norm={params.max_norm}: must be above 0, or inf for no clipping")
    return params.max_norm
