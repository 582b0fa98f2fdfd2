"""Trackio itself, in a process of its own: which folder has its database it knows when it is imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl.observability.metrics import MetricsWriter, read_metrics

ROOT = Path(__file__).parents[3]

DELIVER = """
import json, sys
from pathlib import Path
from rl.observability.sinks.config import TrackioConfig
from rl.observability.sinks.delivery import Delivery
from rl.observability.sinks.place import Place
from rl.observability.sinks.trackio import Trackio

folder = Path(sys.argv[1])
backend = Trackio(TrackioConfig(enable=True), title="try-1", settings={"loop": {"num_steps": 3}})
made = Delivery(backend, metrics=folder / "metrics.jsonl", sent=folder / "sent.json")
keep = json.loads(sys.argv[2])
made.restart(None if keep is None else Place(*keep))
made.close(failed=False)
assert made.num_failures == 0

import trackio
from trackio.sqlite_storage import SQLiteStorage

runs = list(trackio.Api().runs("relay"))
logs = [SQLiteStorage.get_logs("relay", run.name, run_id=run.id) for run in runs]
print(json.dumps([[run.name, run.config, rows] for run, rows in zip(runs, logs, strict=True)]))
"""


def deliver(folder, database, *, keep=None):
    """All runs that trackio has after another process has given it this folder's metrics.jsonl, of which so
    much was kept."""
    done = subprocess.run(
        [sys.executable, "-c", DELIVER, str(folder), json.dumps(keep)],
        env={**os.environ, "TRACKIO_DIR": str(database), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def write(folder, *records):
    folder.mkdir(exist_ok=True)
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        for record in records:
            writer.write(record)


def as_shown(rows):
    return [{k: v for k, v in row.items() if k != "timestamp"} for row in rows]


RECORDS = [
    {"step": 0, "eval/correct": 0.25},
    {"step": 1, "reward/mean": 0.5},
    {"step": 2, "reward/mean": 0.75},
    {"step": 2, "eval/correct": 0.5},
]


@pytest.mark.medium
@pytest.mark.timeout(180)
def test_rows_are_the_records_of_the_run_as_it_went_in_the_end(tmp_path):
    folder, database = tmp_path / "run", tmp_path / "trackio"
    write(folder, *RECORDS)
    ((name, config, rows),) = deliver(folder, database)
    assert (name, config["loop"]) == ("try-1", {"num_steps": 3})
    assert as_shown(rows) == RECORDS
    # It goes back to step 1, and on in another way.
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:2]))
    write(folder, {"step": 2, "reward/mean": 0.875}, {"step": 3, "reward/mean": 1.0})
    # Another run of that name, in another place, is another run.
    write(tmp_path / "other", RECORDS[0])
    assert len(deliver(tmp_path / "other", database)) == 2
    by_rows = sorted(
        (rows for _, _, rows in deliver(folder, database, keep=(1, False))),
        key=len,
    )
    assert as_shown(by_rows[0]) == RECORDS[:1]
    assert as_shown(by_rows[1]) == read_metrics(folder / "metrics.jsonl")
