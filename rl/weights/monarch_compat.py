"""torchstore 0.1.2 on Monarch 0.7: importing this module makes them fit.

Monarch 0.7 refuses an actor whose endpoints are partly `def` and partly `async def`, as
torchstore's `Controller` has them. `AsyncController` has the same endpoints, all async, and
takes its place in `torchstore.api`, in every process that imports this module: whoever holds a
`WeightStore` has. The rest of the project takes torchstore's names from here, so that nothing
imports torchstore before it is adapted.

Raises:
    ImportError: on import, if either package is missing or has a version that this was not made for.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any

SUPPORTED = {"torchstore": "0.1.2", "torchmonarch": "0.7"}
"""Version prefixes."""


def check_versions(installed: Callable[[str], str] = metadata.version) -> None:
    """Whether the installed packages are those that this module adapts.

    Raises:
        ImportError: names the package, what is installed and what is supported.
    """
    for package, supported in SUPPORTED.items():
        try:
            version = installed(package)
        except metadata.PackageNotFoundError as error:
            raise ImportError(
                f"{package} is not installed; weights need version {supported} (run `make setup`)"
            ) from error
        if version != supported and not version.startswith(f"{supported}."):
            raise ImportError(
                f"{package} {version} is installed, rl/weights/monarch_compat.py is made for {supported}: "
                "install that one, or check whether torchstore's endpoints still mix def and async def"
            )


check_versions()
# ruff: noqa: E402
import torchstore
import torchstore.api
from monarch.actor import endpoint
from torchstore.client import LocalClient
from torchstore.controller import Controller
from torchstore.storage_volume import StorageVolume
from torchstore.strategy import TorchStoreStrategy
from torchstore.transport import Request, TensorSlice
from torchstore.transport.buffers import MonarchTransportBuffer, rdma_available
from torchstore.transport.pipe import Pipe
from torchstore.utils import get_slice_intersection

__all__ = [
    "AsyncController",
    "LocalClient",
    "MonarchTransportBuffer",
    "Pipe",
    "Request",
    "StorageVolume",
    "TensorSlice",
    "TorchStoreStrategy",
    "check_versions",
    "get_slice_intersection",
    "has_rdma",
    "plain",
    "torchstore",
]


@functools.cache
def has_rdma() -> bool:
    """Whether torchstore's own transport is RDMA here. TORCHSTORE_RDMA_ENABLED=0 switches it off."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about the name of a function of Monarch's
        return rdma_available()


def plain(method: Any) -> Callable[..., Any]:
    """torchstore's own function under an endpoint, for a subclass: `plain(AsyncController.keys)(self)`."""
    return inspect.unwrap(method._method)


def _as_async(method: Any) -> Any:
    function = plain(method)

    @functools.wraps(function)
    async def call(self: Controller, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return endpoint(call)


class AsyncController(Controller):
    """torchstore's controller with every endpoint async."""

    get_controller_strategy = _as_async(Controller.get_controller_strategy)
    locate_volumes = _as_async(Controller.locate_volumes)
    notify_put = _as_async(Controller.notify_put)
    keys = _as_async(Controller.keys)
    notify_delete = _as_async(Controller.notify_delete)


torchstore.api.Controller = AsyncController
