"""Weights of a policy from and to Hugging Face folders, and LoRA adapters to PEFT folders."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import torch

from rl.distributed.process_group import barrier
from rl.distributed.sharding import local_shard_of, local_tensor, whole_tensor
from rl.models.hf import HFFolder, hf_buffers, read_parameters, write_hf_folder
from rl.models.peft import write_peft_folder
from rl.training.policy import Policy

logger = logging.getLogger(__name__)


@torch.no_grad()
def load_hf(policy: Policy, folder: HFFolder) -> None:
    """Fill the policy's parameters; every rank reads and slices without communication.

    Raises:
        ValueError: a tensor is missing or unknown, or the folder is of another architecture or size.
    """
    spec = policy.spec
    config = spec.adapter.config_from_hf(folder.config)
    if config != spec.model:
        raise ValueError(
            f"{folder.path}: a checkpoint of another architecture or size: its config is {config}, the model's "
            f"{spec.model}"
        )
    adapter = spec.adapter(spec.model)
    names = policy.converters.plain_names
    folder.check(policy.model, adapter, names=set(names))
    for name, whole in read_parameters(folder, adapter, names):
        parameter = policy.parameters[name]
        local_tensor(parameter).copy_(local_shard_of(whole, parameter))
    buffers = hf_buffers(policy.model, adapter)
    for buffer in buffers.values():
        buffer.zero_()
    for name, whole in read_parameters(folder, adapter, folder.present(buffers, adapter)):
        buffers[name].copy_(whole)
    policy.loaded_from = str(folder.path.expanduser().absolute())
    policy.converters.weights_loaded(policy.model, fresh=True)


def export_hf(policy: Policy, folder: str | Path, *, dtype: torch.dtype, tokenizer_from: str | None) -> None:
    """Write the plain model as a Hugging Face folder from rank 0, while every rank gathers.

    Raises:
        FileExistsError: the folder exists and is not empty.
    """
    adapter = policy.spec.adapter(policy.spec.model)
    # An absent buffer is read as zero, and other programs know the model only without it.
    buffers = {name: b for name, b in hf_buffers(policy.model, adapter).items() if b.any()}
    tensors = (
        (name, whole_tensor(tensor)) for name, tensor in chain(policy.plain_tensors(), buffers.items())
    )
    with _gathering(policy, tensors) as writes:
        if writes:
            write_hf_folder(folder, tensors, adapter, dtype=dtype, tokenizer_from=tokenizer_from)


def save_adapter(policy: Policy, folder: str | Path) -> None:
    """Write the LoRA adapters as a PEFT folder from rank 0, while every rank gathers.

    Raises:
        FileExistsError: the folder exists and is not empty.
        ValueError: there is no LoRA among the converters.
    """
    factors = policy.lora.peft_factors()
    with _gathering(policy, factors) as writes:
        if writes:
            lora = policy.lora.config
            write_peft_folder(folder, factors, rank=lora.rank, alpha=lora.alpha, base_model=policy.base_model)
            if policy.base_model is None:
                logger.warning(
                    "adapter %s: the Hugging Face folder of its base weights is unknown, so the adapter names "
                    "none (docs/training.md)",
                    folder,
                )


@contextmanager
def _gathering(policy: Policy, gathered: Iterable[object]) -> Iterator[bool]:
    """Yield whether this rank writes, then consume what is left of `gathered`, on every rank."""
    try:
        yield policy.is_first_rank
    finally:
        # The other ranks gather here, and so does the first rank after an error.
        for _ in gathered:
            pass
    barrier()
