"""The training engine: gradients, steps, logprobs and checkpoints of one policy in any layout.

Every rank creates an engine and calls the same methods with the same arguments in the same order;
each rank takes its share of the samples, and all return the same numbers. A single process needs no
process group.

    engine = TrainingEngine.Config().build(
        model_spec=model_registry("0.6B"), hf_assets_path="/models/Qwen3-0.6B"
    )
    result = engine.forward_backward(samples)  # result.loss_mean, result.entropy_mean, ...
    engine.optim_step()                        # policy version 1
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from losses.types import Loss
from rl.config.configurable import Configurable
from rl.config.tree import check_bounds
from rl.distributed.mesh import get_stage_group
from rl.distributed.process_group import RankInfo, World, await_ranks, barrier
from rl.models.decoder import find_persistent_buffers
from rl.models.files.hf import HFFolder
from rl.models.spec import ModelSpec
from rl.trainer_types import ForwardBackwardResult, OptimParams, OptimStepResult
from rl.training.checkpoints.checkpointer import Checkpointer
from rl.training.checkpoints.export import export_hf, save_adapter
from rl.training.checks import check_trainer
from rl.training.config import Dtype, ExpertBalanceConfig, TrainerConfig, TrainingConfig
from rl.training.device_memory import explain_memory_errors, reset_peak_memory
from rl.training.failures import CheckpointError, raise_if_unwritten
from rl.training.gradients import STEPPED, GradientAccumulator
from rl.training.memory import estimate_memory
from rl.training.optimizer import LRSchedule, Optimizer
from rl.training.policy import Policy
from rl.training.reference import ReferencePolicy
from rl.types import LoopPosition, TrainingSample

logger = logging.getLogger(__name__)


class TrainingEngine(Configurable):
    """One policy in training. `policy_version` counts its optimizer steps.

    A call of `forward_backward` or `optim_step` that fails after it has started drops the whole
    accumulated gradient. With `optimizer.early_step_in_backward` parameters may have been stepped
    by then: only `load_checkpoint` mends that.

    Args:
        model_spec: model; a folder's sizes replace its own. None takes the family from it too.
        hf_assets_path: Hugging Face folder of config, weights and tokenizer; None draws random
            weights.
        device: None takes this process's GPU, or the CPU if there is none.
        world: None reads RANK, WORLD_SIZE and the other variables of torchrun.
        failure_folder: receives the batch of a loss that is not finite, and the collectives of
            a failure.
        rank: meshes to share with other engines of this process; None joins the process group.

    Raises:
        ValueError: the degrees do not fit the world size or the model, or the folder does not fit.
        TimeoutError: not all ranks appeared in time.
    """

    Config: TypeAlias = TrainerConfig

    optimizer: Optimizer
    schedule: LRSchedule
    checkpointer: Checkpointer

    def __init__(
        self,
        *,
        config: TrainerConfig,
        model_spec: ModelSpec | None,
        hf_assets_path: str | None,
        device: torch.device | str | None = None,
        world: World | None = None,
        failure_folder: str | None = None,
        rank: RankInfo | None = None,
    ) -> None:
        world = World.from_env() if world is None else world
        self.config = config
        self.hf_assets_path = hf_assets_path
        self.failure_folder = failure_folder
        self.device = world.default_device() if device is None else torch.device(device)

        # Everything that can be refused is refused before the ranks wait for each other.
        folder, self._spec = _open_assets(hf_assets_path, model_spec)
        self._degrees = check_trainer(
            config, spec=self._spec, world_size=world.size, device=self.device
        )
        self._owns_rank = rank is None
        self._rank = self._join_ranks(world) if rank is None else rank

        self.policy = self._make_policy(config.training)
        self.experts = _build_expert_balance(config.experts, self.policy)
        if folder is None:
            self.policy.init_weights()
        else:
            self.policy.load_hf(folder)
        # The reference copies the first weights, so it comes after they are there.
        self.reference = self._make_reference()

        self.optimizer = _build_optimizer(config.optimizer, self.policy)
        self.schedule: LRSchedule = config.lr_scheduler.build()
        self.checkpointer: Checkpointer = config.checkpoint.build(
            policy=self.policy,
            optimizer=self.optimizer,
            reference=self.reference,
            assets=hf_assets_path,
        )
        self.policy_version = 0
        self._gradient = GradientAccumulator(
            policy=self.policy,
            reference=self.reference,
            experts=self.experts,
            failure_folder=failure_folder,
        )
        if config.optimizer.early_step_in_backward:
            self._gradient.step_early_with(self._step_early)
        self._enable_gc_again = _stop_collections(config.training)

        # Ranks read weights at different speeds: only from here on a late rank is a lost rank.
        barrier()
        self._rank.set_timeout(config.comm.train_timeout_s)

    def _join_ranks(self, world: World) -> RankInfo:
        """Join the process group and return this rank's meshes."""
        config = self.config
        return RankInfo.join(
            self._degrees,
            world=world,
            device=self.device,
            comm=config.comm,
            # FSDP copies, so that one process needs a mesh too.
            always=config.training.cpu_offload,
            record_in=self.failure_folder,
        )

    def _make_policy(self, training: TrainingConfig) -> Policy:
        """Return a policy of this engine's model and layout, without values in its parameters."""
        config = self.config
        return Policy(
            training,
            spec=self._spec,
            parallelism=config.parallelism,
            activation_checkpoint=config.activation_checkpoint,
            compile_config=config.compile,
            converters=config.converters,
            rank=self._rank,
            device=self.device,
            print_after_conversion=config.print_after_conversion,
        )

    def _make_reference(self) -> ReferencePolicy | None:
        """Return the frozen copy of the first weights, or None if it is not configured."""
        if not self.config.reference.enable:
            return None
        return ReferencePolicy(self.policy, build=self._make_policy)

    def forward_backward(
        self,
        samples: Sequence[TrainingSample],
        *,
        loss: Loss | None = None,
        return_logprobs: bool | Sequence[int] = False,
        return_trained: bool | Sequence[int] = False,
    ) -> ForwardBackwardResult:
        """Add the gradient of the summed loss over `samples`; k calls on parts equal one call.

        Args:
            loss: None takes the configured loss.
            return_logprobs: True returns the logprobs of all samples on every rank; a sequence
                returns those of the samples at these indices, in this order.
            return_trained: the same of what the loss has read (`TrainedTokens`), which costs less.

        Raises:
            ValueError: there are no samples, a sample fits no micro-batch, the loss reads sequences
                and an episode's rows fit no micro-batch together, losses with and without a
                denominator are mixed, or an index is out of range.
            NonFiniteLossError: the summed loss is NaN or infinite.
        """
        with self._explain_memory_errors("forward_backward"):
            return self._gradient.add(
                samples,
                loss=self.config.loss if loss is None else loss,
                version=self.policy_version,
                return_logprobs=return_logprobs,
                return_trained=return_trained,
            )

    def forward(
        self, samples: Sequence[TrainingSample], *, loss: Loss | None = None
    ) -> ForwardBackwardResult:
        """Return the result of `forward_backward`, with logprobs, and leave the gradient unchanged.

        Raises:
            ValueError: there are no samples, or a sample fits no micro-batch.
            NonFiniteLossError: the summed loss is NaN or infinite.
        """
        loss = self.config.loss if loss is None else loss
        with self._explain_memory_errors("forward"):
            return self._gradient.evaluate(samples, loss=loss, version=self.policy_version)

    def optim_step(
        self, params: OptimParams | None = None, *, allow_empty: bool = False
    ) -> OptimStepResult:
        """Divide the gradient by the accumulated denominator, clip it, step and clear it.

        Args:
            params: settings for this step; `lr` replaces the schedule's.
            allow_empty: step with a gradient of zero if nothing is accumulated or no token was
                valid, so that the optimizer's running means and the weights decay.

        Raises:
            ValueError: nothing is accumulated, no token was valid, or a setting is out of range;
                the gradient is kept.
            NonFiniteLossError: the gradient's norm is NaN or infinite; nothing was updated, unless
                parameters were stepped early.
        """
        if params is not None and self.config.optimizer.early_step_in_backward:
            raise ValueError(f"optim_step({params}): must have no settings, because {STEPPED}")
        # What a caller may have done wrong is raised first: the gradient is still whole then.
        settings = self._make_settings(params)
        max_norm = self.config.training.max_norm
        if params is not None and params.max_norm is not None:
            check_bounds(params, "max_norm", above=0)
            max_norm = params.max_norm
        scale = self._gradient.scale(allow_empty=allow_empty)

        # A peak is that of a whole step: from here to the next step.
        reset_peak_memory(self.device)
        with (
            self._explain_memory_errors("optim_step"),
            self._gradient.drop_on_error(f"optim_step {self.policy_version}"),
        ):
            grad_norm = self._gradient.finish(
                scale=scale, max_norm=max_norm, version=self.policy_version
            )
            # Of parameters stepped early, none has a gradient left.
            self.optimizer.step(settings, version=self.policy_version)
            # Float8 computes the scales of the new weights here, in one collective.
            self.policy.converters.post_optimizer_hook(self.policy.model)
            if self.experts is not None:
                self.experts.step()
            rounding = None
            if self.config.training.dtype == "bfloat16":
                rounding = self.optimizer.rounding.reduce(mesh=self.policy.mesh)

        self.drop_gradient()
        self._gradient.has_stepped = False
        self.policy_version += 1
        self._collect_garbage()
        return OptimStepResult(
            grad_norm=grad_norm,
            lr=settings["lr"],
            policy_version=self.policy_version,
            rounding=rounding,
        )

    def _step_early(self, parameter: nn.Parameter) -> None:
        """Step one parameter inside the backward, with the settings of the step that is to come."""
        self.optimizer.step_one(parameter, self._make_settings(), version=self.policy_version)

    def _explain_memory_errors(self, call: str) -> AbstractContextManager[None]:
        # The estimate builds the model once more, so it is made only for an error.
        estimated = partial(
            estimate_memory,
            self.config,
            spec=self._spec,
            degrees=self._degrees,
            on_gpu=self.device.type == "cuda",
        )
        return explain_memory_errors(
            f"{call} of policy version {self.policy_version}",
            device=self.device,
            training=self.config.training,
            activation_checkpoint=self.config.activation_checkpoint,
            estimated=estimated,
        )

    def _make_settings(self, params: OptimParams | None = None) -> dict[str, Any]:
        """Return the optimizer's settings for the next step."""
        lr = self.config.optimizer.lr * self.schedule.compute_factor(self.policy_version)
        return self.optimizer.make_settings(lr=lr, params=params)

    def drop_gradient(self) -> None:
        self._gradient.drop()
        self.optimizer.rounding.forget()

    def compute_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """Return each sample's logprobs as float32 [T], or [T, K] for K targets, on every rank.

        Entry t is the logprob of token t in nats; entry 0 is 0.
        """
        with await_ranks("compute_logprobs", record_in=self.failure_folder):
            return self.policy.compute_logprobs(samples) if samples else []

    def compute_reference_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """Return `compute_logprobs` of the reference policy; raises ValueError if there is none."""
        if self.reference is None:
            raise ValueError(
                "there is no reference policy to ask: reference.enable is False, must be True"
            )
        with await_ranks("compute_reference_logprobs", record_in=self.failure_folder):
            return self.reference.policy.compute_logprobs(samples) if samples else []

    def save_checkpoint(
        self,
        folder: str,
        *,
        position: LoopPosition | None = None,
        model_only: bool = False,
        wait: bool = True,
    ) -> None:
        """Write a folder with weights, optimizer, version and random states (`Checkpointer.save`).

        Raises:
            FileExistsError: the folder exists.
            ValueError: a gradient is accumulated, which a checkpoint does not hold.
            CheckpointError: this save, or the background save before it, failed, or the weights are
                those of no step.
        """
        if self._gradient.num_calls:
            raise ValueError("save_checkpoint with a gradient accumulated: call optim_step first")
        self._check_version()
        with await_ranks(f"save_checkpoint of step {self.policy_version}"):
            self.checkpointer.save(
                folder,
                policy_version=self.policy_version,
                position=position,
                model_only=model_only,
                wait=wait,
            )

    def load_checkpoint(
        self, folder: str, *, model_only: bool = False, exclude: Sequence[str] | None = None
    ) -> int:
        """Load a checkpoint, a Hugging Face folder or a PEFT adapter; return the policy version.

        An accumulated gradient is dropped. `Checkpointer.load` says what each kind of folder sets.

        Raises:
            ValueError: the folder is of no known kind, incomplete, damaged or of another
                architecture, or it lacks the reference policy's weights.
        """
        self.drop_gradient()
        with await_ranks(f"load_checkpoint from {folder}"):
            self.policy_version = self.checkpointer.load(
                folder, policy_version=self.policy_version, model_only=model_only, exclude=exclude
            )
        # Weights that were between two versions are those of a version again.
        self._gradient.has_stepped = False
        return self.policy_version

    def export_hf(self, folder: str, *, dtype: Dtype | None = None) -> None:
        """Write a Hugging Face folder with the tokenizer of the assets.

        Args:
            dtype: dtype of the file; None takes `checkpoint.export_dtype`.

        Raises:
            FileExistsError: the folder exists and is not empty.
            CheckpointError: the folder could not be written, or the weights are those of no step;
                nothing remains.
        """
        self._check_version()
        stored_as = getattr(torch, dtype or self.config.checkpoint.export_dtype)
        with await_ranks(f"export_hf of step {self.policy_version}"), raise_if_unwritten(folder):
            export_hf(self.policy, folder, dtype=stored_as, tokenizer_from=self.hf_assets_path)

    def save_adapter(self, folder: str) -> None:
        """Write the LoRA adapters as a folder that PEFT opens.

        Raises:
            FileExistsError: the folder exists and is not empty.
            CheckpointError: the folder could not be written; nothing of it remains.
            ValueError: there is no LoRA among the converters.
        """
        self._check_version()
        with await_ranks(f"save_adapter of step {self.policy_version}"), raise_if_unwritten(folder):
            save_adapter(self.policy, folder)

    def model_state_dict(self, *, merge: bool = True) -> dict[str, Tensor]:
        """Return the plain model's parameters and persistent buffers by name.

        Names are those of the Decoder without converters: `layers.0.attention.qkv_proj.weight` is
        there, LoRA's factors are not: adapters are merged, or with `merge` False left out. What a
        mesh shards is a DTensor with this rank's shard. Parameters that no converter changes are
        the trained parameters themselves, detached and not copied: the next step changes them. A
        rank of a pipeline has the tensors of its stages.
        """
        self._check_version()
        with await_ranks("model_state_dict"):
            return self.policy.state_dict(merge=merge)

    def _check_version(self) -> None:
        """Raise CheckpointError if the weights are between two versions."""
        if self._gradient.has_stepped:
            raise CheckpointError(STEPPED)

    def buffer_names(self) -> set[str]:
        """Return the names in `model_state_dict` of buffers, which keep their dtype when pushed."""
        return set(find_persistent_buffers(self.policy.model))

    def close(self) -> None:
        """Wait for the background save, and leave the process group that this engine joined."""
        if self._enable_gc_again:
            gc.enable()
            self._enable_gc_again = False
        # Also after a failed save: a rank that stays in the group keeps the others waiting.
        try:
            self.checkpointer.close()
        finally:
            if self._owns_rank:
                self._rank.leave()

    def _collect_garbage(self) -> None:
        # By the version, which is the same on all ranks, so that all of them pause together.
        training = self.config.training
        if not training.gc_every_steps or self.policy_version % training.gc_every_steps:
            return
        started = time.perf_counter()
        num_objects = gc.collect()
        if training.gc_debug:
            time_s = time.perf_counter() - started
            text = "collected after step %d: %d objects, %.3f s"
            logger.info(text, self.policy_version, num_objects, time_s)


