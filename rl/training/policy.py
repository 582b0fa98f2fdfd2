"""The model in training, in its layout: what it says of tokens, and its weights in and out.

Shape legend: T packed tokens of one micro-batch, K targets of each where there are several.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rl.distributed.compile import compile_function
from rl.distributed.context_parallel import ContextParallel
from rl.distributed.mesh import CP, TP, DataRank
from rl.distributed.process_group import barrier
from rl.distributed.sharding import ShardingOptions, call_in_dtype, materialize, reshard
from rl.distributed.shards import local_shard_of, local_tensor, whole_tensor
from rl.models.attention import Segments, SequenceLayout, SequenceShare
from rl.models.batch_invariant.model import make_batch_invariant, row_multiple
from rl.models.buffers import reset_buffers
from rl.models.converters.converter import ModelConverters
from rl.models.converters.lora import LoRA
from rl.models.converters.peft_folder import write_peft_folder
from rl.models.hf import HFFolder, hf_buffers, read_parameters, write_hf_folder
from rl.models.logprobs import logprobs_of_chunk, token_logprobs
from rl.models.qwen3_moe.model import Router
from rl.models.spec import ModelSpec, StateDictAdapter
from rl.observability.activity import doing
from rl.rollouts.packing import PackedBatch, pack
from rl.training.config import TrainingConfig
from rl.training.token_values import TokenValues
from rl.types import TrainingSample

logger = logging.getLogger(__name__)

TokenHead = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Logprobs and entropies of hidden states and the head's weight."""


