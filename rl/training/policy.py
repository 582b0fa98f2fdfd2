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

from rl.distributed.mesh import TP, DataRank
from rl.distributed.process_group import barrier
from rl.distributed.sharding import ShardingOptions, call_in_dtype, reshard
from rl.distributed.shards import local_shard_of, local_tensor, whole_tensor
from rl.models.buffers import persistent_buffers, reset_buffers
from rl.models.hf import HFFolder, read_parameters, write_hf_folder
from rl.models.logprobs import token_logprobs
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
        self._param_dtype = options.param_dtype
        with torch.device("meta"):
            model: nn.Module = spec.model.build().to(getattr(torch, training.dtype))
        self.model = spec.parallelize(model, mesh=mesh, config=options)
        self.model.to_empty(device=device)
        reset_buffers(self.model)
        self.parameters: dict[str, nn.Parameter] = dict(self.model.named_parameters())
        """By name, this rank's shards: the ones that are stepped."""
        self.buffers = persistent_buffers(self.model)
        """By name, the same on every rank; no gradient steps them."""

    def pack(self, samples: Sequence[TrainingSample]) -> list[PackedBatch]:
        """This rank's micro-batches, equally many on every rank."""
        return pack(
            samples,
            max_tokens=self.training.max_tokens_per_microbatch,
            pad_multiple=1 if self.mesh is None else self.mesh[TP].size(),
            rank=self.data_rank.index,
            num_ranks=self.data_rank.count,
        )

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Logprob of each target, [T] float32 with gradient, and entropy, [T] float32 without; nats."""
        head = partial(
            token_logprobs,
            targets_T=batch.targets,
            temperatures_T=batch.temperatures,
            chunk_tokens=self.training.logits_chunk_tokens,
        )
        return call_in_dtype(
            self.model,
            self._param_dtype,
            batch.input_ids,
            positions=batch.positions,
            sequences=batch.sequences,
            head=head,
        )

    def real_tokens(self, batch: PackedBatch) -> Tensor:
        """[T] bool: which tokens of this rank's `forward` are no padding."""
        return batch.sequence_ids < batch.num_sequences

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
        for buffer in self.buffers.values():
            buffer.zero_()
        for name, whole in read_parameters(folder, adapter, folder.present(self.buffers, adapter)):
            self.buffers[name].copy_(whole)

    def export_hf(self, folder: str | Path, *, dtype: torch.dtype, tokenizer_from: str | None) -> None:
        """Write a Hugging Face folder, from rank 0; every rank gathers along.

        Raises:
            FileExistsError: the folder is there and not empty.
        """
        # Without a number in it, a buffer says what its absence does, and others know the model without it.
        buffers = {name: buffer for name, buffer in self.buffers.items() if buffer.any()}
        tensors = ((name, whole_tensor(t.detach())) for name, t in (self.parameters | buffers).items())
        try:
            if self.mesh is None or dist.get_rank() == 0:
                adapter = self.spec.adapter(self.spec.model)
                write_hf_folder(folder, tensors, adapter, dtype=dtype, tokenizer_from=tokenizer_from)
        finally:
            # The other ranks gather here, and so does the first after an error, with which it alone ends.
            for _ in tensors:
                pass
        barrier()
