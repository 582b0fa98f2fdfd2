"""W&B itself, offline: what its own process has put into its file."""

import math
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from rl.observability.metrics import MetricsWriter, read_metrics
from rl.observability.sinks.config import WandbConfig
from rl.observability.sinks.delivery import Delivery
from rl.observability.sinks.place import Place
from rl.observability.sinks.wandb import Wandb
from tests.support.wandb_files import history

ROOT = Path(__file__).parents[3]


def delivery(folder):
    backend = Wandb(
        WandbConfig(enable=True),
        folder=folder,
        title="try-1",
        settings={"loop": {"num_steps": 3}},
        finish_s=20.0,
    )
    return Delivery(backend, metrics=folder / "metrics.jsonl", sent=folder / "sent.json")


def write(folder, *records):
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        for record in records:
            writer.write(record)


RECORDS = [
    {"step": 0, "eval/correct": 0.25},
    {"step": 1, "reward/mean": 0.5, "loss/mean": math.nan},
    {"step": 2, "reward/mean": 0.75, "loss/mean": -0.5},
    {"step": 2, "eval/correct": 0.5},
]


def plain(rows):
    """Such that a NaN is equal to another."""
    return [{k: "nan" if math.isnan(v) else v for k, v in row.items()} for row in rows]


def core_processes():
    """Of W&B, that this process has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
            if name == "wandb-core" and int(rest.split()[1]) == os.getpid():
                found.append(int(stat.parent.name))
    return found


@pytest.mark.medium
def test_rows_are_the_records_and_those_of_a_run_that_goes_on_are_not_doubled(tmp_path):
    hooks = sys.excepthook, sys.exit
    write(tmp_path, *RECORDS)
    first = delivery(tmp_path)
    first.restart(Place(2, True))
    assert (sys.excepthook, sys.exit) == hooks
    first.close(failed=True)
    assert first.num_failures == 0
    # The run goes back to step 1 and on; what W&B has stays as it was.
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:2]))
    second = delivery(tmp_path)
    second.restart(Place(1))
    write(tmp_path, *RECORDS[2:], {"step": 3, "reward/mean": 1.0})
    second.look()
    second.close(failed=False)
    rows = history(tmp_path / "wandb")
    assert plain(rows) == plain(read_metrics(tmp_path / "metrics.jsonl"))
    runs = {file.name for file in (tmp_path / "wandb").glob("offline-run-*/*.wandb")}
    assert len(runs) == 1  # both processes wrote of one run
    assert len(list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))) == 2


@pytest.mark.medium
def test_when_its_process_dies_another_takes_what_comes_after(tmp_path):
    write(tmp_path, *RECORDS[:2])
    made = delivery(tmp_path)
    made.restart(Place(1))
    (core,) = core_processes()
    os.kill(core, signal.SIGKILL)
    os.waitpid(core, 0)
    write(tmp_path, *RECORDS[2:])
    for step in range(3, 50):  # it is seen by who writes
        made.catch_up()
        if made.num_failures:
            break
        write(tmp_path, {"step": step, "reward/mean": 1.0})
    assert made.num_failures
    made.catch_up()
    made.close(failed=False)
    assert core_processes() == []
    assert plain(history(tmp_path / "wandb"))[-1] == read_metrics(tmp_path / "metrics.jsonl")[-1]


ONLINE = """
from rl.observability.sinks.config import SinksConfig, WandbConfig, check_sinks
try:
    check_sinks(SinksConfig(wandb=WandbConfig(enable=True, mode="online")))
except ValueError as error:
    print(error)
"""


@pytest.mark.medium
def test_online_without_a_key_is_refused_before_anything_is_asked_of_the_network(tmp_path):
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", ONLINE],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines()[-1] == (
        "sinks.wandb.mode='online': there is no key for W&B. Run `wandb login`, set WANDB_API_KEY, or choose "
        "offline"
    ), done.stderr


NOBODY_ANSWERS = """
import asyncio, logging, sys
from pathlib import Path
from rl.interpreter import leave
from rl.observability.metrics import MetricsWriter
from rl.observability.run_folder import METRICS
from rl.observability.sinks.config import ConsoleConfig, SinksConfig, WandbConfig
from rl.observability.sinks.run_sinks import open_sinks

logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
folder = Path(sys.argv[1])
wandb = WandbConfig(enable=True, mode="online")
config = SinksConfig(console=ConsoleConfig(style="off"), wandb=wandb, close_s=2.5)

async def run():
    async with open_sinks(config, folder=folder, title="try-1", num_steps=3) as sinks:
        with MetricsWriter(folder / METRICS) as metrics, sinks.attempt():
            for step in range(1, 4):
                metrics.write({"step": step})
                sinks.write({"step": step})
                print("step", step)

asyncio.run(run())
print("ended")
leave(0)
"""


@pytest.mark.medium
@pytest.mark.timeout(100)
def test_a_server_that_never_answers_holds_up_neither_the_loop_nor_the_end_of_the_process(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:  # connections are made, nobody reads
        environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path),
            "PYTHONPATH": str(ROOT),
            "WANDB_BASE_URL": f"http://127.0.0.1:{server.getsockname()[1]}",
            "WANDB_API_KEY": "0" * 40,
            "WANDB_ERROR_REPORTING": "false",
        }
        done = subprocess.run(
            [sys.executable, "-c", NOBODY_ANSWERS, str(tmp_path)],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=80,  # W&B itself would wait for 90 s
        )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:3] == ["step 1", "step 2", "step 3"]
    assert lines[-1] == "ended"
    assert lines[3].startswith("wandb was not ")
    assert "it lacks all of it, which is in " in lines[-2]
