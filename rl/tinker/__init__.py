"""The Tinker API: train and sample through a handful of calls, with a training loop of your own.

    import tinker
    from rl.tinker import ServiceClient

    with ServiceClient(backend="tiny") as service:
        training = service.create_lora_training_client("tiny", rank=8).result()
        training.forward_backward(data, "cross_entropy")
        training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
        sampling = training.save_weights_and_get_sampling_client().result()

`ServiceClient` is the official client's, on a server in this process; all other names come from the
official package `tinker`. See docs/tinker.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl.tinker.local import ServiceClient

__all__ = ["ServiceClient"]


def __getattr__(name: str) -> Any:
    if name == "ServiceClient":  # Imported on demand: rl.tinker.local imports the training engine.
        from rl.tinker.local import ServiceClient

        return ServiceClient
    raise AttributeError(f"module 'rl.tinker' has no attribute {name!r}")
