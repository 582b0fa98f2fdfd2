"""Stopped runs that continue with --resume; tests/runs/test_chaos.py has a killed one."""

import re
import signal

import pytest

from rl.observability.recorder import read_rollouts
from rl.training.checkpoint_files import read_state, saved_steps
from tests.support.runs import SHORT, run_to_the_end, signal_group

pytestmark = [pytest.mark.slow, pytest.mark.long]
LIMIT_S = 240


@pytest.mark.timeout(2 * LIMIT_S + 60)
def test_resumed_off_policy_run_trains_on_every_problem_once(tmp_path):
    ahead = (
        *SHORT, "--loop.num_steps", "400", "--loop.max_off_policy_steps", "3", "--recorder.num_groups", "8",
    )  # fmt: skip
    stopped = run_to_the_end(
        tmp_path, "run", *ahead, after=(f"{'4':>7}  ", signal_group(signal.SIGINT)), limit_s=LIMIT_S
    )
    assert stopped.status == 130, stopped.output
    assert "stopped by Ctrl-C" in stopped.output.splitlines()[-1]
    last, folder = list(saved_steps(stopped.folder / "checkpoints").items())[-1]
    position = read_state(folder).position
    assert position is not None
    assert position.outstanding  # generation was ahead

    more = ("--loop.num_steps", str(last + 4))
    ended = run_to_the_end(tmp_path, "run", *more, limit_s=LIMIT_S, resumes=True)
    assert ended.status == 0, ended.output
    assert [record["step"] for record in ended.steps] == list(range(1, last + 5))
    assert max(record["age/max"] for record in ended.steps) <= 3
    trained = [r for r in read_rollouts(ended.folder / "rollouts.jsonl") if r["kind"] == "train"]
    samples = [(r["problem"], r["sample"]) for r in trained]
    assert len(samples) == len(set(samples)) == 8 * 4 * (last + 4)


@pytest.mark.timeout(3 * LIMIT_S + 60)
def test_stopped_run_saves_and_resumes_from_the_last_undamaged_checkpoint(tmp_path):
    stopped = run_to_the_end(
        tmp_path, "run", *SHORT, "--loop.num_steps", "500", "--trainer.checkpoint.interval", "2",
        after=(f"{'3':>7}  ", signal_group(signal.SIGTERM)), limit_s=LIMIT_S,
    )  # fmt: skip
    assert stopped.status == 143, stopped.output
    assert re.search(r"saving step \d+, then ending; again to end at once", stopped.output)
    assert f"continue with --resume {stopped.folder}\n" in stopped.output
    steps = list(saved_steps(stopped.folder / "checkpoints"))
    last = int(stopped.steps[-1]["step"])
    assert steps[-1] == last >= 3
    assert len(steps) >= 2
    (tensors,) = (stopped.folder / "checkpoints" / f"step-{last}").glob("*.distcp")
    content = bytearray(tensors.read_bytes())
    content[len(content) // 2] ^= 1
    tensors.write_bytes(content)

    more = ("--loop.num_steps", str(last + 2))
    ended = run_to_the_end(tmp_path, "run", *more, limit_s=LIMIT_S, resumes=True)
    assert ended.status == 0, ended.output
    assert f"changed: loop.num_steps: 500 -> {last + 2}" in ended.output
    assert f"{tensors} is corrupted: its checksum differs" in ended.output
    assert f"set aside as step-{last}.damaged, and an earlier one is taken" in ended.output
    assert (ended.folder / "checkpoints" / f"step-{last}.damaged").is_dir()
    assert [record["step"] for record in ended.steps] == list(range(1, last + 3))
    assert [record["policy_version"] for record in ended.steps] == list(range(1, last + 3))
    ids = {(r["step"], r["problem"], r["sample"]) for r in read_rollouts(ended.folder / "rollouts.jsonl")}
    assert len(ids) == len(read_rollouts(ended.folder / "rollouts.jsonl"))

    again = run_to_the_end(tmp_path, "run", limit_s=LIMIT_S, resumes=True)
    assert again.status == 2
    assert f"holds a finished run of {last + 2} steps: raise loop.num_steps={last + 2}" in again.output
