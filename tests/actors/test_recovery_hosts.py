"""A simulated host killed with all its processes: its role continues on another host.

`tests/runs/test_synchronous.py` kills the host of a generator.
"""

from dataclasses import replace

import pytest

from actors.config import LaunchConfig
from actors.launch.calls import ActorLostError
from rl.distributed.mesh import ParallelismConfig
from rl.utils.processes import is_alive, kill
from tests.support.clusters import CONFIG, RunningCluster, assert_equal_bits
from tests.support.monarch_meshes import monarch_meshes

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(400)]

ON_HOSTS = replace(
    CONFIG,
    trainer=replace(CONFIG.trainer, num_procs=1, parallelism=ParallelismConfig()),
    launch=LaunchConfig(hosts="process"),
)


def test_killed_trainer_host_is_replaced_and_its_checkpoint_loaded(tmp_path):
    with monarch_meshes() as meshes:
        running = RunningCluster(meshes, tmp_path, config=ON_HOSTS)
        running.run(lose_and_restore_trainer(running, str(tmp_path / "saved")))
        assert running.lost() == ["trainer"]


async def lose_and_restore_trainer(running, saved):
    trainer, hosts = running.trainer, running.cluster.launcher.hosts.processes
    others = [*hosts["generator0"], *hosts["generator1"]]
    samples, drawn = await running.samples(), await running.draw()
    await trainer.save_checkpoint(saved)
    logprobs = await trainer.compute_logprobs(samples)
    (host,) = hosts["trainer"]
    kill(host)
    says = r"^trainer\.compute_logprobs failed: rank 0 of 1 is dead"
    with pytest.raises(ActorLostError, match=says) as lost:
        await trainer.compute_logprobs(samples)
    await running.cluster.restart_trainer(lost.value)
    version = await trainer.load_checkpoint(saved)
    assert await running.publish() == version
    assert_equal_bits(await trainer.compute_logprobs(samples), logprobs)
    assert await running.draw() == drawn
    assert all(map(is_alive, [*hosts["trainer"], *others]))
