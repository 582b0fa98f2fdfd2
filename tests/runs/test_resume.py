"""A stopped run that continues with --resume; tests/runs/test_synchronous.py has a killed one."""

import re
import signal

import pytest

from rl.observability.recorder import read_rollouts
from rl.training.checkpoints.files import list_steps, read_state
from tests.support.runs import SHORT, run_to_the_end, signal_group

pytestmark = [pytest.mark.slow, pytest.mark.long]
LIMIT_S = 240


@pytest.mark.timeout(3 * LIMIT_S + 60)
def test_resumed_off_policy_run_goes_on_undamaged_and_trains_on_each_problem_once(tmp_path):
    stopped = run_to_the_end(
        tmp_path, "run", *SHORT, "--loop.num_steps", "500", "--loop.max_off_policy_steps", "3",
        "--recorder.num_groups", "8", "--trainer.checkpoint.interval", "2",
        after=(f"{'4':>7}  ", signal_group(signal.SIGTERM)), limit_s=LIMIT_S,
    )  # fmt: skip
    assert stopped.status == 143, stopped.output
    assert re.search(r"saving step \d+, then ending; again to end at once", stopped.output)
    assert f"continue with --resume {stopped.folder}\n" in stopped.output
    steps = list_steps(stopped.folder / "checkpoints")
    last = int(stopped.steps[-1]["step"])
    assert max(steps) == last >= 4
    assert len(steps) >= 2
    position = read_state(steps[last]).position
    assert position is not None
    assert position.outstanding  # generation was ahead
    (tensors,) = steps[last].glob("*.distcp")
    content = bytearray(tensors.read_bytes())
    content[len(content) // 2] ^= 1
    tensors.write_bytes(content)

    more = ("--loop.num_steps", str(last + 4))
    ended = run_to_the_end(tmp_path, "run", *more, limit_s=LIMIT_S, resumes=True)
    assert ended.status == 0, ended.output
    assert f"changed: loop.num_steps: 500 -> {last + 4}" in ended.output
    assert f"{tensors} is corrupted: its checksum differs" in ended.output
    assert f"set aside as step-{last}.damaged, and an earlier one is taken" in ended.output
    assert (ended.folder / "checkpoints" / f"step-{last}.damaged").is_dir()
    assert [record["step"] for record in ended.steps] == list(range(1, last + 5))
    assert [record["policy_version"] for record in ended.steps] == list(range(1, last + 5))
    assert max(record["staleness/max"] for record in ended.steps) <= 3
    trained = [r for r in read_rollouts(ended.folder / "rollouts.jsonl") if r["kind"] == "train"]
    samples = [(r["problem"], r["sample"]) for r in trained]
    assert len(samples) == len(set(samples)) == 8 * 4 * (last + 4)

    again = run_to_the_end(tmp_path, "run", limit_s=LIMIT_S, resumes=True)
    assert again.status == 2
    assert (
        f"holds a finished run of {last + 4} steps: raise loop.num_steps={last + 4}" in again.output
    )
