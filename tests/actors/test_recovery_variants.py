"""What is lost and replaced in less plain runs: split generators, spares, weights in files."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from actors import launch
from actors.backend import ActorSampler
from actors.calls import ActorLostError
from actors.processes import kill
from actors.supervision import RecoveryConfig
from rl.distributed.mesh import ParallelismConfig
from rl.types import SamplingParams
from rl.weights.files import FileWeightStore
from tests.actors.test_recovery import CONFIG, LIMIT_S, TOKENS, Running, goes_on, processes, revive, saved
from tests.support.monarch_meshes import monarch_meshes

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(400)]

VARIANT = replace(
    CONFIG,
    trainer=replace(
        CONFIG.trainer, parallelism=ParallelismConfig(tensor_parallel_degree=2, loss_parallel=False)
    ),
    generator=replace(CONFIG.generator, num_replicas=1, tensor_parallel_degree=2),
    recovery=RecoveryConfig(max_restarts=20, pause_s=0.0, spare_generators=1),
)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("variants")
    store = FileWeightStore(config=FileWeightStore.Config(), folder=folder / "weights")
    with monarch_meshes() as meshes:
        yield Running(meshes, folder, config=VARIANT, store=store)
        store.discard()


def test_of_a_split_generator_one_lost_rank_is_both_and_a_spare_takes_their_place(running):
    async def steps():
        before = await running.draw()
        await running.fleet.recovery.spares.ready()
        spare = {process.pid for process in launch.role_processes("spare_0")}
        (slot,) = running.fleet.pool.slots
        drawing = asyncio.ensure_future(running.draw())
        await ActorSampler(slot).generate(TOKENS[:1], sampling=SamplingParams(max_tokens=3))
        kill(processes(slot)[1])
        during = await drawing
        assert {process.pid for process in processes(slot).values()} == spare
        assert len(spare) == 2
        await running.fleet.recovery.spares.ready()
        kill(launch.role_processes("spare_1")[0])
        while not launch.role_processes("spare_2"):
            await asyncio.sleep(0.1)
        await running.fleet.recovery.spares.ready()
        assert len(launch.role_processes("spare_2")) == 2
        assert not launch.role_processes("spare_1")
        return before, during, slot.name

    before, during, name = running.run(steps(), timeout_s=LIMIT_S)
    assert before == during
    assert running.lost() == [name]
    # From then on its log is that of its place.
    assert (running.folder / "logs" / f"{name}-1.log").stat().st_size > 0


def test_a_trainer_whose_weights_are_in_files_is_replaced_too(running, tmp_path):
    async def steps():
        samples, logprobs = await saved(running, tmp_path / "saved")
        drawn = await running.draw()
        kill(processes(running.fleet.trainer)[0])
        with pytest.raises(ActorLostError, match=r"rank 0 of 2 is dead") as told:
            await running.learner.forward_backward(samples)
        return samples, logprobs, drawn, told.value

    samples, logprobs, drawn, error = running.run(steps(), timeout_s=LIMIT_S)
    revive(running, error)
    again, drawn_again = running.run(goes_on(running, tmp_path / "saved", samples), timeout_s=LIMIT_S)
    for ours, theirs in zip(again, logprobs, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert drawn_again == drawn
    assert running.lost() == ["trainer"]
