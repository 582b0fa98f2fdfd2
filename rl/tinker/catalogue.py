"""What can be asked about base models, training runs and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

from rl.tinker.responses import Checkpoint, Page, TrainingRun
from rl.tinker.messages import BaseModel


class Catalogue:
    """Those that read the disk are awaited. Raise NotFoundError for what is unknown or another's, and
    InvalidRequestError for what is no id or path at all."""

    def base_models(self) -> Sequence[BaseModel]: ...

    async def training_runs(self, *, owner: str, offset: int = 0, limit: int = 20) -> Page[TrainingRun]:
        """In memory or with checkpoints, the newest first."""
        ...

    async def training_run(self, training_run_id: str, *, owner: str) -> TrainingRun: ...

    async def checkpoints(self, training_run_id: str, *, owner: str) -> tuple[Checkpoint, ...]:
        """Of both kinds, the newest first."""
        ...

    async def all_checkpoints(self, *, owner: str, offset: int = 0, limit: int = 100) -> Page[Checkpoint]:
        """Of all runs, the newest first."""
        ...

    async def delete_checkpoint(self, path: str, *, owner: str) -> None: ...

    async def set_ttl(self, path: str, ttl_seconds: int | None, *, owner: str) -> Checkpoint:
        """Seconds from now; None: it never expires."""
        ...

    async def weights_info(self, path: str, *, owner: str) -> Checkpoint:
        """Of weights of either kind; its settings are what a model to load them into must have."""
        ...
