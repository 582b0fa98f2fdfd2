"""The model in training: weights from and to files, packing, forward pass and logprobs in any parallel layout.

Shape legend: T packed tokens of one micro-batch, t the tokens of this context-parallel rank, K targets of each
token where there are several.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl.distributed.compile import compile_function
from rl.distributed.context_parallel import ContextParallel
from rl.distributed.mesh import CP, TP, DataRank
from rl.distributed.process_group import RankInfo, barrier
from rl.distributed.sharding import (
    ShardingOptions,
    call_in_dtype,
    local_shard_of,
    local_tensor,
    materialize,
    reshard,
    whole_tensor,
)
from rl.models.attention import SequenceLayout
from rl.models.batch_invariant.model import make_batch_invariant, row_multiple
from rl.models.converter import ModelConverters
from rl.models.decoder import Decoder, reset_buffers
from rl.models.hf import HFFolder, hf_buffers, read_parameters, write_hf_folder
from rl.models.logprobs import logprobs_of_chunk, token_logprobs
from rl.models.lora import LoRA
from rl.models.parallelize import parallelize_decoder
from rl.models.peft import write_peft_folder
from rl.models.spec import ModelSpec
from rl.observability.spans import span
from rl.rollouts.packing import PackedBatch, pack
from rl.training.config import TrainingConfig
from rl.types import TrainingSample
from rl.utils.malloc import give_back_freed_memory, keep_freed_memory
from rl.utils.processes import seed_everything

if TYPE_CHECKING:
    from rl.training.engine import TrainingEngine

logger = logging.getLogger(__name__)

FORWARDS_BETWEEN_TRIMS = 16
"""Forwards on a CPU after which holes in the freed memory are given back: 40 steps of 2 micro-batches of SmolLM2 left
6 GiB of them."""

TokenHead = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Policy:
    """A model, built on the meta device, converted, sharded, and only then given memory.

    Its parameters hold no values until `load_hf` or `init_weights`.
    """

    def __init__(
        self,
        config: TrainingEngine.Config,
        training: TrainingConfig,
        *,
        spec: ModelSpec,
        rank: RankInfo,
        device: torch.device,
    ) -> None:
        """Build one rank's part of the model; `training` replaces the config's.

        Raises ValueError if the mesh does not divide the model, or a converter does not fit it.
        """
        mesh = rank.mesh
        self.spec = spec
        self.mesh = mesh
        self.device = device
        self.data_rank = DataRank.of(mesh)
        self.training = training
        self.context = None if mesh is None else ContextParallel.of(mesh[CP])
        """Share of this rank in its micro-batches; None without context parallelism."""
        self._num_forwards = 0
        degrees = config.parallelism.degrees(1 if mesh is None else mesh.size())
        self.converters = ModelConverters(config.converters, spec=spec, degrees=degrees, device=device)
        self.loaded_from: str | None = None
        """Hugging Face folder of the plain model's weights, if all came from one."""
        self._options = ShardingOptions(
            parallelism=config.parallelism,
            param_dtype=getattr(torch, training.param_dtype),
            reduce_dtype=getattr(torch, training.reduce_dtype),
            cpu_offload=training.cpu_offload,
            activation_checkpoint=config.activation_checkpoint,
            compile=config.compile,
            expert_mesh=rank.expert_mesh,
        )
        self._chunk_logprobs = compile_function(logprobs_of_chunk, config.compile)
        seed_everything(training.seed, offset=self.data_rank.index, deterministic=training.deterministic)
        self.model = self._build_model()
        self.parameters: dict[str, nn.Parameter] = dict(self.model.named_parameters())
        """This rank's shards by name, including frozen ones."""
        # A router would count a shared prompt only once for the balance of experts.
        needs_own = spec.model.has_experts or self.context is not None or config.compile.includes("model")
        self._shares_prompts = training.share_prompts and not needs_own
        if config.print_after_conversion and self.is_first_rank:
            logger.info("the model after its converters:\n%s", self.model)

    def _build_model(self) -> Decoder:
        with torch.device("meta"):
            whole: Decoder = self.spec.model.build().to(getattr(torch, self.training.dtype))
            make_batch_invariant(whole, spec=self.spec, device=self.device)
            self.converters.convert(whole)
        trained = {name: parameter.requires_grad for name, parameter in whole.named_parameters()}
        model = parallelize_decoder(whole, mesh=self.mesh, config=self._options)
        for name, parameter in model.named_parameters():
            # PyTorch's plan for norms makes new parameters that require a gradient even if frozen before.
            parameter.requires_grad_(trained[name])
        if self.device.type == "cpu":
            keep_freed_memory()
        materialize(model, device=self.device, cpu_offload=self._options.cpu_offload)
        reset_buffers(model)
        return model

    @property
    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that get gradients and are stepped, by name."""
        return {name: p for name, p in self.parameters.items() if p.requires_grad}

    @property
    def base_model(self) -> str | None:
        """Hugging Face folder of the plain weights if all of them are frozen, else None."""
        if any(self.parameters[name].requires_grad for name in self.converters.plain_names):
            return None
        return self.loaded_from

    @property
    def is_first_rank(self) -> bool:
        """True on the rank that writes files."""
        return self.mesh is None or dist.get_rank() == 0

    @property
    def lora(self) -> LoRA:
        """The LoRA converter; raises ValueError if there is none."""
        for converter in self.converters.members:
            if isinstance(converter, LoRA):
                return converter
        raise ValueError("converters has no LoRA: there is no adapter to save or to load")

    def init_weights(self) -> None:
        """Draw weights from the configured seed, the same in every layout and with any converters."""
        names = set(self.converters.plain_names)
        self.model.init_weights(seed=self.training.seed, names=names)
        self.converters.weights_loaded(self.model, fresh=True)

    @torch.no_grad()
    def load_hf(self, folder: HFFolder) -> None:
        """Fill each rank's parameters from a Hugging Face folder, without communication.

        Raises ValueError if a tensor is missing or unknown, or the checkpoint is of another architecture or size.
        """
        folder.spec(expected=self.spec)
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
        self.loaded_from = str(folder.path.expanduser().absolute())
        self.converters.weights_loaded(self.model, fresh=True)

    def export_hf(self, folder: str | Path, *, dtype: torch.dtype, tokenizer_from: str | None) -> None:
        """Write the plain model as a Hugging Face folder from rank 0, while every rank gathers."""
        adapter = self.spec.adapter(self.spec.model)
        # An absent buffer is read as zero, and other programs know the model only without it.
        buffers = {name: b for name, b in hf_buffers(self.model, adapter).items() if b.any()}
        tensors = (
            (name, whole_tensor(tensor)) for name, tensor in chain(self.plain_tensors(), buffers.items())
        )
        with self._gathering(tensors) as writes:
            if writes:
                write_hf_folder(folder, tensors, adapter, dtype=dtype, tokenizer_from=tokenizer_from)

    def save_adapter(self, folder: str | Path) -> None:
        """Write the LoRA adapters as a PEFT folder from rank 0, while every rank gathers."""
        config, factors = self.lora.config, self.lora.peft_factors()
        with self._gathering(factors) as writes:
            if writes:
                write_peft_folder(
                    folder, factors, rank=config.rank, alpha=config.alpha, base_model=self.base_model
                )
                if self.base_model is None:
                    logger.warning(
                        "adapter %s: the Hugging Face folder of its base weights is unknown, so the adapter "
                        "names none (docs/training.md)",
                        folder,
                    )

    @contextmanager
    def _gathering(self, gathered: Iterable[object]) -> Iterator[bool]:
        """Yield whether this rank writes, then consume what is left of `gathered`, on every rank."""
        try:
            yield self.is_first_rank
        finally:
            # The other ranks gather here, and so does the first rank after an error.
            for _ in gathered:
                pass
        barrier()

    def weights_restored(self, names: Collection[str], *, base_model: str | None) -> None:
        """Note that a checkpoint, whose `base_model` is given, has set these parameters and buffers."""
        loaded = [name in names for name in self.converters.plain_names]
        if any(loaded):
            self.loaded_from = base_model if all(loaded) else None
        self.converters.weights_loaded(self.model, fresh=False)

    def plain_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yield the parameters of the model without converters, adapters merged, in this layout.

        Unconverted parameters are not copied. Every rank must consume all of them.
        """
        return self.converters.plain_tensors(self.parameters)

    def pack(self, samples: Sequence[TrainingSample]) -> list[PackedBatch]:
        """Return this rank's micro-batches, as many on every rank; raises ValueError for a sample that does not fit."""
        _check_ids(samples, vocab_size=self.spec.model.vocab_size)
        tp = 1 if self.mesh is None else self.mesh[TP].size()
        multiple = math.lcm(tp, row_multiple(self.spec), self.converters.token_multiple)
        if self.context is not None:
            multiple = self.context.pad_multiple(multiple)
        with span("pack"):
            return pack(
                samples,
                max_tokens=self.training.max_tokens_per_microbatch,
                max_sequences=self.training.max_sequences_per_microbatch,
                max_length=self.training.max_sequence_length or self.spec.model.rope.max_positions,
                pad_multiple=multiple,
                share_prompts=self._shares_prompts,
                rank=self.data_rank.index,
                num_ranks=self.data_rank.count,
            )

    def forward(
        self, batch: PackedBatch, *, entropy_gradient: bool = False, of_loss: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the logprobs of the targets, [T] or [T, K], and the entropies, [T], as float32 in nats.

        Logprobs have a gradient; entropies have one if `entropy_gradient` is set. With `of_loss` the values of
        tokens that the loss does not read may be 0.
        """
        self._num_forwards += 1
        if self.device.type == "cpu" and self._num_forwards % FORWARDS_BETWEEN_TRIMS == 0:
            give_back_freed_memory()
        if self.context is None:
            # Batch-invariant products need whole tiles of rows.
            is_part = (
                of_loss and row_multiple(self.spec) == 1 and len(batch.loss_rows) < batch.input_ids.numel()
            )
            rows = batch.loss_rows if is_part else None
            head = self._head(batch.targets, batch.temperatures, entropy_gradient, rows_R=rows)
            return self._forward(batch.input_ids, batch.positions, batch.sequences, head)
        num_tokens = batch.input_ids.numel()
        mine_t = self.context.token_indices(num_tokens).to(self.device)
        share = SequenceLayout.of_rank(batch.all_lengths, context=self.context, device=self.device)
        head = self._head(batch.targets[mine_t], batch.temperatures[mine_t], entropy_gradient)
        values = self._forward(batch.input_ids[mine_t], batch.positions[mine_t], share, head)
        places_T = self.context.places(num_tokens).to(self.device)
        logprobs_T, entropy_T = (self.context.gather(value_t, places_T) for value_t in values)
        return logprobs_T, entropy_T

    def real_tokens(self, batch: PackedBatch) -> Tensor:
        """Return a mask [t] of this rank's tokens that are no padding."""
        real_T = batch.sequence_ids < batch.num_sequences
        if self.context is None:
            return real_T
        return real_T[self.context.token_indices(real_T.numel()).to(self.device)]

    def release(self) -> None:
        """Free the parameters that a forward without a backward has left gathered."""
        reshard(self.model)

    @torch.no_grad()
    def logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """Return the logprobs of each sample's targets, [T] or [T, K] float32 in nats, entry 0 being 0."""
        values = TokenValues(samples, policy=self)
        for batch in self.pack(samples):
            logprobs_T, _ = self.forward(batch.to(self.device))
            values.add(batch, logprobs_T)
        self.release()
        return values.collect()

    def _head(
        self,
        targets_T: Tensor,
        temperatures_T: Tensor,
        entropy_gradient: bool,
        *,
        rows_R: Tensor | None = None,
    ) -> TokenHead:
        """Return the function of hidden states and the head's weight that gives logprobs and entropies."""
        return partial(
            token_logprobs,
            targets_T=targets_T,
            temperatures_T=temperatures_T,
            rows_R=rows_R,
            chunk_tokens=self.training.logits_chunk_tokens,
            loss_parallel=self._options.parallelism.loss_parallel,
            chunk_logprobs=self._chunk_logprobs,
            entropy_gradient=entropy_gradient,
        )

    def _forward(
        self, input_ids: Tensor, positions: Tensor, sequences: SequenceLayout, head: TokenHead
    ) -> tuple[Tensor, Tensor]:
        dtype = self._options.param_dtype
        return call_in_dtype(
            self.model, dtype, input_ids, positions=positions, sequences=sequences, head=head
        )


class TokenValues:
    """One number for each target of each sample, collected from the micro-batches of all ranks."""

    def __init__(
        self, samples: Sequence[TrainingSample], *, policy: Policy, wanted: Sequence[int] | None = None
    ) -> None:
        """Collect the samples at the indices `wanted`, or all; only micro-batches with such samples are copied."""
        self._policy = policy
        indices = range(len(samples)) if wanted is None else wanted
        self._values = {index: np.zeros(samples[index].mask.shape, dtype=np.float32) for index in indices}

    def wants(self, batch: PackedBatch) -> bool:
        """Return whether the micro-batch has a wanted sample."""
        return not self._values.keys().isdisjoint(batch.sample_indices)

    def add(self, batch: PackedBatch, values_T: Tensor) -> None:
        """Add the values of one micro-batch, [T] or [T, K] float32."""
        if not self._policy.data_rank.speaks or not self.wants(batch):
            return
        for index, values in batch.scatter(values_T.detach().cpu().numpy()).items():
            if index in self._values:
                self._values[index][:] = values

    def collect(self) -> list[np.ndarray]:
        """Return one array for each wanted sample, shaped as its mask, on every rank; entry 0 is 0."""
        arrays = list(self._values.values())
        if self._policy.mesh is None:
            return arrays
        # One data-parallel rank computed each token; on the others it is 0.
        summed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays])).to(self._policy.device)
        dist.all_reduce(summed)
        parts = np.split(summed.cpu().numpy(), np.cumsum([array.size for array in arrays])[:-1])
        return [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]


def _check_ids(samples: Sequence[TrainingSample], *, vocab_size: int) -> None:
    for index, sample in enumerate(samples):
        given = {"token_ids": sample.token_ids}
        if sample.targets is not None:
            given["targets"] = sample.targets[1:]
        for name, ids in given.items():
            outside = ids[(ids < 0) | (ids >= vocab_size)]
            if outside.size:
                raise ValueError(
                    f"sample {index}: {name} has {outside[0]}: must be token ids of 0 to {vocab_size - 1}"
                )