class Policy:
    """Made on the meta device and sharded there; nothing whole but one tensor at a time is ever held.

    Its parameters are not set until `load_hf` or `init_weights`.
    """

    def __init__(
        self,
        *,
        spec: ModelSpec,
        mesh: DeviceMesh | None,
        device: torch.device,
        training: TrainingConfig,
        options: ShardingOptions,
        converters: ModelConverters,
    ) -> None:
        """`mesh` None is a single process.

        Raises:
            ValueError: for sizes that the mesh does not divide, or what a converter cannot do.
        """
        self.spec = spec
        self.mesh = mesh
        self.device = device
        self.data_rank = DataRank.of(mesh)
        self.training = training
        self.context = None if mesh is None else ContextParallel.of(mesh[CP])
        """How this rank shares its micro-batches with others; None where it has them alone."""
        self.converters = converters
        self._param_dtype = options.param_dtype
        self._loss_parallel = options.loss_parallel
        self._chunk_logprobs = compile_function(logprobs_of_chunk, options.compile)
        with torch.device("meta"):
            model: nn.Module = spec.model.build().to(getattr(torch, training.dtype))
            make_batch_invariant(model, spec=spec, device=device)
            converters.convert(model)
        trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        self.model = spec.parallelize(model, mesh=mesh, config=options)
        for name, parameter in self.model.named_parameters():
            # PyTorch's plan for norms makes new parameters, which would be trained though they were frozen.
            parameter.requires_grad_(trained[name])
        materialize(self.model, device=device, cpu_offload=options.cpu_offload)
        reset_buffers(self.model)
        self.parameters: dict[str, nn.Parameter] = dict(self.model.named_parameters())
        """By name, this rank's shards, frozen ones too."""
        self._shares_prompts = training.share_prompts and _can_share_prompts(self, options)
        self._loaded_from: str | None = None
        """Hugging Face folder that the plain model's weights were read from."""

    @property
    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """The ones that get gradients and are stepped, by name."""
        return {name: p for name, p in self.parameters.items() if p.requires_grad}

    @property
    def base_model(self) -> str | None:
        """Hugging Face folder that the plain model's weights, all frozen, came from; None where some are
        trained or they came from elsewhere."""
        if any(self.parameters[name].requires_grad for name in self.converters.plain_names):
            return None
        return self._loaded_from

    def weights_restored(self, names: Collection[str], *, base_model: str | None) -> None:
        """A checkpoint has just set these parameters and buffers; `base_model` is what it was saved with."""
        loaded = [name in names for name in self.converters.plain_names]
        if any(loaded):
            self._loaded_from = base_model if all(loaded) else None
        self.converters.weights_loaded(self.model, fresh=False)

    @property
    def trained_adapter(self) -> StateDictAdapter:
        """Which matrices they are made of, those of converters too."""
        return self.converters.adapter(self.spec.adapter(self.spec.model))

    @property
    def micro_batch_room(self) -> int:
        """Tokens that one micro-batch of every data-parallel rank can hold together."""
        return self.training.max_tokens_per_microbatch * self.data_rank.count

    def pack(self, samples: Sequence[TrainingSample]) -> list[PackedBatch]:
        """This rank's micro-batches, equally many on every rank.

        Raises:
            ValueError: as `rl.rollouts.packing.pack`, or a target is no token of the vocabulary.
        """
        _check_targets(samples, vocab_size=self.spec.model.vocab_size)  # type: ignore[attr-defined]
        with doing("pack"):
            return pack(
                samples,
                max_tokens=self.training.max_tokens_per_microbatch,
                max_sequences=self.training.max_sequences_per_microbatch,
                max_length=self.training.max_sequence_length or num_positions(self.spec),
                pad_multiple=_pad_multiple(self),
                share_prompts=self._shares_prompts,
                rank=self.data_rank.index,
                num_ranks=self.data_rank.count,
            )

    def forward(self, batch: PackedBatch, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Logprob of each target, [T] or [T, K] float32 with gradient, and entropy, [T] float32; nats. The
        entropy has a gradient if that is asked for."""
        if self.context is None:
            head = self._head(batch.targets, batch.temperatures, entropy_gradient)
            return self._forward(batch.input_ids, batch.positions, batch.sequences, head)
        num_tokens = batch.input_ids.numel()
        mine_t = self.context.token_indices(num_tokens).to(self.device)
        share = SequenceShare.from_lengths(batch.all_lengths, context=self.context, device=self.device)
        head = self._head(batch.targets[mine_t], batch.temperatures[mine_t], entropy_gradient)
        values = self._forward(batch.input_ids[mine_t], batch.positions[mine_t], share, head)
        places_T = self.context.places(num_tokens).to(self.device)
        logprobs_T, entropy_T = (self.context.gather(value_t, places_T) for value_t in values)
        return logprobs_T, entropy_T

    def _head(self, targets_T: Tensor, temperatures_T: Tensor, entropy_gradient: bool) -> TokenHead:
        return partial(
            token_logprobs,
            targets_T=targets_T,
            temperatures_T=temperatures_T,
            chunk_tokens=self.training.logits_chunk_tokens,
            loss_parallel=self._loss_parallel,
            chunk_logprobs=self._chunk_logprobs,
            entropy_gradient=entropy_gradient,
        )

    def _forward(
        self, input_ids: Tensor, positions: Tensor, sequences: SequenceLayout | Segments, head: TokenHead
    ) -> tuple[Tensor, Tensor]:
        """Of this rank's tokens."""
        return call_in_dtype(
            self.model, self._param_dtype, input_ids, positions=positions, sequences=sequences, head=head
        )

    def real_tokens(self, batch: PackedBatch) -> Tensor:
        """[t] bool: which of the tokens that this rank takes through the model are no padding."""
        real_T = batch.sequence_ids < batch.num_sequences
        if self.context is None:
            return real_T
        return real_T[self.context.token_indices(real_T.numel()).to(self.device)]

    def release(self) -> None:
        """Free what a forward without a backward has left gathered."""
        reshard(self.model)

    @torch.no_grad()
    def logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """[T] float32 nats for each sample, entry t of token t, entry 0 is 0; on every rank.

        [T, K] for a sample with K targets.
        """
        values = token_values_of(self, samples)
        for batch in self.pack(samples):
            logprobs_T, _ = self.forward(batch.to(self.device))
            values.add(batch, logprobs_T)
        self.release()
        return values.collect()

    def init_weights(self) -> None:
        """Draw weights from the configured seed, the same in every layout and with any converters."""
        names = set(self.converters.plain_names)
        self.model.init_weights(seed=self.training.seed, names=names)  # type: ignore[operator]
        self.converters.weights_loaded(self.model, fresh=True)

    @torch.no_grad()
    def load_hf(self, folder: HFFolder) -> None:
        """Fill the parameters from a folder; every rank reads and slices, without communication.

        Raises:
            ValueError: naming what is missing, unknown, or of another architecture.
        """
        config = self.spec.from_hf_config(folder.config)
        if config != self.spec.model:
            raise ValueError(
                f"{folder.path}: a checkpoint of another architecture or size: its config is {config}, "
                f"the model's {self.spec.model}"
            )
        adapter = self.spec.adapter(self.spec.model)
        names = self.converters.plain_names
        folder.check(self.model, adapter, names=set(names))
        for name, whole in read_parameters(folder, adapter, names):
            parameter = self.parameters[name]
            local_tensor(parameter).copy_(local_shard_of(whole, parameter))
        buffers = hf_buffers(self.model, adapter)
        for buffer in buffers.values():
            buffer.zero_()
        for name, whole in read_parameters(folder, adapter, folder.present(buffers, adapter)):
            buffers[name].copy_(whole)
        self._loaded_from = str(folder.path.expanduser().absolute())
        self.converters.weights_loaded(self.model, fresh=True)

    def export_hf(self, folder: str | Path, *, dtype: torch.dtype, tokenizer_from: str | None) -> None:
        """Write the plain model as a Hugging Face folder, from rank 0; every rank gathers along.

        Raises:
            FileExistsError: the folder is there and not empty.
        """
        adapter = self.spec.adapter(self.spec.model)
        # Without a number in it, a buffer says what its absence does, and others know the model without it.
        buffers = {name: b for name, b in hf_buffers(self.model, adapter).items() if b.any()}
        plain = chain(self.plain_tensors(), buffers.items())
        tensors = ((name, whole_tensor(tensor)) for name, tensor in plain)
        with self._gathering(tensors) as writes:
            if writes:
                write_hf_folder(folder, tensors, adapter, dtype=dtype, tokenizer_from=tokenizer_from)

    def plain_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """The model without its converters (adapters merged), in this layout; the parameters themselves
        where no converter changed them. One at a time: every rank goes through all."""
        return self.converters.plain_tensors(self.parameters)

    def save_adapter(self, folder: str | Path) -> None:
        """Write the adapters of LoRA in PEFT's format, from rank 0; every rank gathers along.

        Raises:
            FileExistsError: the folder is there and not empty.
            ValueError: there is no LoRA among the converters.
        """
        lora = self.lora
        factors = lora.peft_factors()
        with self._gathering(factors) as writes:
            if writes:
                write_peft_folder(folder, factors, lora.peft_settings(base_model=self.base_model))
                if self.base_model is None:
                    logger.warning(
                        "adapter %s: it is not known of which Hugging Face folder its base weights are, so "
                        "none is named in it (docs/converters.md)",
                        folder,
                    )

    @property
    def lora(self) -> LoRA:
        """Raises ValueError where there is none."""
        for converter in self.converters.members:
            if isinstance(converter, LoRA):
                return converter
        raise ValueError("converters has no LoRA: there is no adapter to save or to load")

    @contextmanager
    def _gathering(self, gathered: Iterable[object]) -> Iterator[bool]:
        """Whether this rank is the one that writes, and so steps through what all ranks gather."""
        try:
            yield self.mesh is None or dist.get_rank() == 0
        finally:
            # The other ranks gather here, and so does the first after an error, with which it alone ends.
            for _ in gathered:
                pass
        barrier()


def token_values_of(
    policy: Policy, samples: Sequence[TrainingSample], places: Sequence[int] | None = None
) -> TokenValues:
    """What receives numbers of a policy's micro-batches, and returns them by sample; `places` as there."""
    rank, alone = policy.data_rank, policy.mesh is None
    return TokenValues(samples, places=places, data_rank=rank, device=policy.device, is_alone=alone)


def _check_targets(samples: Sequence[TrainingSample], *, vocab_size: int) -> None:
    for index, sample in enumerate(samples):
        if sample.targets is None or sample.targets.size == 0:
            continue
        targets = sample.targets[1:]
        outside = targets[(targets < 0) | (targets >= vocab_size)]
        if outside.size:
            raise ValueError(
                f"sample {index}: targets has {outside[0]}: must be token ids of 0 to {vocab_size - 1}"
            )


def _can_share_prompts(policy: Policy, options: ShardingOptions) -> bool:
    is_compiled = options.compile.enable and "model" in options.compile.components
    # A prompt's tokens count for the balance of experts as often as there are samples of it.
    has_experts = any(isinstance(module, Router) for module in policy.model.modules())
    return policy.context is None and not is_compiled and not has_experts


def _pad_multiple(policy: Policy) -> int:
    """Of the tokens that one rank takes through the model."""
    split = 1 if policy.mesh is None else policy.mesh[TP].size()
    multiple = math.lcm(split, row_multiple(policy.spec), policy.converters.token_multiple)
    return multiple if policy.context is None else policy.context.pad_multiple(multiple)


def num_positions(spec: ModelSpec) -> int:
    """Tokens of the longest sample that the model has positions for."""
    return spec.model.rope.max_positions  # type: ignore[attr-defined]


def check_sequence_length(spec: ModelSpec, training: TrainingConfig) -> None:
    """Raise ValueError if samples may be longer than the model has positions for."""
    length = training.max_sequence_length
    if length is not None and length > num_positions(spec):
        raise ValueError(
            f"max_sequence_length={length}: must be at most {num_positions(spec)}, the positions of "
            f"{spec.name} {spec.flavor}"
        )
