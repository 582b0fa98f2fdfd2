"""A run with LoRA over real actors: adapters alone are pushed, and generators keep the base.

Processes are killed in the middle of their work by the last tests.
"""

import asyncio
from dataclasses import fields, replace
from typing import Any

import pytest

from actors.generator import VLLMGenerator
from actors.reward import RewardActor
from actors.trainer import PolicyTrainer
from rl.models.lora import LoRA
from rl.training.config import TrainingConfig
from rl.training.optimizer import Optimizer
from rl.types import BASE
from rl.utils.errors import RunError
from rl.utils.processes import kill
from rl.weights.types import WeightParityError
from tests.support.clusters import CONFIG, SPEC, RunningCluster, processes
from tests.support.fleet_actors import DeadlyLoss, MisusedGenerator
from tests.support.monarch_meshes import monarch_meshes

pytestmark = [pytest.mark.medium, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    generator = {f.name: getattr(CONFIG.generator, f.name) for f in fields(CONFIG.generator)}
    config = replace(
        CONFIG,
        trainer=PolicyTrainer.Config(
            optimizer=Optimizer.Config(lr=1e-1),
            training=TrainingConfig(max_tokens_per_microbatch=512),
            converters=(LoRA.Config(rank=4, alpha=8.0),),
        ),
        generator=MisusedGenerator.Config(**generator),
        reward=RewardActor.Config(num_procs=0),
    )
    with monarch_meshes() as meshes:
        running = RunningCluster(meshes, tmp_path_factory.mktemp("cluster"), config=config)
        yield running
        meshes.run(running.cluster.close())


def count_bytes(running, version):
    return sum(
        part.num_bytes
        for shard in running.cluster.store.snapshot(version).shards
        for part in shard.parts
    )


def test_push_has_the_adapter_alone_and_the_base_is_in_no_shared_memory(running):
    store = running.cluster.store
    (version,) = store.versions()
    assert version != BASE
    adapter = store.snapshot(version).adapter
    assert adapter.lora.rank == 4
    model = SPEC.model
    feed_forward: Any = model.block.feed_forward
    heads, ffn = model.block.attention, feed_forward.hidden_dim
    queries, keys = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    sizes = [(model.dim, n) for n in (queries, keys, keys, ffn, ffn)]
    sizes += [(queries, model.dim), (ffn, model.dim)]
    of_layer = sum(4 * (num_in + num_out) for num_in, num_out in sizes)
    assert count_bytes(running, version) == 4 * model.num_layers * of_layer


def test_each_version_is_sampled_with_the_bits_that_the_trainer_computes(running):
    async def step():
        await running.train()
        version = await running.publish()
        samples = await running.samples()
        return version, samples, await running.trainer.compute_logprobs(samples)

    for _ in range(2):
        version, samples, logprobs = running.run(step())
        for sample, expected in zip(samples, logprobs, strict=True):
            assert set(sample.policy_versions[sample.mask].tolist()) == {version}
            assert (sample.generator_logprobs[sample.mask] == expected[sample.mask]).all()


def test_stale_adapter_is_not_served(running):
    async def misuse():
        store = running.cluster.store
        stale = store.snapshot(store.versions()[-1])
        await running.train()
        await running.pool.members[0].call("misuse_next_pull", stale, timeout="sync_s")
        await running.publish()

    with pytest.raises(WeightParityError, match=r"generator 'generator_0' holds other bits in "):
        running.run(misuse())
    running.run(running.train())
    running.run(running.publish())


def test_generator_killed_in_a_pull_comes_back_with_base_and_adapter(running):
    async def steps():
        await running.train()
        version = await running.pool.push()
        pulling = asyncio.ensure_future(running.pool.pull(version))
        await asyncio.sleep(0)
        victim = processes(running.pool.members[0])[0]
        kill(victim)
        await pulling
        await running.all_up()
        base_ids = [
            (await member.call(VLLMGenerator.get_base_id, timeout="sync_s"))[0]
            for member in running.pool.members
        ]
        drawn = [await running.draw() for _ in running.pool.members]
        return victim, version, base_ids, drawn

    victim, version, base_ids, drawn = running.run(steps())
    assert processes(running.pool.members[0])[0].pid != victim.pid
    assert base_ids[0] == base_ids[1] is not None
    # The router sends each draw to both generators: they compute the same.
    assert drawn[0] == drawn[1]
    assert {v for _, _, versions in drawn[0] for v in versions} == {version}
    assert running.cluster.store.versions().count(BASE) == 0
    assert running.lost() == ["generator_0"]


def test_new_trainer_pushes_adapters_for_the_base_that_generators_hold(running, tmp_path):
    async def steps():
        drawn = await running.draw()
        await running.trainer.save_checkpoint(str(tmp_path / "saved"))
        samples = await running.samples()
        with pytest.raises(RunError, match="dead") as told:
            await running.trainer.forward_backward(samples, loss=DeadlyLoss(rank=0))
        await running.cluster.restart_trainer(told.value)
        await running.trainer.load_checkpoint(str(tmp_path / "saved"))
        await running.publish()
        return drawn, await running.draw()

    before, after = running.run(steps())
    assert after == before
    assert running.lost() == ["trainer"]
