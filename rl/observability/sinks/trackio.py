"""Trackio's database on this machine, through the storage beneath `trackio.init`, which hides its errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl.observability.sinks.config import TrackioConfig
from rl.observability.sinks.place import Place, Sent
from rl.observability.sinks.tail import NumberedRecord


class Trackio:
    """A `Backend`."""

    name = "trackio"

    def __init__(self, config: TrackioConfig, *, title: str, settings: Mapping[str, Any]) -> None:
        """
        Args:
            title: of the run, as it is shown; another run may have the same.
            settings: the run's config.
        """
        self.config = config
        self.title = title
        self.settings = settings
        self._run_id = ""
        self._says_settings = True

    def open(self, sent: Sent) -> Place | None:
        """A run that goes back is taken out of the database, and what it keeps is written again."""
        from trackio.sqlite_storage import SQLiteStorage

        self._run_id, self._says_settings = sent.run_id, True
        if sent.is_cut:
            # First: of a process that is killed between the two nothing counts as written that is not.
            sent.save(None)
            SQLiteStorage.delete_run(self.config.project, self.title, run_id=sent.run_id)
        return sent.last

    def write(self, record: NumberedRecord) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        settings = {**self.settings, "_Group": self.config.group} if self._says_settings else None
        SQLiteStorage.bulk_log(
            project=self.config.project,
            run=self.title,
            run_id=self._run_id,
            metrics_list=[dict(record.values)],
            steps=[record.place.step],
            config=settings,
            log_ids=[f"{self._run_id}-{record.number}"],  # a row of an id that is there is left out
        )
        self._says_settings = False

    def close(self, *, failed: bool) -> None:
        """Nothing is kept open between two records."""
