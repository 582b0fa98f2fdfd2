"""Private names of PyTorch 2.13 and Python 3.11 that training needs, each with its reason."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.tensor import DTensor

# Place of a piece of a tensor in a checkpoint's files. The public reader takes it from the metadata
# that it reads itself, by a pickle; ours is made without running one.
StorageInfo = _StorageInfo

# Only the unpickler in Python calls methods that a subclass can replace, one for each code; the one
# in C, which `pickle.Unpickler` names, has no such table.
PythonUnpickler = pickle._Unpickler
UNPICKLER_METHODS: Any = pickle._Unpickler.dispatch


def scale_in_place(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply all tensors by a number.

    On a GPU one kernel for many tensors; a loop would launch one for each parameter.
    """
    torch._foreach_mul_(list(tensors), factor)


def compute_norms(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the 2-norm of each tensor, [].

    In as few kernels as `scale_in_place`. The public `torch.nn.utils.get_total_norm` returns one
    norm of all, but a shard counts by the number of ranks that hold it.
    """
    return torch._foreach_norm(list(tensors)) if tensors else ()


def identify_storage(storage: torch.UntypedStorage) -> int:
    """Return a number that two views of one storage share.

    The address of the data will not do, because an emptied storage has none, and neither will the
    Python object, which is made anew by each call of `Tensor.untyped_storage`.
    """
    return int(storage._cdata)


def replace_local_shard(parameter: DTensor, shard: Tensor) -> None:
    """Let a parameter that a mesh shards use the memory of `shard` on this rank.

    A DTensor has no public way to exchange its shard and stay the same object, to which optimizer
    and FSDP refer.
    """
    parameter._local_tensor = shard
