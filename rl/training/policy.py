"""The model in training: weights from and to files, packing, forward pass, logprobs, in any layout.

Shape legend: T packed tokens of one micro-batch, t the tokens of this context-parallel rank, K
targets of each token where there are several.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from rl.distributed.activation_checkpoint import ActivationCheckpointConfig
from rl.distributed.compile import CompileConfig, compile_function
from rl.distributed.context_parallel import ContextParallel
from rl.distributed.mesh import CP, OF_STAGE, TP, DataRank, ParallelismConfig, get_pipeline_axis
from rl.distributed.pipeline import Pipeline
from rl.distributed.process_group import RankInfo
from rl.distributed.sharding import (
    ShardingOptions,
    call_in_dtype,
    gather_whole,
    local_tensor,
    materialize,
    reshard,
    slice_local_shard,
)
from rl.distributed.stages import plan_stages
from rl.models.batch_invariant.model import get_row_multiple, make_batch_invariant
from rl.models.converter import ModelConverter, ModelConverters
from rl.models.decoder import (
    Decoder,
    find_persistent_buffers,
    list_module_names,
    reset_buffers,
    take_part,
)
from rl.models.files.hf import HFFolder, find_hf_buffers, read_parameters
from rl.models.layers.attention import SequenceLayout
from rl.models.logprobs import compute_chunk_logprobs, compute_token_logprobs
from rl.models.lora import LoRA
from rl.models.parallelize import parallelize_decoder
from rl.models.spec import ModelSpec
from rl.observability.spans import span
from rl.rollouts.packing import PackedBatch, pack
from rl.training.config import TrainingConfig, limit_samples
from rl.training.token_values import TokenValues, check_token_ids
from rl.types import TrainingSample
from rl.utils.processes import FreedMemory, keep_freed_memory, seed_everything
from rl.utils.tensor_memory import to_device

logger = logging.getLogger(__name__)

FORWARDS_BETWEEN_TRIMS = 16
"""Forwards on a CPU after which holes in the freed memory are given back: 40 steps of 2
micro-batches of SmolLM2 left 6 GiB of them."""
KEPT_BYTES = 512 * 2**20
"""Growth of the process below which they are kept. `tiny` frees and takes 0.14 GB in each step: a
fifteenth of its training time went into clearing them again."""

TokenHead = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

ReadTokens = Callable[[PackedBatch, Tensor, Tensor], Tensor | None]
"""(micro-batch, logprobs [T] or [T, K], entropies [T]) -> number whose gradient is wanted; None
without backward.
"""


class Policy:
    """A model, built on the meta device, converted, sharded, and only then given memory.

    Each rank builds its part. Its parameters hold no values until `load_hf` or `init_weights`.
    Raises ValueError if the mesh does not divide the model, or a converter does not fit it.
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
        mesh = rank.mesh
        self.spec = spec
        self.mesh = mesh
        self.device = device
        self.data_rank = DataRank.of(mesh)
        self.training = training
        self.context = None if mesh is None else ContextParallel.of(mesh[CP])
        """Share of this rank in its micro-batches; None without context parallelism."""
        self.loaded_from: str | None = None
        """Hugging Face folder of the plain model's weights, if all came from one."""
        self._num_forwards = 0
        self._freed = FreedMemory(most_bytes=KEPT_BYTES)
        self._latest: PackedBatch | None = None
        """Micro-batch of the latest forward."""

        degrees = parallelism.resolve_degrees(1 if mesh is None else mesh.size())
        self.converters = ModelConverters(converters, spec=spec, degrees=degrees, device=device)
        self._options = ShardingOptions(
            parallelism=parallelism,
            param_dtype=getattr(torch, training.param_dtype),
            reduce_dtype=getattr(torch, training.reduce_dtype),
            cpu_offload=training.cpu_offload,
            activation_checkpoint=activation_checkpoint,
            compile=compile_config,
            expert_mesh=rank.expert_mesh,
        )
        self._chunk_logprobs = compile_function(compute_chunk_logprobs, compile_config)
        self.pipeline: Pipeline | None = None
        axis = get_pipeline_axis(mesh)
        if axis is not None:
            plan = plan_stages(parallelism, list_module_names(spec.model))
            self.pipeline = Pipeline(parallelism, plan, axis=axis, device=device)

        # Data-parallel ranks draw differently, the ranks that share a sample alike.
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
        if print_after_conversion and self.is_first_rank:
            logger.info("the model after its converters:\n%s", self.whole)

    def _convert_model(self) -> Decoder:
        """Return the whole converted model on the meta device."""
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
        # A tied head has no name in the whole model, but the last stage has a copy of the weight.
        trained = {"lm_head.weight": trained["embed_tokens.weight"]} | trained
        if self.device.type == "cpu":
            keep_freed_memory()
        for part in parts:
            for name, parameter in part.named_parameters():
                # PyTorch's plan for norms makes new parameters that require a gradient even if
                # frozen before.
                parameter.requires_grad_(trained[name])
            materialize(part, device=self.device, cpu_offload=self._options.cpu_offload)
            reset_buffers(part)

        if pipeline is not None:
            pipeline.attach(parts, tied=self.spec.model.tie_embeddings)
            self.model = take_part(whole, pipeline.plan.list_modules(pipeline.rank))
        return parts

    @property
    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that get gradients and are stepped, by name."""
        # Asked anew, because a reference policy freezes its parameters after it was built.
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
    def _shares_prompts(self) -> bool:
        """True if samples of a micro-batch send their common prompt through the model once."""
        if self.context is not None and not self._options.parallelism.exchanges_heads:
            return False
        # A router would count a shared prompt only once for the balance of experts.
        return self.training.share_prompts and not self.spec.model.has_experts

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
        """Draw weights from the configured seed, the same in every layout."""
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
            local_tensor(parameter).copy_(slice_local_shard(whole, parameter))

        # A folder leaves out buffers that are zero.
        buffers = find_hf_buffers(self.model, adapter)
        for buffer in buffers.values():
            buffer.zero_()
        for name, whole in read_parameters(folder, adapter, folder.list_present(buffers, adapter)):
            buffers[name].copy_(whole)

        self.loaded_from = str(folder.path.expanduser().absolute())
        self.converters.weights_loaded(self.model, fresh=True)

    def mark_restored(self, names: Collection[str], *, base_model: str | None) -> None:
        """Note that a checkpoint of this `base_model` has set these parameters and buffers."""
        loaded = [name in names for name in self._own_names]
        # Stages have different parameters; a folder is the base only if all of them agree.
        if self.pipeline is not None:
            loaded = list(chain.from_iterable(self.pipeline.gather_from_all(loaded)))
        if any(loaded):
            self.loaded_from = base_model if all(loaded) else None
        self.converters.weights_loaded(self.model, fresh=False)

    @property
    def served_lora(self) -> LoRA | None:
        """LoRA whose adapters generators get beside the base; None: they get whole weights."""
        for converter in self.converters.members:
            if isinstance(converter, LoRA) and converter.config.is_served_apart:
                return converter
        return None

    def adapter_state_dict(self) -> dict[str, Tensor]:
        """Return this rank's factors of the adapters by name, as `AdapterShapes` has them."""
        return {name: p.detach() for name, p in self.parameters.items() if name in self.lora.names}

    def state_dict(self, *, merge: bool = True) -> dict[str, Tensor]:
        """Return the plain model's tensors of this rank by name: parameters, persistent buffers.

        In a pipeline buffers are DTensors of their stage, as other stages have none.

        Args:
            merge: add adapters to their weights; False leaves out those that are served apart.
        """
        # Collective if adapters are merged.
        parameters = dict(self.converters.yield_plain_tensors(self.parameters, merge=merge))
        buffers: dict[str, Tensor] = find_persistent_buffers(self.model)
        if self.pipeline is not None:
            assert self.mesh is not None
            of_stage, alike = self.mesh[OF_STAGE], [Replicate()] * len(OF_STAGE)
            for name, buffer in list(buffers.items()):
                # All ranks of a stage have the same bits, so nothing has to be compared.
                buffers[name] = DTensor.from_local(buffer, of_stage, alike, run_check=False)
        return parameters | buffers

    def gather_tensors(self, named: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """Yield (name, tensor, ...) of all ranks with whole tensors, one at a time.

        Every rank must consume all of them, since each is gathered by all ranks.
        """
        if self.pipeline is not None:
            return self.pipeline.gather(named)
        return ((item[0], *map(gather_whole, item[1:])) for item in named)

    def pack(
        self, samples: Sequence[TrainingSample], *, undivided_for: str | None = None
    ) -> list[PackedBatch]:
        """Return this rank's micro-batches, as many on every rank.

        `undivided_for` is the loss's `sequence_setting`. Raises ValueError for a sample that does
        not fit, or for an episode that does not and has to.
        """
        check_token_ids(samples, vocab_size=self.spec.model.vocab_size)

        # Every kind of split needs equal parts, so lengths are padded to a multiple of all.
        tp = 1 if self.mesh is None else self.mesh[TP].size()
        multiple = math.lcm(tp, get_row_multiple(self.spec), self.converters.token_multiple)
        if self.context is not None:
            multiple = self.context.pad_multiple(multiple)

        of_pipeline: dict[str, Any] = {}
        if self.pipeline is not None:
            of_pipeline["num_allowed"] = self.pipeline.num_allowed

        with span("pack"):
            return pack(
                samples,
                max_tokens=self.training.max_tokens_per_microbatch,
                max_sequences=limit_samples(self.training, self._options.parallelism),
                max_length=self.training.max_sequence_length or self.spec.model.rope.max_positions,
                pad_multiple=multiple,
                share_prompts=self._shares_prompts,
                undivided_for=undivided_for,
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
        only_loss_rows: Callable[[PackedBatch], bool] = lambda _: False,
    ) -> None:
        """Call `read` with each micro-batch's logprobs and entropies, float32 in nats; with
        `backward`, add the gradient of the sum of the numbers that it returns.

        Of a pipeline only the ranks of the last stage call `read`; its error is raised on all of
        them.

        Args:
            batches: of `pack`; they are copied to the device one by one.
            entropy_gradient: entropies have a gradient too.
            only_loss_rows: True for a micro-batch of which `read` needs the tokens of the loss
                alone; the values of others may be 0.
        """

        def prepare(batch: PackedBatch) -> tuple[PackedBatch, Tensor, dict[str, Any]]:
            batch = batch.to(self.device)
            self._note_forward(batch)
            if self.context is not None:
                return batch, *self._prepare_share(batch, self.context, entropy_gradient)
            return batch, *self._prepare_whole(batch, entropy_gradient, only_loss_rows(batch))

        dtype = self._options.param_dtype
        if self.pipeline is not None:
            assert self.mesh is not None
            # A stage receives hidden states of this rank's tokens, before it has seen any.
            num_shares = self.mesh[CP].size() * self.mesh[TP].size()
            num_tokens = batches[0].input_ids.numel() // num_shares
            hidden = partial(
                torch.empty, num_tokens, self.spec.model.dim, dtype=dtype, device="meta"
            )
            self.pipeline.run(batches, prepare, read, hidden=hidden, backward=backward)
            return

        # One by one: the graph of a micro-batch is freed before the next forward.
        for batch, ids, options in map(prepare, batches):
            number = read(batch, *call_in_dtype(self.model, dtype, ids, **options))
            if backward:
                assert number is not None
                number.backward()

    def _note_forward(self, batch: PackedBatch) -> None:
        self._latest = batch
        self._num_forwards += 1
        if self.device.type == "cpu" and self._num_forwards % FORWARDS_BETWEEN_TRIMS == 0:
            self._freed.give_back_if_much()

    def _prepare_whole(
        self, batch: PackedBatch, entropy_gradient: bool, only_loss_rows: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the model's input ids and its other arguments, without context parallelism."""
        rows_R: Tensor | None = None
        has_other_rows = len(batch.loss_rows) < batch.input_ids.numel()
        # Batch-invariant products need whole tiles of rows.
        if only_loss_rows and has_other_rows and get_row_multiple(self.spec) == 1:
            rows_R = batch.loss_rows

        head = self._make_head(batch.targets, batch.temperatures, entropy_gradient, rows_R=rows_R)
        options = {"positions": batch.positions, "sequences": batch.sequences, "head": head}
        return batch.input_ids, options

    def _prepare_share(
        self, batch: PackedBatch, context: ContextParallel, entropy_gradient: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the input ids of this context-parallel rank's tokens, and the other arguments."""
        num_tokens = batch.input_ids.numel()
        mine_t = to_device(context.token_indices(num_tokens), self.device)
        places_T = to_device(context.places(num_tokens), self.device)

        sequences = batch.sequences
        if not self._options.parallelism.exchanges_heads:
            sequences = SequenceLayout.of_rank(
                batch.all_lengths, context=context, device=self.device
            )

        own_head = self._make_head(
            batch.targets[mine_t], batch.temperatures[mine_t], entropy_gradient
        )

        # It gathers the values of all tokens, so that the loss need not know of the split.
        def gathering_head(hidden_tE: Tensor, weight_VE: Tensor) -> tuple[Tensor, ...]:
            values = own_head(hidden_tE, weight_VE)
            return tuple(context.gather(value_t, places_T) for value_t in values)

        positions_t = batch.positions[mine_t]
        options = {"positions": positions_t, "sequences": sequences, "head": gathering_head}
        return batch.input_ids[mine_t], options

    def mask_real_tokens(self) -> Tensor:
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
    def compute_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """Return each sample's logprobs, [T] or [T, K] float32 in nats; entry 0 is 0."""
        values = TokenValues(
            samples,
            data_rank=self.data_rank,
            mesh=self.mesh,
            device=self.device,
        )
        self.run(self.pack(samples), lambda batch, logprobs_T, _: values.add(batch, logprobs_T))
        self.release()
        return values.collect()

    def _make_head(
        self,
        targets_T: Tensor,
        temperatures_T: Tensor,
        entropy_gradient: bool,
        *,
        rows_R: Tensor | None = None,
    ) -> TokenHead:
        """Return the function from hidden states and head weight to logprobs and entropies."""
        return partial(
            compute_token_logprobs,
            targets_T=targets_T,
            temperatures_T=temperatures_T,
            rows_R=rows_R,
            chunk_tokens=self.training.logits_chunk_tokens,
            loss_parallel=self._options.parallelism.loss_parallel,
            chunk_logprobs=self._chunk_logprobs,
            entropy_gradient=entropy_gradient,
        )
