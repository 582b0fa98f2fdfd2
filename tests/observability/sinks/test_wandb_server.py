"""What reaches W&B's server of a run that goes back and on in another process; the server is played."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.wandb_server import PlayedServer

ROOT = Path(__file__).parents[3]

RUN = """
import asyncio, json, sys
from pathlib import Path
from rl.interpreter import leave
from rl.observability.metrics import MetricsWriter
from rl.observability.run_folder import METRICS
from rl.observability.sinks.config import ConsoleConfig, SinksConfig, WandbConfig
from rl.observability.sinks.run_sinks import open_sinks

folder, mode, records = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
config = SinksConfig(console=ConsoleConfig(style="off"), wandb=WandbConfig(enable=True, mode=mode))

async def run():
    async with open_sinks(config, folder=folder, title="try-1", num_steps=9) as sinks:
        with MetricsWriter(folder / METRICS) as metrics, sinks.attempt():
            for record in records:
                metrics.write(record)
                sinks.write(record)

asyncio.run(run())
leave(0)
"""


class Site:
    """A home and a server of W&B's."""

    def __init__(self, folder, server):
        self.folder = folder / "run"
        self.folder.mkdir()
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "PYTHONPATH": str(ROOT),
            "WANDB_BASE_URL": server.url,
            "WANDB_API_KEY": "0" * 40,
            "WANDB_ERROR_REPORTING": "false",
        }

    def run(self, mode, *records):
        self._call("-c", RUN, str(self.folder), mode, json.dumps(records))

    def cut(self, num_lines):
        lines = (self.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        (self.folder / "metrics.jsonl").write_text("".join(lines[:num_lines]))

    def sync(self):
        """What docs/metrics.md says."""
        folders = sorted(self.folder.glob("wandb/offline-run-*"))
        assert len(folders) == 2
        self._call("-m", "wandb", "sync", *map(str, folders))

    def _call(self, *args):
        done = subprocess.run(
            [sys.executable, *args],
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr


def at(step, **values):
    return {"step": step, **values}


FIRST = [at(0, **{"eval/correct": 0.25}), *(at(step, **{"reward/mean": step / 8}) for step in range(1, 5))]
SECOND = [at(step, **{"reward/mean": step / 8 + 0.0625}) for step in range(3, 7)]


@pytest.mark.medium
@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", ["online", "offline"])
def test_a_run_that_goes_back_and_on_is_one_run_with_each_step_once(mode, tmp_path):
    with PlayedServer() as server:
        site = Site(tmp_path, server)
        site.run(mode, *FIRST)
        site.cut(3)  # back to step 2
        site.run(mode, *SECOND)
        if mode == "offline":
            assert server.runs == {}
            site.sync()
        # What W&B had of steps 3 and 4 it keeps.
        assert server.rows() == [*FIRST, *SECOND[2:]]
        (run,) = server.runs.values()
        assert run.exit_code == 0
