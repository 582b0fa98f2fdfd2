"""Memory of all live tensors, tracked operation by operation."""

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
"""Share of the peak that may be allocated before the sum is computed again."""


class TensorBytes(TorchDispatchMode):
    """Tracker of the memory of every tensor returned by an operation, within a `with` block.

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
            return NotImplemented  # a DTensor: the operations on its shards are dispatched separately
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            # Wrapper and fake tensors have no memory of their own.
            if type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == "cpu":
                self._follow(tensor.untyped_storage())
        if self._unsummed > RESOLUTION * self.peak:
            self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        """Return the live bytes."""
        self._unsummed = 0
        alive = (reference() for reference in list(self._storages.values()))
        return sum({s.data_ptr(): s.nbytes() for s in alive if s is not None}.values())

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, lambda _: self._storages.pop(key, None))
            self._unsummed += storage.nbytes()
