"""The generator's batch-invariant matrix products and reductions for the trainer, on a GPU."""

from __future__ import annotations

import os

import torch


def use_vllms_kernels() -> None:
    """Put vLLM's batch-invariant kernels in the place of PyTorch's, for the rest of this process.

    Before the first product on the GPU. Not yet run: no GPU was at hand.

    Raises:
        ValueError: a GPU older than Hopper, for which vLLM's products are kernels without a gradient.
    """
    major, minor = torch.cuda.get_device_capability()
    if major < 9:
        raise ValueError(
            f"batch_invariant=True: must be False on a GPU of compute capability {major}.{minor}, for which "
            "vLLM's kernels have no gradient: needs at least 9.0"
        )
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    from vllm.model_executor.determinism.batch_invariant import init_batch_invariance

    init_batch_invariance()
