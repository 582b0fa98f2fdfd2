"""The model in training, in its layout: what it says of tokens, and its weights in and out.

Shape legend: T packed tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
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
from rl.models.attention import SequenceLayout, SequenceShare
from rl.models.buffers import reset_buffers
from rl.models.hf import HFFolder, read_parameters, write_hf_folder
from rl.models.logprobs import logprobs_of_chunk, token_logprobs
from rl.models.spec import ModelSpec
from rl.rollouts.packing import PackedBatch, pack
from rl.training.config import TrainingConfig
from rl.types import TrainingSample


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
    ) -> None:
        """`mesh` None is a single process. Raises ValueError for sizes that the mesh does not divide."""
        self.spec = spec
        self.mesh = mesh
        self.device = device
        self.data_rank = DataRank.of(mesh)
        self.training = training
        self.context = None if mesh is None else ContextParallel.of(mesh[CP])
        """How this rank shares its micro-batches with others; None where it has them alone."""
        self._param_dtype = options.param_dtype
        self._loss_parallel = options.loss_parallel
        self._chunk_logprobs = compile_function(logprobs_of_chunk, options.compile)
        with torch.device("meta"):
            model: nn.Module = spec.model.build().to(getattr(torch, training.dtype))
        self.model = spec.parallelize(model, mesh=mesh, config=options)
        materialize(self.model, device=device, cpu_offload=options.cpu_offload)
        reset_buffers(self.model)
        self.parameters: dict[str, nn.Parameter] = dict(self.model.named_parameters())
        """By name, this rank's shards: the ones that are stepped."""

    def pack(self, samples: Sequence[TrainingSample]) -> list[PackedBatch]:
        """This rank's micro-batches, equally many on every rank."""
        pad_multiple = 1 if self.mesh is None else self.mesh[TP].size()
        if self.context is not None:
            pad_multiple = self.context.pad_multiple(pad_multiple)
        return pack(
            samples,
            max_tokens=self.training.max_tokens_per_microbatch,
            max_sequences=self.training.max_sequences_per_microbatch,
            max_length=self.training.max_sequence_length or num_positions(self.spec),
            pad_multiple=pad_multiple,
            rank=self.data_rank.index,
            num_ranks=self.data_rank.count,
        )

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Logprob of each target, [T] float32 with gradient, and entropy, [T] float32 without; nats."""
        if self.context is None:
            return self._forward(
                batch.input_ids, batch.positions, batch.targets, batch.temperatures, batch.sequences
            )
        num_tokens = batch.input_ids.numel()
        mine_t = self.context.token_indices(num_tokens).to(self.device)
        per_token = (batch.input_ids, batch.positions, batch.targets, batch.temperatures)
        share = SequenceShare.from_lengths(batch.all_lengths, context=self.context, device=self.device)
        values = self._forward(*(x_T[mine_t] for x_T in per_token), share)
        places_T = self.context.places(num_tokens).to(self.device)
        logprobs_T, entropy_T = (self.context.gather(value_t, places_T) for value_t in values)
        return logprobs_T, entropy_T

    def _forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        sequences: SequenceLayout | SequenceShare,
    ) -> tuple[Tensor, Tensor]:
        """Of this rank's tokens."""
        head = partial(
            token_logprobs,
            targets_T=targets,
            temperatures_T=temperatures,
            chunk_tokens=self.training.logits_chunk_tokens,
            loss_parallel=self._loss_parallel,
            chunk_logprobs=self._chunk_logprobs,
        )
        return call_in_dtype(
            self.model, self._param_dtype, input_ids, positions=positions, sequences=sequences, head=head
        )

    def release(self) -> None:
        """Free what a forward without a backward has left gathered."""
        reshard(self.model)

    @torch.no_grad()
    def logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """[T] float32 nats for each sample, entry t of token t, entry 0 is 0; on every rank."""
        ends = np.cumsum([len(sample.token_ids) for sample in samples])
        flat = np.zeros(ends[-1], dtype=np.float32)
        parts = np.split(flat, ends[:-1])
        for batch in self.pack(samples):
            logprobs_T, _ = self.forward(batch.to(self.device))
            if self.data_rank.speaks:
                for index, values in batch.scatter(logprobs_T.cpu().numpy()).items():
                    parts[index][:] = values
        self.release()
        if self.mesh is None:
            return parts
        # Each token was computed by one data-parallel rank and is 0 on the others.
        summed = torch.from_numpy(flat).to(self.device)
        dist.all_reduce(summed)
        return np.split(summed.cpu().numpy(), ends[:-1])

    def init_weights(self) -> None:
        """Draw weights from the configured seed, the same in every layout."""
        self.model.init_weights(seed=self.training.seed)  # type: ignore[operator]

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
        folder.check(self.model, adapter)
        for name, whole in read_parameters(folder, adapter, self.parameters):
            parameter = self.parameters[name]
            local_tensor(parameter).copy_(local_shard_of(whole, parameter))

    def export_hf(self, folder: str | Path, *, dtype: torch.dtype, tokenizer_from: str | None) -> None:
        """Write a Hugging Face folder, from rank 0; every rank gathers along.

        Raises:
            FileExistsError: the folder is there and not empty.
        """
        tensors = ((name, whole_tensor(p.detach())) for name, p in self.parameters.items())
        try:
            if self.mesh is None or dist.get_rank() == 0:
                adapter = self.spec.adapter(self.spec.model)
                write_hf_folder(folder, tensors, adapter, dtype=dtype, tokenizer_from=tokenizer_from)
        finally:
            # The other ranks gather here, and so does the first after an error, with which it alone ends.
            for _ in tensors:
                pass
        barrier()


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
