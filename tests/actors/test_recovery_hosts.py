"""Simulated hosts killed with all their processes: their roles continue on other hosts."""

import os
from dataclasses import replace

import pytest

from actors.calls import ActorLostError
from actors.config import LaunchConfig
from rl.distributed.mesh import ParallelismConfig
from rl.utils.processes import is_alive, kill
from tests.support.clusters import CONFIG, RunningCluster, assert_equal_bits, processes
from tests.support.monarch_meshes import monarch_meshes

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(400)]

ON_HOSTS = replace(
    CONFIG,
    trainer=replace(CONFIG.trainer, num_procs=1, parallelism=ParallelismConfig()),
    launch=LaunchConfig(hosts="process"),
)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with monarch_meshes() as meshes:
        yield RunningCluster(meshes, tmp_path_factory.mktemp("hosts"), config=ON_HOSTS)


def kill_host(running, group):
    """Kill the process of a host, and with it all actors on it."""
    (host,) = running.cluster.launcher.hosts.processes[group]
    kill(host)
    return host


def test_killed_generator_host_is_replaced_and_other_hosts_stay(running):
    async def steps():
        hosts = running.cluster.launcher.hosts.processes
        before = await running.draw()
        others = [*hosts["trainer"], *hosts["generator1"]]
        host = kill_host(running, "generator0")
        during = await running.draw()
        await running.all_up()
        (renewed,) = hosts["generator0"]
        assert all(map(is_alive, [renewed, *others]))
        # The new host runs this generator alone.
        (alone,) = processes(running.pool.members[0]).values()
        assert os.getsid(alone.pid) == renewed.pid != host.pid
        return before, during, await running.draw()

    before, during, after = running.run(steps())
    assert before == during == after
    assert running.lost() == ["generator_0"]


def test_killed_trainer_host_is_replaced_and_its_checkpoint_loaded(running, tmp_path):
    async def lose():
        samples = await running.samples()
        await running.trainer.save_checkpoint(str(tmp_path / "saved"))
        logprobs = await running.trainer.compute_logprobs(samples)
        drawn = await running.draw()
        kill_host(running, "trainer")
        with pytest.raises(
            ActorLostError, match=r"^trainer\.compute_logprobs failed: rank 0 of 1 is dead"
        ) as e:
            await running.trainer.compute_logprobs(samples)
        return samples, logprobs, drawn, e.value

    async def go_on(samples):
        version = await running.trainer.load_checkpoint(str(tmp_path / "saved"))
        assert await running.publish() == version
        return await running.trainer.compute_logprobs(samples), await running.draw()

    samples, logprobs, drawn, error = running.run(lose())
    running.run(running.cluster.restart_trainer(error))
    again, drawn_again = running.run(go_on(samples))
    assert_equal_bits(again, logprobs)
    assert drawn_again == drawn
    assert running.lost() == ["trainer"]
