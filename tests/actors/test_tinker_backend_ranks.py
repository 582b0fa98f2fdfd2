"""The Tinker backend with a trainer of two FSDP2 ranks, one of which dies."""

import asyncio
import os
import signal

import pytest

from actors.client import RUN, RUN_VARIABLE
from actors.processes import carrying_environment
from actors.tinker_calls import BackendLostError
from rl.distributed.mesh import ParallelismConfig
from rl.tinker.messages import AdamParams
from tests.support.tinker_backends import (
    CROSS_ENTROPY,
    actor_config,
    assert_same_outputs,
    created,
    local_backend,
    running,
    sampled,
    tokens_of,
    train,
)
from tests.tinker.local.data_parts import random_data
from tests.tinker.local.local_parts import settings


@pytest.mark.medium
@pytest.mark.timeout(300)
def test_two_ranks_train_as_one_process_does_until_one_dies_and_then_all_say_so(tmp_path):
    shards = ParallelismConfig(data_parallel_shard_degree=2)
    actors = actor_config(tmp_path / "base", num_procs=2, parallelism=shards).build()
    local = local_backend(tmp_path / "base")

    async def life(backend):
        outputs = await created(backend, "lora") + await created(backend, "full", rank=0)
        for name in ("lora", "full"):
            await backend.take_snapshot(name, f"of {name}")
        outputs += await train(backend, "lora", seed=30)
        folder = tmp_path / str(id(backend))
        folder.mkdir()
        await backend.save_state("lora", folder)
        await backend.create_model("loaded", settings(4, seed=99))
        await backend.load_state("loaded", folder, optimizer=True)
        outputs += await train(backend, "loaded", seed=40)
        names = ("of lora", "of full", "of lora")
        return outputs, await asyncio.gather(*(sampled(backend, name) for name in names))

    async def after_a_death():
        rank1 = actors._fleet.trainer.processes[1]
        computing = asyncio.create_task(train(actors, "lora", steps=2000))
        waiting = asyncio.create_task(actors.create_model("new", settings(4)))
        await train(actors, "full", steps=1)
        os.kill(rank1.pid, signal.SIGKILL)
        ends = await asyncio.gather(computing, waiting, return_exceptions=True)
        assert isinstance(ends[0], BackendLostError), ends
        assert "the trainer is lost" in str(ends[0])
        assert "Close this backend" in str(ends[0])
        for call in (
            actors.optim_step("full", AdamParams()),
            actors.forward_backward("lora", random_data(1, seed=1), CROSS_ENTROPY, backward=True),
            actors.open_sampler("base", settings(), None),
        ):
            with pytest.raises(BackendLostError, match="the trainer is lost"):
                await call

    with running(actors, local) as loop:
        (outputs, answers), (expected, local_answers) = (loop.run(life(b)) for b in (actors, local))
        assert_same_outputs(outputs, expected)
        assert [tokens_of(a) for a in answers] == [tokens_of(a) for a in local_answers]
        loop.run(after_a_death())
        loop.run(actors.close())
        assert carrying_environment(RUN_VARIABLE, RUN) == []
        with pytest.raises(RuntimeError, match="the backend was closed"):
            loop.run(sampled(actors, "of lora"))
