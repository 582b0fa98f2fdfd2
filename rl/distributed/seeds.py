"""Random states and determinism of a process."""

from __future__ import annotations

import os
import pickle
import random

import numpy as np
import torch


def check_seed(seed: int, *, field: str = "seed", below: int = 2**63) -> None:
    """Raises ValueError naming the field; `below` is what the generators that it goes to can take."""
    if not 0 <= seed < below:
        raise ValueError(f"{field}={seed}: must be at least 0 and below {below}")


def seed_everything(seed: int, *, offset: int = 0, deterministic: bool = False) -> None:
    """Seed Python's, numpy's and PyTorch's generators, on every device, with `seed + offset`.

    Args:
        offset: of the rank, 0 for ranks that must draw the same numbers.
        deterministic: forbid kernels whose result depends on scheduling; slower, and an
            operation without a deterministic kernel raises RuntimeError.
    """
    random.seed(seed + offset)
    np.random.seed((seed + offset) % 2**32)
    torch.manual_seed(seed + offset)
    if deterministic:
        # cuBLAS reads this when its first handle is made.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False


def random_states() -> bytes:
    """States of all generators of this process, for `restore_random_states`."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return pickle.dumps((random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda))


def restore_random_states(states: bytes) -> None:
    """Set what `random_states` returned."""
    python, numpy, cpu, cuda = pickle.loads(states)
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)
