"""Hosts simulated on this machine by Monarch's ProcessJob: environments, cleanup and lost
processes.
"""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.support.runs import start_controller, wait_until_gone

NUM_HOSTS, NUM_ACTORS, NUM_CHILDREN, NUM_GUARDS = 3, 5, 5, 1


def start(how):
    """Start a controller process; return it with the description of its run."""
    controller = start_controller("launch_controller", how, "process")
    assert controller.stdout is not None
    run = json.loads(controller.stdout.readline())
    assert len(run["pids"]) == NUM_HOSTS + NUM_ACTORS + NUM_CHILDREN + NUM_GUARDS
    return controller, run


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_simulated_hosts_leave_nothing_behind():
    controller, run = start("wait")
    check_environments(run["environments"])
    os.killpg(controller.pid, signal.SIGTERM)
    _, errors = controller.communicate(timeout=60)
    assert controller.returncode == 143, errors
    assert wait_until_gone(run["pids"]) == []
    assert [file for file in run["files"] if Path(file).exists()] == []
    # Output of Monarch's jobs does not belong on the console.
    assert [
        line for line in errors.splitlines() if "Monarch internal" in line or "job" in line.lower()
    ] == []


def check_environments(environments):
    trainers, (generator,) = environments[:4], environments[4:]
    for rank, env in enumerate(trainers):
        # Two processes on each of two hosts, which are one machine.
        assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) == (str(rank), str(rank), "4")
        assert (env["MASTER_ADDR"], env["OMP_NUM_THREADS"], env["A"]) == ("127.0.0.1", "3", "b")
        assert env["RELAY_ROLE"] == "trainer"
    assert (generator["RELAY_ROLE"], generator["OMP_NUM_THREADS"]) == ("generator", "2")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_process_that_dies_on_another_host_is_named_by_its_rank_in_time():
    """Monarch alone reports it, since a controller cannot look at processes of other hosts."""
    controller, run = start("die")
    assert controller.stdout is not None
    answer = controller.stdout.readline()
    _, errors = controller.communicate(timeout=100)
    assert controller.returncode == 0, errors
    message, seconds = json.loads(answer)
    assert message.startswith("trainer.exit_now failed: rank 2 of 4 is dead: ")
    assert "exited with non-zero code 3" in message
    assert seconds < 60
    assert wait_until_gone(run["pids"]) == []
    for file in run["files"]:  # nothing is left to ask which process it was
        Path(file).unlink(missing_ok=True)
