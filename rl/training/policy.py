"""The model in training: weights from and to files, packing, forward pass and logprobs in any
parallel layout.

Shape legend: T packed tokens of one micro-batch, t the tokens of this context-parallel rank, K
targets of each token where there are several.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from rl.distributed.activation_checkpoint import ActivationCheckpointConfig
from rl.distributed.compile import CompileConfig, compile_function
from rl.distributed.context_parallel import ContextParallel
from rl.distributed.mesh import CP, OF_STAGE, TP, DataRank, ParallelismConfig, pipeline_axis
from rl.distributed.pipeline import Pipeline
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
from rl.distributed.stages import plan_stages
from rl.models.attention import SequenceLayout
from rl.models.batch_invariant.model import make_batch_invariant, row_multiple
from rl.models.converter import ModelConverter, ModelConverters
from rl.models.decoder import Decoder, module_names, part_of, persistent_buffers, reset_buffers
from rl.models.hf import HFFolder, hf_buffers, read_parameters, write_hf_folder
from rl.models.logprobs import logprobs_of_chunk, token_logprobs
from rl.models.lora import LoRA
from rl.models.parallelize import parallelize_decoder
from rl.models.peft import write_peft_folder
from rl.models.spec import ModelSpec
from rl.observability.spans import span
from rl.rollouts.packing import PackedBatch, pack
from rl.training.config import TrainingConfig
from rl.training.token_values import TokenValues
from rl.types import TrainingSample
from rl.utils.processes import give_back_freed_memory, keep_freed_memory, seed_everything
from rl.utils.tensor_memory import to_device

logger = logging.getLogger(__name__)

FORWARDS_BETWEEN_TRIMS = 16
"""Forwards on a CPU after which holes in the freed memory are given back: 40 steps of 2
micro-batches of SmolLM2 left 6 GiB of them."""

TokenHead = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

ReadTokens = Callable[[PackedBatch, Tensor, Tensor], Tensor | None]
"""(micro-batch, logprobs [T] or [T, K], entropies [T]) -> number whose gradient is wanted; None
without backward.
"""


class Policy:
    """A model, built on the meta device, converted, sharded, and only then given memory.

    Its parameters hold no values until `load_hf` or `init_weights`.
    """

    def __init__(
        self,
        training: TrainingConfig,
        *,
        spec: ModelSpec,
        parallelism: ParallelismConfig,
        activation_checkpoint: ActivationCheckpointConfig,
        compile_config: CompileConfig,
        converters: Sequence[ModelConverter.Config],
        rank: RankInfo,
        device: torch.device,
        print_after_conversion: bool = False,
    ) -> None:
        """Build one rank's part of the model.

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
        self._latest: PackedBatch | None = None
        """Micro-batch of the latest forward."""
        degrees = parallelism.degrees(1 if mesh is None else mesh.size())
        self.converters = ModelConverters(converters, spec=spec, degrees=degrees, device=device)
        self.loaded_from: str | None = None
        """Hugging Face folder of the plain model's weights, if all came from one."""
        self._options = ShardingOptions(
            parallelism=parallelism,
            param_dtype=getattr(torch, training.param_dtype),
            reduce_dtype=getattr(torch, training.reduce_dtype),
            cpu_offload=training.cpu_offload,
            activation_checkpoint=activation_checkpoint,
            compile=compile_config,
            expert_mesh=rank.expert_mesh,
        )
        self._chunk_logprobs = compile_function(logprobs_of_chunk, compile_config)
        self.pipeline: Pipeline | None = None
        if mesh is not None and (axis := pipeline_axis(mesh)) is not None:
            plan = plan_stages(parallelism, module_names(spec.model))
            self.pipeline = Pipeline(parallelism, plan, axis=axis, device=device)
        seed_everything(
            training.seed, offset=self.data_rank.index, deterministic=training.deterministic
        )
        self.whole = self._convert_model()
        """The whole model; what only other ranks of a pipeline have stays on the meta device."""
        self.model = self.whole
        """All that this rank has of the model."""
        self.parts = self._shard_model()
        """The modules that compute: the model, or its part of each of this rank's stages."""
        self.parameters: dict[str, nn.Parameter] = dict(self.model.named_parameters())
        """This rank's shards by name, including frozen ones."""
        # A router would count a shared prompt only once for the balance of experts.
        splits_keys = self.context is not None and not parallelism.exchanges_heads
        self._shares_prompts = training.share_prompts and not (
            spec.model.has_experts or splits_keys
        )
        if print_after_conversion and self.is_first_rank:
            logger.info("the model after its converters:\n%s", self.whole)

    def _convert_model(self) -> Decoder:
        with torch.device("meta"):
            whole: Decoder = self.spec.model.build().to(getattr(torch, self.training.dtype))
            make_batch_invariant(whole, spec=self.spec, device=self.device)
            whole.float32_head = self.spec.float32_head
            self.converters.convert(whole)
        return whole

    def _shard_model(self) -> list[Decoder]:
        """Shard the model and give this rank's shards memory; return the modules that compute."""
        whole, pipeline = self.whole, self.pipeline
        trained = {name: parameter.requires_grad for name, parameter in whole.named_parameters()}
        if pipeline is not None:
            pipeline.plan.check_trained(name for name, is_trained in trained.items() if is_trained)
        parts = parallelize_decoder(whole, mesh=self.mesh, config=self._options, pipeline=pipeline)
        tied = {"lm_head.weight": trained["embed_tokens.weight"]}
        if self.device.type == "cpu":
            keep_freed_memory()
        for part in parts:
            for name, parameter in part.named_parameters():
                # PyTorch's plan for norms makes new parameters that require a gradient even if
                # frozen before.
                parameter.requires_grad_((tied | trained)[name])
            materialize(part, device=self.device, cpu_offload=self._options.cpu_offload)
            reset_buffers(part)
        if pipeline is not None:
            pipeline.attach(parts, tied=self.spec.model.tie_embeddings)
            self.model = part_of(whole, pipeline.plan.modules_of(pipeline.rank))
        return parts

    @property
    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that get gradients and are stepped, by name."""
        return {name: p for name, p in self.parameters.items() if p.requires_grad}

    @property
    def base_model(self) -> str | None:
        """Hugging Face folder of the plain weights if all of them are frozen, else None."""
        if any(self.parameters[name].requires_grad for name in self._own_names):
            return None
        return self.loaded_from

    @property
    def _own_names(self) -> list[str]:
        """The plain model's parameters that this rank has shards of."""
        return [name for name in self.converters.plain_names if name in self.parameters]

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
        """Draw weights from the configured seed, the same in every layout and with any
        converters.
        """
        names = set(self.converters.plain_names)
        self.whole.init_weights(seed=self.training.seed, names=names)
        self.converters.weights_loaded(self.model, fresh=True)

    @torch.no_grad()
    def load_hf(self, folder: HFFolder) -> None:
        """Fill each rank's parameters from a Hugging Face folder, without communication.

        Raises ValueError if a tensor is missing or unknown, or the checkpoint is of another
        architecture or size.
        """
        folder.spec(expected=self.spec)
        adapter = self.spec.adapter(self.spec.model)
        folder.check(self.whole, adapter, names=set(self.converters.plain_names))
        for name, whole in read_parameters(folder, adapter, self._own_names):
            parameter = self.parameters[name]
            local_tensor(parameter).copy_(local_shard_of(whole, parameter))
        buffers = hf_buffers(self.model, adapter)
        for buffer in buffers.values():
            buffer.zero_()
        for name, whole in read_parameters(folder, adapter, folder.present(buffers, adapter)):
            buffers[name].copy_(whole)
        self.loaded_from = str(folder.path.expanduser().absolute())
        self.converters.weights_loaded(self.model, fresh=True)

    def export_hf(
        self, folder: str | Path, *, dtype: torch.dtype, tokenizer_from: str | None
    ) -> None:
        """Write the plain model as a Hugging Face folder from rank 0, while every rank gathers."""
        adapter = self.spec.adapter(self.spec.model)
        # An absent buffer is read as zero, and other programs know the model only without it.
        buffers = {name: b for name, b in hf_buffers(self.model, adapter).items() if b.any()}
        tensors = self.whole_tensors(chain(self.plain_tensors(), buffers.items()))
        with self._gathering(tensors) as writes:
            if writes:
                write_hf_folder(
                    folder,
                    tensors,
                    adapter,
                    dtype=dtype,
                    buffers=buffers,
                    tokenizer_from=tokenizer_from,
                )

    def save_adapter(self, folder: str | Path) -> None:
        """Write the LoRA adapters as a PEFT folder from rank 0, while every rank gathers."""
        config, factors = self.lora.config, self.whole_tensors(self.lora.peft_factors())
        with self._gathering(factors) as writes:
            if writes:
                write_peft_folder(
                    folder,
                    factors,
                    rank=config.rank,
                    alpha=config.alpha,
                    base_model=self.base_model,
                )
                if self.base_model is None:
                    logger.warning(
                        "adapter %s: the Hugging Face folder of its base weights is unknown, so "
                        "the adapter names none (docs/training.md)",
                        folder,
                    )

    @contextmanager
    def _gathering(self, gathered: Iterable[object]) -> Iterator[bool]:
        """Yield whether this rank writes, then consume what is left of `gathered`, on every
        rank.
        """
        try:
            yield self.is_first_rank
        finally:
            # The other ranks gather here, and so does the first rank after an error.
            for _ in gathered:
                pass
        barrier()

    def weights_restored(self, names: Collection[str], *, base_model: str | None) -> None:
        """Note that a checkpoint, whose `base_model` is given, has set these parameters and
        buffers.
        """
        loaded = [name in names for name in self._own_names]
        if self.pipeline is not None:
            loaded = list(chain.from_iterable(self.pipeline.from_all(loaded)))
        if any(loaded):
            self.loaded_from = base_model if all(loaded) else None
        self.converters.weights_loaded(self.model, fresh=False)

    def plain_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yield the parameters of the model without converters, adapters merged, in this layout.

        Unconverted parameters are not copied. Every rank must consume all of them.
        """
        return self.converters.plain_tensors(self.parameters)

    def state_dict(self) -> dict[str, Tensor]:
        """Return `plain_tensors` and persistent buffers by name, each a DTensor if other ranks have
        none.
        """
        buffers: dict[str, Tensor] = persistent_buffers(self.model)
        if self.pipeline is not None:
            assert self.mesh is not None
            of_stage, alike = self.mesh[OF_STAGE], [Replicate()] * len(OF_STAGE)
            buffers = {
                name: DTensor.from_local(buffer, of_stage, alike, run_check=False)
                for name, buffer in buffers.items()
            }
        return dict(self.plain_tensors()) | buffers

    def whole_tensors(self, named: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """Yield (name, tensor, ...) of all ranks with whole tensors, one at a time; every rank must
        consume all.
        """
        if self.pipeline is not None:
            return self.pipeline.gather(named)
        return ((item[0], *map(whole_tensor, item[1:])) for item in named)

    def pack(self, samples: Sequence[TrainingSample]) -> list[PackedBatch]:
        """Return this rank's micro-batches, as many on every rank; raises ValueError for a sample
        that does not fit.
        """
        _check_ids(samples, vocab_size=self.spec.model.vocab_size)
        tp = 1 if self.mesh is None else self.mesh[TP].size()
        multiple = math.lcm(tp, row_multiple(self.spec), self.converters.token_multiple)
        if self.context is not None:
            multiple = self.context.pad_multiple(multiple)
        max_sequences, of_pipeline = self.training.max_sequences_per_microbatch, {}
        if self.pipeline is not None:
            own_limit = self.pipeline.config.pipeline_parallel_microbatch_size
            max_sequences = min(
                (n for n in (max_sequences, own_limit) if n is not None), default=None
            )
            of_pipeline = {"num_allowed": self.pipeline.num_allowed}
        with span("pack"):
            return pack(
                samples,
                max_tokens=self.training.max_tokens_per_microbatch,
                max_sequences=max_sequences,
                max_length=self.training.max_sequence_length or self.spec.model.rope.max_positions,
                pad_multiple=multiple,
                share_prompts=self._shares_prompts,
                rank=self.data_rank.index,
                num_ranks=self.data_rank.count,
                **of_pipeline,
            )

    def run(
        self,
        batches: Sequence[PackedBatch],
        read: ReadTokens,
        *,
        backward: bool = False,
        entropy_gradient: bool = False,
        of_loss: Callable[[PackedBatch], bool] = lambda _: False,
    ) -> None:
        """Call `read` with each micro-batch's logprobs and entropies, float32 in nats; with
        `backward`, add the gradient of the sum of the numbers that it returns.

        Of a pipeline only the ranks of the last stage call `read`; its error is raised on all of
        them.

        Args:
            batches: of `pack`; they are copied to the device one by one.
            entropy_gradient: entropies have a gradient too.
            of_loss: True for a micro-batch of which `read` needs the tokens of the loss alone; the
                values of others may be 0.
        """

        def prepared(batch: PackedBatch) -> tuple[PackedBatch, Tensor, dict[str, Any]]:
            batch = batch.to(self.device)
            return batch, *self._arguments(batch, entropy_gradient, of_loss=of_loss(batch))

        dtype = self._options.param_dtype
        if self.pipeline is not None:
            assert self.mesh is not None
            num_tokens = batches[0].input_ids.numel() // (
                self.mesh[CP].size() * self.mesh[TP].size()
            )
            hidden = partial(
                torch.empty, num_tokens, self.spec.model.dim, dtype=dtype, device="meta"
            )
            self.pipeline.run(batches, prepared, read, hidden=hidden, backward=backward)
            return
        for batch, ids, options in map(prepared, batches):
            number = read(batch, *call_in_dtype(self.model, dtype, ids, **options))
            if backward:
                assert number is not None
                number.backward()

    def _arguments(
        self, batch: PackedBatch, entropy_gradient: bool, *, of_loss: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the model's input ids and its other arguments, among them a head that gives all
        tokens' values.
        """
        self._num_forwards += 1
        self._latest = batch
        if self.device.type == "cpu" and self._num_forwards % FORWARDS_BETWEEN_TRIMS == 0:
            give_back_freed_memory()
        if self.context is None:
            # Batch-invariant products need whole tiles of rows.
            is_part = (
                of_loss
                and row_multiple(self.spec) == 1
                and len(batch.loss_rows) < batch.input_ids.numel()
            )
            rows = batch.loss_rows if is_part else None
            head = self._head(batch.targets, batch.temperatures, entropy_gradient, rows_R=rows)
            return batch.input_ids, {
                "positions": batch.positions,
                "sequences": batch.sequences,
                "head": head,
            }
        context, num_tokens = self.context, batch.input_ids.numel()
        mine_t = to_device(context.token_indices(num_tokens), self.device)
        share = batch.sequences
        if not self._options.parallelism.exchanges_heads:
            share = SequenceLayout.of_rank(batch.all_lengths, context=context, device=self.device)
        own_head = self._head(batch.targets[mine_t], batch.temperatures[mine_t], entropy_gradient)
        places_T = to_device(context.places(num_tokens), self.device)

        def gathering_head(hidden_tE: Tensor, weight_VE: Tensor) -> tuple[Tensor, ...]:
            return tuple(
                context.gather(value_t, places_T) for value_t in own_head(hidden_tE, weight_VE)
            )

        options = {"positions": batch.positions[mine_t], "sequences": share, "head": gathering_head}
        return batch.input_ids[mine_t], options

    def real_tokens(self) -> Tensor:
        """Return a mask [t] of this rank's tokens of the latest micro-batch that are no padding."""
        batch = self._latest
        assert batch is not None, "there was no forward"
        real_T = batch.sequence_ids < batch.num_sequences
        if self.context is None:
            return real_T
        return real_T[to_device(self.context.token_indices(real_T.numel()), self.device)]

    def release(self) -> None:
        """Free the parameters that a forward without a backward has left gathered."""
        for part in self.parts:
            reshard(part)

    @torch.no_grad()
    def logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """Return the logprobs of each sample's targets, [T] or [T, K] float32 in nats, entry 0
        being 0.
        """
        values = TokenValues(
            samples,
            data_rank=self.data_rank,
            mesh=self.mesh,
            device=self.device,
        )
        self.run(self.pack(samples), lambda batch, logprobs_T, _: values.add(batch, logprobs_T))
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
        """Return the function of hidden states and the head's weight that gives logprobs and
        entropies.
        """
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


def _check_ids(samples: Sequence[TrainingSample], *, vocab_size: int) -> None:
    for index, sample in enumerate(samples):
        given = {"token_ids": sample.token_ids}
        if sample.targets is not None:
            given["targets"] = sample.targets[1:]
        for name, ids in given.items():
            outside = ids[(ids < 0) | (ids >= vocab_size)]
            if outside.size:
                raise ValueError(
                    f"sample {index}: {name} has {outside[0]}: must be token ids of 0 to "
                    f"{vocab_size - 1}"
                )
