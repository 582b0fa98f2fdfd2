"""Copies to a device, and a CPU tensor's memory as a NumPy array.

After `Tensor.numpy()` PyTorch refuses to resize the tensor's storage for good, and a sleeping
generator could not release the memory of its weights and its key-value cache.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a copy of a CPU tensor on the device, without waiting for a GPU's earlier work.

    A copy from pageable memory may wait. PyTorch keeps page-locked memory for the next copy.
    """
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def get_memory(tensor: Tensor, *, dtype: str, num_elements: int | None = None) -> np.ndarray:
    """Return a view of the tensor's memory from its first element on, [num_elements] of `dtype`.

    The array keeps the tensor alive, but not its storage: after a resize it points to freed memory.

    Args:
        dtype: NumPy name of a type with the tensor's element size, such as f4.
        num_elements: the tensor's own number when None; larger for a tensor that is not contiguous.
    """
    num_elements = tensor.numel() if num_elements is None else num_elements
    # An empty tensor has no memory to point to.
    if num_elements == 0:
        return np.empty(0, dtype)
    interface = {
        "version": 3,
        "shape": (num_elements,),
        "typestr": f"<{dtype}",
        "data": (tensor.data_ptr(), False),
    }
    # NumPy holds a reference to this object, and so to the tensor, for the array's lifetime.
    return np.asarray(SimpleNamespace(__array_interface__=interface, tensor=tensor))