def _build_optimizer(config: Optimizer.Config, policy: Policy) -> Optimizer:
    """Return the optimizer of this rank's parameters."""
    # Stages of a pipeline have different parameters, so Muon shares its work within a stage.
    adapter, group = policy.spec.adapter(policy.spec.model), get_stage_group(policy.mesh)
    made: Optimizer = config.build(
        parameters=policy.trained_parameters,
        adapter=adapter,
        group=group,
        seed=policy.training.seed,
    )
    return made


def _stop_collections(training: TrainingConfig) -> bool:
    """Leave garbage collection to the engine if configured; return True if Python collected before.

    Python pauses one process at an unpredictable moment, for which all other ranks would wait, one
    pause after another. Collections at the same steps pause them together.
    """
    stops = training.gc_every_steps > 0 and gc.isenabled()
    if stops:
        gc.disable()
    return stops


def _open_assets(path: str | None, spec: ModelSpec | None) -> tuple[HFFolder | None, ModelSpec]:
    """Return the Hugging Face folder and the spec with the folder's sizes."""
    if path is None:
        if spec is None:
            raise ValueError(
                "hf_assets_path=None: must be a Hugging Face folder if model_spec is None"
            )
        return None, spec

    # The sizes of a folder win over the spec's: weights of other sizes could not be read.
    folder = HFFolder(path, tokenizer=True)
    if spec is None:
        return folder, folder.spec()
    return folder, replace(spec, model=spec.adapter.config_from_hf(folder.config))


def _build_expert_balance(config: ExpertBalanceConfig, policy: Policy) -> Any:
    """Return the `rl.training.experts.ExpertBalance` of a mixture, or None for a dense model."""
    if not policy.spec.model.has_experts:
        return None
    # Imported by name, so that a run of a dense model does not depend on the code of mixtures.
    balance = import_module("rl.training.experts").ExpertBalance
    return balance(
        config=config,
        parts=policy.parts,
        num_layers=policy.spec.model.num_layers,
        num_experts=policy.spec.model.num_experts,
        mesh=policy.mesh,
        device=policy.device,
        mask_real_tokens=policy.mask_real_tokens,
    )
