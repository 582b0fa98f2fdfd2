"""Simulated hosts that are killed with all on them: their roles go on, on other hosts."""

import asyncio
import os
from dataclasses import replace

import numpy as np
import pytest

from actors import hosts
from actors.backend import ActorLearner, ActorSampler
from actors.calls import ActorLostError
from actors.launch_config import LaunchConfig
from actors.processes import is_alive, kill
from rl.distributed.mesh import ParallelismConfig
from tests.actors.test_recovery import CONFIG, LIMIT_S, Running, processes, revive
from tests.support.monarch_meshes import monarch_meshes
from tests.support.mortal_actors import MortalTrainer

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(400)]

ON_HOSTS = replace(
    CONFIG,
    trainer=replace(CONFIG.trainer, num_procs=1, parallelism=ParallelismConfig()),
    launch=LaunchConfig(hosts="process"),
)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    assert isinstance(ON_HOSTS.trainer, MortalTrainer.Config)
    with monarch_meshes() as meshes:
        yield Running(meshes, tmp_path_factory.mktemp("hosts"), config=ON_HOSTS)


def kill_host(group):
    """Its process, and with it all actors on it."""
    (host,) = hosts.processes_of(group)
    kill(host)
    return host


def test_a_generators_host_that_is_killed_is_replaced_and_the_others_stay(running):
    async def steps():
        before = await running.draw()
        others = [*hosts.processes_of("trainer"), *hosts.processes_of("generator1")]
        host = kill_host("generator0")
        during = await running.draw()
        await running.all_up()
        (renewed,) = hosts.processes_of("generator0")
        assert all(map(is_alive, [renewed, *others]))
        # Nobody but it is on the new host.
        (alone,) = processes(running.fleet.generators[0]).values()
        assert os.getsid(alone.pid) == renewed.pid != host.pid
        return before, during, await running.draw()

    before, during, after = running.run(steps(), timeout_s=LIMIT_S)
    assert before == during == after
    assert running.lost() == ["generator_0"]


def test_a_trainers_host_that_is_killed_is_replaced_and_its_checkpoint_loaded(running, tmp_path):
    async def lose():
        samples = await running.samples()
        await running.learner.save_checkpoint(str(tmp_path / "saved"))
        logprobs = await running.learner.compute_logprobs(samples)
        drawn = await running.draw()
        kill_host("trainer")
        with pytest.raises(
            ActorLostError, match=r"^trainer\.compute_logprobs failed: rank 0 of 1 is dead"
        ) as e:
            await running.learner.compute_logprobs(samples)
        return samples, logprobs, drawn, e.value

    async def go_on(samples):
        version = await ActorLearner(running.fleet.trainer).load_checkpoint(str(tmp_path / "saved"))
        assert await running.publish() == version
        return await running.learner.compute_logprobs(samples), await running.draw()

    samples, logprobs, drawn, error = running.run(lose(), timeout_s=LIMIT_S)
    revive(running, error)
    again, drawn_again = running.run(go_on(samples), timeout_s=LIMIT_S)
    for ours, theirs in zip(again, logprobs, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert drawn_again == drawn
    assert running.lost() == ["trainer"]


def test_both_hosts_of_the_generators_at_once_leave_prompts_that_wait_until_one_is_back(running):
    async def steps():
        before = await running.draw()
        drawing = asyncio.ensure_future(running.draw())
        await ActorSampler(running.fleet.generators[0]).generate(
            [np.arange(2, 9, dtype=np.int32)], sampling=replace(running.sampling, max_tokens=3)
        )
        for group in ("generator0", "generator1"):
            kill_host(group)
        during = await drawing
        await running.all_up()
        return before, during

    before, during = running.run(steps(), timeout_s=LIMIT_S)
    assert before == during
    assert sorted(running.lost()) == ["generator_0", "generator_1"]
