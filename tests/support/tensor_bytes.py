"""Bytes of all tensors that are alive, as operations make them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

RESOLUTION = 0.003
"""Of the peak: how much may be allocated before the sum is taken again."""


class TensorBytes(TorchDispatchMode):
    """While it is entered, follows the memory of every tensor that an operation returns.

    A storage counts once, by its size at the moment, as FSDP resizes them; what kernels use
    inside themselves does not. Tensors made before are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._unsummed = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(t not in (Tensor, torch.nn.Parameter, FakeTensor) for t in types):
            return NotImplemented  # a DTensor: its operations on shards come by themselves
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            # What wraps other tensors, or is fake, has no memory of its own.
            if type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == "cpu":
                self._follow(tensor.untyped_storage())
        if self._unsummed > RESOLUTION * self.peak:
            self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        """Bytes alive."""
        self._unsummed = 0
        alive = (reference() for reference in list(self._storages.values()))
        return sum({s.data_ptr(): s.nbytes() for s in alive if s is not None}.values())

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, lambda _: self._storages.pop(key, None))
            self._unsummed += storage.nbytes()
