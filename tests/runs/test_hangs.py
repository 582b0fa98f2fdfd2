"""A whole run with a process that hangs without dying."""

import re

import pytest

from rl.observability.events import read_events
from tests.support.runs import stop_role_after_line

SHORT = ("--module", "tests.support.faulty_configs", "--config", "short", "--task.reward", "noise")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(240)
def test_hanging_generator_ends_the_run_with_the_stacks_of_all_processes(tmp_path):
    run = stop_role_after_line(
        tmp_path, "hangs", *SHORT, "--loop.num_steps", "60", "--timeouts.generate_s", "8",
        "--timeouts.sync_s", "8", "--weights.timeout_s", "8",
        line="train tok/s", role="generator", limit_s=180,
    )  # fmt: skip
    assert run.status == 1, run.output
    message = run.output[run.output.index("error: the run stopped: ") :]
    assert re.match(
        r"error: the run stopped: step \d+: generator\.(generate|compute_logprobs|pull_model_state_dict) "
        r"gave no answer within timeouts\.(generate_s|sync_s)=8\n"
        r"  generator\[0\]: .*\n    no stacks: the process is stopped by a signal\n",
        message,
    ), message
    (file,) = re.findall(r"  of the whole run: (.*)", message)
    text = (run.folder / "logs" / file).read_text()
    assert sorted(re.findall(r"==== (.*?\[\d\]): ", text)) == [
        "controller[0]", "generator[0]", "reward[0]", "trainer[0]",
    ]  # fmt: skip
    events = read_events(run.folder / "events.jsonl")
    assert [event["event"] for event in events] == ["started", "stopped"]
    assert "gave no answer" in events[1]["reason"]
