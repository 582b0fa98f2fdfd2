"""The real clients of W&B and trackio, in separate processes."""

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import wandb

from rl.observability.loggers import WandbConfig
from rl.observability.sinks import SinksConfig, check_sinks
from tests.support.json_server import JsonServer

pytestmark = pytest.mark.medium

ROOT = Path(__file__).parents[2]


# W&B


def test_online_mode_without_a_key_is_refused(tmp_path, monkeypatch):
    for name in [*os.environ]:
        if name.startswith("WANDB"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(
        ValueError, match=r"there is no key for W&B. Run `wandb login`, set WANDB_API_KEY"
    ):
        check_sinks(SinksConfig(wandb=WandbConfig(enable=True, mode="online")))
    wandb.teardown()  # its service process would live until this one exits


WANDB = """
import asyncio, json, logging, sys
from pathlib import Path
from rl.utils.compat import exit_process
from rl.observability.metrics import MetricsWriter
from rl.observability.run_folder import METRICS
from rl.observability.console import ConsoleConfig
from rl.observability.loggers import WandbConfig
from rl.observability.sinks import SinksConfig, check_sinks, open_sinks

logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
folder, mode = Path(sys.argv[1]), sys.argv[2]
records, close_s = json.loads(sys.argv[3]), float(sys.argv[4])
wandb = WandbConfig(enable=True, mode=mode)
config = SinksConfig(console=ConsoleConfig(style="off"), wandb=wandb, close_s=close_s)

async def run():
    async with open_sinks(config, folder=folder, title="try-1", num_steps=9) as sinks:
        with MetricsWriter(folder / METRICS) as metrics, sinks.show_attempt():
            for record in records:
                metrics.write(record)
                sinks.write(record)
                print("step", record["step"])

hooks = sys.excepthook, sys.exit
check_sinks(config)
asyncio.run(run())
assert (sys.excepthook, sys.exit) == hooks
print("ended")
exit_process(0)
"""


HISTORY = "wandb-history.jsonl"


@dataclass(kw_only=True, slots=True)
class FakeRun:
    history: list[str] = field(default_factory=list)
    """Lines of JSON by file and line number."""
    exit_code: int | None = None


class FakeServer(JsonServer):
    """W&B for starting, resuming, logging and finishing runs, on the loopback."""

    def __init__(self):
        super().__init__()
        self.runs: dict[str, FakeRun] = {}

    def rows(self):
        """Return the rows of the only run, without W&B's own fields."""
        (run,) = self.runs.values()
        rows = [json.loads(line) for line in run.history]
        return [{k: v for k, v in row.items() if not k.startswith("_")} for row in rows]

    def answer(self, method, path, body, headers):
        if path.endswith("/graphql"):
            asked = json.loads(body)
            named = re.search(r"(?:query|mutation)\s+(\w+)", asked.get("query", ""))
            operation = asked.get("operationName") or (named[1] if named else "")
            return 200, {"data": self._data(operation, asked.get("variables") or {})}
        if path.endswith("/file_stream"):
            self._take(path.split("/")[-2], json.loads(body))
        return 200, {"limits": {}}

    def _data(self, operation, given):
        """Answer one GraphQL operation."""
        entity = {"id": "E", "name": "team"}
        if operation == "RunResumeStatus":
            model = {"id": "M", "name": given["project"], "entity": entity}
            return {"model": model | {"bucket": self._bucket(given["name"])}}
        if operation == "UpsertBucket":
            name = given["name"]
            self.runs.setdefault(name, FakeRun())
            project = {"id": "P", "name": given["project"], "entity": entity}
            bucket = {"id": f"B-{name}", "name": name, "config": "{}", "project": project}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if operation == "CreateRunFiles":
            files = [
                {"name": name, "uploadUrl": f"{self.url}/file/{name}"} for name in given["files"]
            ]
            return {"createRunFiles": {"runID": "R", "uploadHeaders": [], "files": files}}
        return {}

    def _take(self, name, sent):
        """Store a run's file stream."""
        run = self.runs[name]
        if history := sent.get("files", {}).get(HISTORY):
            run.history[history["offset"] :] = history["content"]
        if sent.get("complete"):
            run.exit_code = sent.get("exitcode")

    def _bucket(self, name):
        if (run := self.runs.get(name)) is None:
            return None
        tails = {"historyTail": json.dumps(run.history[-1:]), "eventsTail": "[]"}
        counts = {"historyLineCount": len(run.history), "logLineCount": 0, "eventsLineCount": 0}
        about = {
            "id": f"B-{name}",
            "name": name,
            "summaryMetrics": "{}",
            "config": "{}",
            "tags": [],
        }
        return {**about, **counts, **tails, "wandbConfig": '{"t": 1}'}


class Site:
    """Home folder of a W&B user, whose client talks to the server at `url`."""

    def __init__(self, folder, url):
        self.folder = folder / "run"
        self.folder.mkdir()
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "PYTHONPATH": str(ROOT),
            "WANDB_BASE_URL": url,
            "WANDB_API_KEY": "0" * 40,
            "WANDB_ERROR_REPORTING": "false",
        }

    def run(self, mode, *records, close_s=30.0):
        """Run a process that writes the records, and return its output."""
        return self._call("-c", WANDB, str(self.folder), mode, json.dumps(records), str(close_s))

    def cut(self, num_lines):
        lines = (self.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        (self.folder / "metrics.jsonl").write_text("".join(lines[:num_lines]))

    def sync(self):
        folders = sorted(self.folder.glob("wandb/offline-run-*"))
        assert len(folders) == 2
        self._call("-m", "wandb", "sync", *map(str, folders))

    def _call(self, *args):
        return output_of(
            *args, env=self.environment, cwd=self.folder, timeout=80
        )  # W&B's own is 90 s


def output_of(*args, **options):
    done = subprocess.run(
        [sys.executable, *args], stdin=subprocess.DEVNULL, capture_output=True, text=True, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(100)
def test_hanging_server_delays_neither_the_loop_nor_the_exit(tmp_path):
    with socket.create_server(
        ("127.0.0.1", 0)
    ) as server:  # connections are accepted, nothing is read
        site = Site(tmp_path, f"http://127.0.0.1:{server.getsockname()[1]}")
        lines = site.run("online", *(at(step) for step in (1, 2, 3)), close_s=2.5).splitlines()
    assert lines[:3] == ["step 1", "step 2", "step 3"]
    assert lines[-1] == "ended"
    assert "it lacks 3 records, which are in metrics.jsonl" in lines[-2]


def at(step, **values):
    return {"step": step, **values}


FIRST = [
    at(0, **{"eval/correct": 0.25}),
    *(at(step, **{"reward/mean": step / 8}) for step in range(1, 5)),
]
SECOND = [at(step, **{"reward/mean": step / 8 + 0.0625}) for step in range(3, 7)]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", ["online", "offline"])
def test_run_resumed_from_an_earlier_step_is_one_run(mode, tmp_path):
    with FakeServer() as server:
        site = Site(tmp_path, server.url)
        site.run(mode, *FIRST)
        site.cut(3)  # again from step 2
        site.run(mode, *SECOND)
        if mode == "offline":
            assert server.runs == {}
            site.sync()
        # W&B ignores the second records of steps 3 and 4, unless both attempts were offline.
        assert server.rows() == [*FIRST, *SECOND[2 * (mode == "online") :]]
        (run,) = server.runs.values()
        assert run.exit_code == 0


# trackio

TRACKIO = """
import json, sys
from rl.observability.loggers import TrackioConfig, TrackioLogger

run_id, records = sys.argv[1], json.loads(sys.argv[2])
settings = {"loop": {"num_steps": 3}}
made = TrackioLogger(TrackioConfig(enable=True), title="try-1", run_id=run_id, settings=settings)
made.open(None)
for step, values in records:
    made.write(step, values, row=2 * step + ("eval/correct" in values))
made.close(failed=False)

import trackio
from trackio.sqlite_storage import SQLiteStorage

runs = list(trackio.Api().runs("relay"))
logs = [SQLiteStorage.get_logs("relay", run.name, run_id=run.id) for run in runs]
print(json.dumps([[run.name, run.config, rows] for run, rows in zip(runs, logs, strict=True)]))
"""


def trackio_runs(database, run_id, *records):
    """Write the records in a new process, and return all runs of the database."""
    environment = {"TRACKIO_DIR": str(database), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    printed = output_of(
        "-c", TRACKIO, run_id, json.dumps(records), env={**os.environ, **environment}, timeout=60
    )
    return json.loads(printed.splitlines()[-1])


@pytest.mark.timeout(180)
def test_trackio_has_each_record_of_a_run_once(tmp_path):
    first = [(0, {"eval/correct": 0.25}), (1, {"reward/mean": 0.5}), (2, {"reward/mean": 0.75})]
    ((name, config, _),) = trackio_runs(tmp_path, "a", *first)
    assert (name, config["loop"]) == ("try-1", {"num_steps": 3})
    assert len(trackio_runs(tmp_path, "b", first[0])) == 2  # another run with the same title
    runs = trackio_runs(tmp_path, "a", (2, {"reward/mean": 0.875}), (3, {"reward/mean": 1.0}))
    rows = max((rows for _, _, rows in runs), key=len)
    shown = [{k: v for k, v in row.items() if k != "timestamp"} for row in rows]
    assert shown == [
        {"step": step, **values} for step, values in [*first, (3, {"reward/mean": 1.0})]
    ]
