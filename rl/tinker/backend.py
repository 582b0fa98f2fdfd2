"""What computes behind the Tinker calls: this process (`local/`) or actors (`actors/tinker_backend.py`).

The service above it checks names, owners and order; a backend is told what to do with models and samplers
whose ids are never used twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rl.tinker.messages import (
    AdamParams,
    BaseModel,
    Datum,
    ForwardBackwardOutput,
    LossCall,
    ModelSettings,
    OptimStepOutput,
    SampleOutput,
    SampleRequest,
)


class Backend(Protocol):
    """Calls about one model never overlap; those about different models, and samplers, do.

    Whatever the caller got wrong is raised as `InvalidRequestError`, before anything changes. A cancelled
    call may be finished nevertheless, but nothing of it is left half done.
    """

    @property
    def base_models(self) -> Sequence[BaseModel]: ...

    async def start(self) -> None:
        """Load what is needed before the first call."""
        ...

    async def close(self) -> None:
        """End everything; calls under way fail. Idempotent."""
        ...

    def check_settings(self, settings: ModelSettings) -> None:
        """Raise InvalidRequestError for a model that could not be created; quick."""
        ...

    def check_data(self, settings: ModelSettings, data: Sequence[Datum], loss: LossCall) -> None:
        """Raise InvalidRequestError naming datum and field, for data that could not be trained on; quick."""
        ...

    def check_request(self, base_model: str, request: SampleRequest) -> None:
        """Raise InvalidRequestError naming the field, for a request that could not be answered; quick."""
        ...

    # Models in training

    async def create_model(self, model_id: str, settings: ModelSettings) -> None:
        """A fresh model: LoRA's products are zero, all parameters are the base's."""
        ...

    async def forward_backward(
        self, model_id: str, data: Sequence[Datum], loss: LossCall, *, backward: bool
    ) -> ForwardBackwardOutput:
        """Add the gradient of the plain sum to what the model has accumulated; `backward` False leaves that
        as it is. A call that fails adds nothing."""
        ...

    async def drop_gradient(self, model_id: str) -> None:
        """Forget what the model has accumulated."""
        ...

    async def optim_step(self, model_id: str, params: AdamParams) -> OptimStepOutput:
        """Step with the accumulated gradient as it is, and clear it.

        Without one it is zero: the moments decay, as they do in the official service.
        """
        ...

    async def save_state(self, model_id: str, folder: Path) -> None:
        """Write weights and optimizer state into an empty folder."""
        ...

    async def load_state(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        """Take them from a folder of `save_state` of a model with the same settings; an accumulated gradient
        is dropped. `optimizer` False starts that anew."""
        ...

    async def delete_model(self, model_id: str) -> None: ...

    # Samplers: immutable weights

    async def save_sampler(self, model_id: str, folder: Path) -> None:
        """Write what `open_sampler` needs into an empty folder."""
        ...

    async def take_snapshot(self, model_id: str, sampler_id: str) -> None:
        """Let a sampler have this model's weights as they are now."""
        ...

    async def open_sampler(self, sampler_id: str, settings: ModelSettings, folder: Path | None) -> None:
        """A sampler of a folder of `save_sampler`, or with None of the base model itself."""
        ...

    async def close_sampler(self, sampler_id: str) -> None:
        """Forget its weights once its requests have ended."""
        ...

    async def sample(self, sampler_id: str, request: SampleRequest) -> SampleOutput:
        """Calls overlap; those that are cancelled end their work at the next token."""
        ...
