"""The Tinker API: calls with which a notebook or a program trains and samples, with a loop of its own.

    import rl.tinker as tinker

    with tinker.ServiceClient(backend="tiny") as service:
        training = service.create_lora_training_client("tiny", rank=8).result()
        training.forward_backward(data, "cross_entropy")
        training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
        sampling = training.save_weights_and_get_sampling_client().result()

Names, signatures and types are those of the official package `tinker`, so that code moves between the two
when this import is changed. Nothing is imported until it is asked for. docs/tinker.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinker import (
        AdamParams,
        APIConnectionError,
        APIError,
        APIFuture,
        APIStatusError,
        BadRequestError,
        Datum,
        EncodedTextChunk,
        ForwardBackwardOutput,
        LoraConfig,
        LossHandle,
        ModelInput,
        NotFoundError,
        OptimStepResponse,
        RateLimitError,
        RequestFailedError,
        SampledSequence,
        SampleResponse,
        SamplingParams,
        TensorData,
        TinkerError,
        TrainingRun,
    )

    from rl.tinker import types
    from rl.tinker.client.rest_client import RestClient
    from rl.tinker.client.sampling_client import BackcompatSamplingClientFuture, SamplingClient
    from rl.tinker.client.service_client import ServiceClient
    from rl.tinker.client.training_client import BackcompatTrainingClientFuture, TrainingClient

OWN = {
    "BackcompatSamplingClientFuture": "rl.tinker.client.sampling_client",
    "BackcompatTrainingClientFuture": "rl.tinker.client.training_client",
    "RestClient": "rl.tinker.client.rest_client",
    "SamplingClient": "rl.tinker.client.sampling_client",
    "ServiceClient": "rl.tinker.client.service_client",
    "TrainingClient": "rl.tinker.client.training_client",
}
"""What this package has in place of the official one's, and where."""
ABSENT = {
    "AdminClient": "it is about an organisation's account with the hosted service",
    "auth": "in one process there is nobody to tell who you are",
}
"""What the official package has and this one does not, and why."""


def __getattr__(name: str) -> Any:
    if name in OWN:
        value = getattr(importlib.import_module(OWN[name]), name)
    elif name == "types":
        value = importlib.import_module("rl.tinker.types")
    elif name in ABSENT:
        raise AttributeError(f"rl.tinker has no {name}: {ABSENT[name]}")
    else:
        value = _official(name)
    globals()[name] = value
    return value


def _official(name: str) -> Any:
    """One of the names that the official package exports."""
    missing = AttributeError(f"module 'rl.tinker' has no attribute {name!r}")
    if name.startswith("__") and name not in ("__version__", "__title__"):
        raise missing  # What Python's own machinery looks for is not a reason to import anything.
    official = importlib.import_module("tinker")
    if name not in official.__all__:
        raise missing
    return getattr(official, name)


__all__ = [
    "APIConnectionError",
    "APIError",
    "APIFuture",
    "APIStatusError",
    "AdamParams",
    "BackcompatSamplingClientFuture",
    "BackcompatTrainingClientFuture",
    "BadRequestError",
    "Datum",
    "EncodedTextChunk",
    "ForwardBackwardOutput",
    "LoraConfig",
    "LossHandle",
    "ModelInput",
    "NotFoundError",
    "OptimStepResponse",
    "RateLimitError",
    "RequestFailedError",
    "RestClient",
    "SampleResponse",
    "SampledSequence",
    "SamplingClient",
    "SamplingParams",
    "ServiceClient",
    "TensorData",
    "TinkerError",
    "TrainingClient",
    "TrainingRun",
    "types",
]
