"""Folders of a policy's weights for other programs: Hugging Face's format, and PEFT's.

The first rank writes, while every rank gathers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import torch

from rl.distributed.process_group import barrier
from rl.models.files.hf import find_hf_buffers, write_hf_folder
from rl.models.files.hub import find_hub_name
from rl.models.files.peft import write_peft_folder
from rl.training.policy import Policy

logger = logging.getLogger(__name__)


def export_hf(
    policy: Policy, folder: str | Path, *, dtype: torch.dtype, tokenizer_from: str | None
) -> None:
    """Write the plain model, adapters merged, as a Hugging Face folder."""
    adapter = policy.spec.adapter(policy.spec.model)
    # An absent buffer is read as zero, and other programs know the model only without it.
    buffers = {name: b for name, b in find_hf_buffers(policy.model, adapter).items() if b.any()}
    parameters = policy.converters.yield_plain_tensors(policy.parameters)
    tensors = policy.gather_tensors(chain(parameters, buffers.items()))
    with _gather_on_exit(policy, tensors) as writes:
        if writes:
            write_hf_folder(
                folder,
                tensors,
                adapter,
                dtype=dtype,
                buffers=buffers,
                tokenizer_from=tokenizer_from,
            )


def save_adapter(policy: Policy, folder: str | Path) -> None:
    """Write the LoRA adapters as a PEFT folder; raises ValueError without LoRA."""
    config, factors = policy.lora.config, policy.gather_tensors(policy.lora.yield_peft_factors())
    with _gather_on_exit(policy, factors) as writes:
        if writes:
            base, revision = policy.base_model, None
            # A path of the hub's cache opens on no other machine.
            if base is not None and (on_hub := find_hub_name(base)) is not None:
                base, revision = on_hub
            write_peft_folder(
                folder,
                factors,
                rank=config.rank,
                alpha=config.alpha,
                base_model=base,
                revision=revision,
            )
            if policy.base_model is None:
                logger.warning(
                    "adapter %s: the Hugging Face folder of its base weights is unknown, so "
                    "the adapter names none (docs/training.md)",
                    folder,
                )


@contextmanager
def _gather_on_exit(policy: Policy, gathered: Iterable[object]) -> Iterator[bool]:
    """Yield whether this rank writes; afterwards every rank consumes the rest of `gathered`."""
    try:
        yield policy.is_first_rank
    finally:
        # The other ranks gather here, and so does the first rank after an error.
        for _ in gathered:
            pass
    barrier()
