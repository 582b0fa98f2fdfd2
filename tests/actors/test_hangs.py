"""Frozen processes of real actors, and the errors of the calls that wait for them."""

import os
import re
import signal
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from actors.config import RecoveryConfig, Timeouts
from actors.launch.calls import ActorTimeoutError
from actors.launch.hang_report import add_hang_report
from rl.distributed.process_group import CollectiveTimeoutError, CommConfig
from rl.rollouts.samples import make_demonstration_sample
from rl.utils.processes import read_kernel_state
from tests.support.clusters import CONFIG, PROMPTS, RunningCluster
from tests.support.monarch_meshes import monarch_meshes

pytestmark = [pytest.mark.medium, pytest.mark.timeout(240)]

SAMPLE = make_demonstration_sample(PROMPTS[0].token_ids, PROMPTS[0].token_ids)
STOPPED = "no stacks: the process is stopped by a signal"
SHORT = Timeouts(train_s=2.1, close_s=10)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A cluster whose collectives have 4 s and that restarts nothing."""
    config = replace(
        CONFIG,
        trainer=replace(CONFIG.trainer, comm=CommConfig(train_timeout_s=4.0)),
        generator=replace(CONFIG.generator, num_replicas=1),
        recovery=RecoveryConfig(max_restarts=0),
    )
    with monarch_meshes() as meshes:
        running = RunningCluster(meshes, tmp_path_factory.mktemp("hangs"), config=config)
        yield running
        meshes.run(running.cluster.close())


@contextmanager
def stopped(group, rank):
    """Stop a process with SIGSTOP for the block; yield its pid."""
    process = group.processes[rank]
    os.kill(process.pid, signal.SIGSTOP)
    while read_kernel_state(process) != "stopped":
        os.sched_yield()
    try:
        yield process.pid
    finally:
        os.kill(process.pid, signal.SIGCONT)


def reported(running, error):
    """Return the lines after the message once the report was added, and the text of the file with
    all stacks.
    """
    running.run(add_hang_report(error, running.cluster.launcher.roles))
    (file,) = re.findall(r"all stacks: (.*)", error.more)
    return error.more.splitlines(), Path(file).read_text()


def test_stopped_trainer_rank_is_named_with_the_activity_of_the_other_rank(running):
    run, cluster = running.run, running.cluster
    short = replace(cluster.trainer, timeouts=SHORT)
    with stopped(short, 1):
        with pytest.raises(ActorTimeoutError) as caught:
            run(short.call("drop_gradient", timeout="train_s"))
        lines, file = reported(running, caught.value)
    assert str(caught.value).startswith(
        "trainer.drop_gradient gave no answer within 2.1 s (timeouts.train_s)\n  trainer[0]: idle "
        "for "
    )
    (place,) = (number for number, line in enumerate(lines) if line.startswith("  trainer[1]: "))
    assert lines[place + 1] == f"    {STOPPED}"
    assert not [line for line in lines if line.startswith("  reward")]
    headings = re.findall(r"==== (.*?\[\d\]):", file)
    assert sorted(headings) == [
        "generator[0]",
        "reward[0]",
        "reward[1]",
        "trainer[0]",
        "trainer[1]",
    ]
    assert 'actors/trainer.py", line' in file or 'threads.py", line' in file
    assert run(cluster.trainer.call("drop_gradient", timeout="train_s")) == [None, None]


def test_collective_timeout_names_the_call_and_reports_all_processes(running):
    """Run this test last: it breaks the process group."""
    run, cluster = running.run, running.cluster

    async def step():
        try:
            # Rank 0 is called alone, since an error of one rank is not raised until the others have
            # answered.
            samples = [SAMPLE, SAMPLE]
            await cluster.trainer.call("forward_backward", samples, rank=0, timeout="train_s")
        except CollectiveTimeoutError as error:
            return error

    error = run(step())
    lines, file = reported(running, error)
    assert error.message().startswith(
        "rank 0 of 2 of the trainer: in forward_backward of step 0 the other ranks did not take "
        "part within the deadline of a collective (comm.train_timeout_s; "
    )
    assert "==== generator[0]" in file
    told = (
        r"  trainer\[0\]: idle for .* s; forward_backward failed .* s ago: CollectiveTimeoutError: "
    )
    assert [line for line in lines if re.match(told, line)]
