"""A run with LoRA over real actors: adapters alone are pushed, and generators keep the base.

Processes are killed in the middle of their work by the last tests.
"""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from actors.cluster.clients import GeneratorClient, TrainerClient
from actors.cluster.publisher import GeneratorPool
from actors.cluster.shared_devices import DeviceLock
from actors.generator import VLLMGenerator
from actors.reward import RewardActor
from actors.trainer import PolicyTrainer
from rl.distributed.process_group import World
from rl.models.lora import LoRA
from rl.training.config import TrainingConfig
from rl.training.engine import TrainingEngine
from rl.training.optimizer import Optimizer
from rl.types import BASE, SamplingParams
from rl.utils.errors import RunError
from rl.utils.processes import kill
from rl.weights.types import WeightParityError
from tests.support.clusters import CONFIG, SPEC, TOKENS, RunningCluster, processes
from tests.support.fleet_actors import DeadlyLoss, MisusedGenerator
from tests.support.monarch_meshes import monarch_meshes

LORA = LoRA.Config(rank=4, alpha=8.0)
pytestmark = [pytest.mark.medium, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    config = replace(
        CONFIG,
        trainer=PolicyTrainer.Config(
            optimizer=Optimizer.Config(lr=1e-1),
            training=TrainingConfig(max_tokens_per_microbatch=512),
            converters=(LORA,),
        ),
        generator=MisusedGenerator.Config.like(CONFIG.generator, can_sleep=True),
        reward=RewardActor.Config(num_procs=0),
    )
    with monarch_meshes() as meshes:
        running = RunningCluster(meshes, tmp_path_factory.mktemp("cluster"), config=config)
        yield running
        meshes.run(running.cluster.close())


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
    assert store.snapshot(version).num_bytes == 4 * model.num_layers * of_layer


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


def test_base_of_a_loaded_checkpoint_is_pushed_to_the_generators(running, tmp_path):
    """A checkpoint of a run on other weights: they come with its adapter."""
    other = TrainingEngine(
        config=TrainingEngine.Config(
            training=TrainingConfig(max_tokens_per_microbatch=512, seed=5), converters=(LORA,)
        ),
        model_spec=SPEC,
        hf_assets_path=None,
        world=World(),
        device="cpu",
    )
    other.save_checkpoint(str(tmp_path / "other"))

    async def steps():
        await running.trainer.save_checkpoint(str(tmp_path / "own"))
        before = await running.draw()
        await running.trainer.load_checkpoint(str(tmp_path / "other"))
        await running.publish()
        drawn = await running.draw()
        # Its version number comes back, for the same weights.
        await running.cluster.store.delete(
            await running.trainer.load_checkpoint(str(tmp_path / "own"))
        )
        await running.publish()
        return before, drawn, await running.draw()

    before, drawn, after = running.run(steps())
    assert [tokens for tokens, *_ in drawn] != [tokens for tokens, *_ in before]
    assert [row[:2] for row in after] == [row[:2] for row in before]


def test_generators_that_share_devices_get_the_base_again_after_they_slept(running, tmp_path):
    cluster, groups = running.cluster, running.pool.members

    async def steps():
        await asyncio.gather(*(group.call("sleep", timeout="sync_s") for group in groups))
        lock = DeviceLock(
            trainer=cluster.trainer,
            generators=groups,
            pull=lambda version, generators: pool.pull_and_check(version, generators=generators),
        )
        trainer = TrainerClient(lock.trainer)
        pool = GeneratorPool(
            lock.generators,
            trainer=lock.trainer,
            store=cluster.store,
            parity=running.pool.parity,
            keeps_base=True,
        )
        diffs = []
        for _ in range(2):
            await trainer.optim_step(allow_empty=True)
            diffs.append((await pool.pull(await pool.push())).parity_diff)
            # The generators sleep here and pull both again.
            await trainer.save_checkpoint(str(tmp_path / f"between{len(diffs)}"))
            await GeneratorClient(pool.members[1]).generate(
                TOKENS[:1], sampling=SamplingParams(max_tokens=2)
            )
        await trainer.optim_step(allow_empty=True)
        version = await pool.push()
        # Both need the base, the first with the devices in its hands.
        sampling = SamplingParams(max_tokens=2)
        drawing = GeneratorClient(pool.members[1]).generate(TOKENS[:1], sampling=sampling)
        await asyncio.wait_for(asyncio.gather(drawing, pool.pull(version)), 60)
        await trainer.optim_step(allow_empty=True)
        await asyncio.gather(*(group.call("wake", timeout="sync_s") for group in groups))
        await cluster.store.delete(BASE)
        await running.publish()
        return diffs

    assert running.run(steps()) == [0.0, 0.0]


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
