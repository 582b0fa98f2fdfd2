"""A CPU tensor's memory as an array of NumPy.

Not by `Tensor.numpy()`, after which PyTorch refuses to resize the tensor's storage for good: a generator
that sleeps could not give back the memory of its weights and its key-value cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor


def memory_of(tensor: Tensor, *, dtype: str, num_elements: int | None = None) -> np.ndarray:
    """[num_elements], the memory itself, from the tensor's first element on, read as `dtype`.

    The array keeps the tensor, but not its memory: a storage that is resized leaves it pointing nowhere.

    Args:
        dtype: NumPy's name of one of the tensor's element size, such as f4.
        num_elements: as many as the tensor has, when None; more than that where it is not contiguous.
    """
    num_elements = tensor.numel() if num_elements is None else num_elements
    if num_elements == 0:
        return np.empty(0, dtype)
    return np.asarray(_Memory(tensor, f"<{dtype}", num_elements))


class _Memory:
    """NumPy's array interface (version 3); NumPy keeps the object for as long as the array."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: Tensor, typestr: str, num_elements: int) -> None:
        self.tensor = tensor
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (num_elements,),
            "typestr": typestr,
            "data": (tensor.data_ptr(), False),
        }
