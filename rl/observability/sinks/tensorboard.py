"""TensorBoard's event files, by its own writer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rl.observability.sinks.place import Place, Sent
from rl.observability.sinks.tail import NumberedRecord

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """A `Backend`."""

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: SummaryWriter | None = None

    def open(self, sent: Sent) -> Place | None:
        """Tell readers to forget all from the last step on that they are to keep, which is given again: they
        forget whole steps only."""
        from torch.utils.tensorboard import SummaryWriter

        self.close(failed=False)
        has_files = self.folder.is_dir() and any(self.folder.iterdir())
        forgets = 0 if sent.kept is None else sent.kept.step
        self._writer = SummaryWriter(str(self.folder), purge_step=forgets if has_files else None)
        return Place(forgets - 1, True) if has_files else None

    def write(self, record: NumberedRecord) -> None:
        assert self._writer is not None
        for name, value in record.values.items():
            self._writer.add_scalar(name, value, record.place.step)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
