"""The real actors of a run: two trainer ranks, two generators and two reward processes.

They are killed in the middle of their work by the last tests: they are replaced and the numbers
stay the same.
"""

import asyncio
import os
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from actors.cluster.clients import GeneratorClient, TrainerClient
from actors.cluster.parity import LogprobParityError
from actors.cluster.publisher import GeneratorPool
from actors.cluster.rewarder import RewardClient
from actors.cluster.shared_devices import DeviceLock
from actors.launch.calls import ActorCallError, ActorLostError
from rl.distributed.process_group import World
from rl.rollouts.samples import policy_sample
from rl.training.checkpoints.files import DamagedCheckpointError
from rl.training.engine import TrainingEngine
from rl.types import SamplingParams
from rl.utils.errors import RunError
from rl.utils.processes import kill
from rl.weights.types import WeightParityError
from tests.support.clusters import (
    CONFIG,
    PROMPTS,
    SPEC,
    TEXT,
    TOKENS,
    RunningCluster,
    assert_equal_bits,
    processes,
)
from tests.support.fakes import rollout_of
from tests.support.fleet_actors import DeadlyLoss, MisusedGenerator
from tests.support.monarch_meshes import monarch_meshes
from tests.support.scored import replied

pytestmark = [pytest.mark.medium, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    config = replace(
        CONFIG,
        trainer=replace(CONFIG.trainer, num_threads=2),
        generator=MisusedGenerator.Config.like(CONFIG.generator, can_sleep=True),
    )
    with monarch_meshes() as meshes:
        running = RunningCluster(meshes, tmp_path_factory.mktemp("cluster"), config=config)
        yield running
        meshes.run(running.cluster.close())


def test_calls_without_a_seed_draw_other_numbers_on_every_replica(running):
    router, sampling = running.router, SamplingParams(max_tokens=12)

    async def draw():
        calls = await asyncio.gather(
            *(router.generate(TOKENS[:1], sampling=sampling) for _ in range(8))
        )
        return {tuple(completion.token_ids) for ((completion,),) in calls}

    assert len(running.run(draw())) == 8


def test_logprobs_of_two_ranks_equal_those_of_one_rank_and_of_the_generator(running):
    config = TrainingEngine.Config(training=CONFIG.trainer.training)
    alone = TrainingEngine(
        config=config, model_spec=SPEC, hf_assets_path=running.assets, device="cpu", world=World()
    )
    samples = running.run(running.samples())
    logprobs = running.run(running.trainer.compute_logprobs(samples))
    assert_equal_bits(logprobs, alone.compute_logprobs(samples))
    assert_equal_bits([p[s.mask] for s, p in zip(samples, logprobs, strict=True)],
                      [s.generator_logprobs[s.mask] for s in samples])  # fmt: skip


def test_damaged_checkpoint_is_reported_through_the_actors_and_not_loaded(running, tmp_path):
    folder, samples = tmp_path / "damaged", running.run(running.samples())
    before = running.run(running.trainer.compute_logprobs(samples))
    running.run(running.trainer.save_checkpoint(str(folder)))
    tensors = next(folder.glob("*.distcp"))
    content = bytearray(tensors.read_bytes())
    content[len(content) // 2] ^= 1
    tensors.write_bytes(content)
    with pytest.raises(
        DamagedCheckpointError, match=rf"{tensors} is corrupted: its checksum differs"
    ):
        running.run(running.trainer.load_checkpoint(str(folder)))
    assert_equal_bits(running.run(running.trainer.compute_logprobs(samples)), before)


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ("stale", WeightParityError, r"version \d: generator 'generator_0' holds other bits in "),
        # The checksums are right; the logprobs are those of the previous weights.
        (
            "aside",
            LogprobParityError,
            r"version \d generator_0 differs from the trainer by .* nats a token",
        ),
    ],
)
def test_generator_that_does_not_use_the_pushed_weights_is_not_served(running, how, error, says):
    store = running.cluster.store
    served = store.snapshot(store.versions()[-1])
    running.run(running.train())
    running.run(
        running.pool.members[0].call(
            "misuse_next_pull", served if how == "stale" else None, timeout="sync_s"
        )
    )
    with pytest.raises(error, match=says):
        running.run(running.publish())
    running.run(running.train())
    running.run(running.publish())


def test_aborted_completion_continues_under_next_version(running):
    """Abort, update and continue, like a custom loop."""
    sampling = SamplingParams(max_tokens=200, num_samples=2, seed=7)

    async def steps():
        router = running.router
        assert await router.abort() == 0
        await running.train()
        old = await running.publish()
        drawing = asyncio.ensure_future(router.generate(TOKENS, sampling=sampling))
        # When these later calls are answered, all completions of the earlier call have tokens.
        for member in running.pool.members:
            await GeneratorClient(member).generate(TOKENS, sampling=SamplingParams(max_tokens=3))
        num_ended = await router.abort()
        begun = await drawing
        await running.train()
        new = await running.publish()
        return (
            num_ended,
            begun,
            await router.generate(TOKENS, sampling=sampling, begun=begun),
            (old, new),
        )

    num_ended, begun, made, (old, new) = running.run(steps())
    assert num_ended == 2 * len(TOKENS)
    assert new == old + 1
    for before, after in zip(chain(*begun), chain(*made), strict=True):
        assert before.finish_reason == "abort"
        assert after.finish_reason == "length"
        num_old = len(before.token_ids)
        assert 0 < num_old < 200
        np.testing.assert_array_equal(after.token_ids[:num_old], before.token_ids)
        np.testing.assert_array_equal(after.logprobs[:num_old], before.logprobs)
        assert after.policy_versions.tolist() == [old] * num_old + [new] * (200 - num_old)


def test_trainer_and_generators_that_share_devices_serve_the_trained_weights(running):
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
            lock.generators, trainer=lock.trainer, store=cluster.store, parity=running.pool.parity
        )
        version = (await trainer.optim_step(allow_empty=True)).policy_version
        await pool.pull(await pool.push())
        with pytest.raises(ActorCallError, match="the trainer is asleep: call wake first"):
            await running.trainer.compute_logprobs([])
        # The generators sleep here and have to pull again.
        await trainer.save_checkpoint(str(running.folder / "between"))
        sampling = SamplingParams(max_tokens=8, seed=3)
        ((drawn,),) = await GeneratorClient(pool.members[1]).generate([TEXT], sampling=sampling)
        sample = policy_sample(
            rollout_of(replace(PROMPTS[0], token_ids=TEXT), drawn, text=""),
            advantages_C=np.ones(len(drawn.token_ids)),
            temperature=1.0,
        )
        logprobs = await trainer.compute_logprobs([sample])
        await asyncio.gather(*(group.call("wake", timeout="sync_s") for group in groups))
        await running.trainer.optim_step(allow_empty=True)
        await running.publish()  # they woke without weights
        return version, sample, logprobs[0]

    version, sample, logprobs = running.run(steps())
    assert set(sample.policy_versions[sample.mask]) == {version}
    np.testing.assert_array_equal(sample.generator_logprobs[sample.mask], logprobs[sample.mask])


def test_generator_killed_while_generating_loses_no_token(running):
    async def steps():
        undisturbed = await running.draw()
        drawing = asyncio.ensure_future(running.draw())
        # When this later, short call is answered, the earlier completions have tokens too.
        await GeneratorClient(running.pool.members[0]).generate(
            TOKENS[:1], sampling=SamplingParams(max_tokens=3)
        )
        victim = processes(running.pool.members[0])[0]
        kill(victim)
        drawn = await drawing
        up = running.pool.list_up()
        await running.all_up()
        return undisturbed, drawn, up, victim, await running.draw()

    undisturbed, drawn, up, victim, after = running.run(steps())
    assert up == [1]  # the other generator had answered everything before the restart was over
    assert drawn == undisturbed
    assert after == undisturbed
    assert processes(running.pool.members[0])[0].pid != victim.pid
    assert running.lost() == ["generator_0"]


def test_unanswered_rollouts_of_a_killed_reward_process_are_scored_again(running, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    rewarder = RewardClient(running.cluster.reward, num_procs=2)
    hanging = [
        replied("x", sample=0),
        replied(f"hang {tmp_path}", sample=1),
        replied("x", sample=2),
    ]
    plain = [replied("x", sample=i) for i in range(3)]

    async def steps():
        # The first group goes to the first process, the second one, which hangs, to the second.
        scoring = asyncio.ensure_future(rewarder.score([plain, hanging]))
        assert await asyncio.to_thread(Path(tmp_path / "fifo").read_text) == "began"
        before = processes(running.cluster.reward)
        kill(before[1])
        scores = await scoring
        await running.cluster.reward.wait_until_up()
        return before, scores, processes(running.cluster.reward)

    before, scores, after = running.run(steps())
    assert [[score.reward for score in of] for of in scores] == [[0, 1, 2]] * 2
    assert not {p.pid for p in before.values()} & {p.pid for p in after.values()}
    assert running.lost() == ["reward"]


def test_trainer_with_a_rank_lost_in_forward_backward_continues_from_its_checkpoint(
    running, tmp_path
):
    generators = [processes(member)[0].pid for member in running.pool.members]
    before = processes(running.cluster.trainer)

    async def steps():
        drawn, samples = await running.draw(), await running.samples()
        await running.trainer.save_checkpoint(str(tmp_path / "saved"))
        logprobs = await running.trainer.compute_logprobs(samples)
        # This further step is lost; its version number returns with other weights.
        await running.train()
        await running.publish()
        with pytest.raises(
            ActorLostError, match=r"^trainer\.forward_backward failed: rank 1 of 2 is dead"
        ) as told:
            await running.trainer.forward_backward(samples, loss=DeadlyLoss(rank=1))
        await running.cluster.restart_trainer(told.value)
        version = await running.trainer.load_checkpoint(str(tmp_path / "saved"))
        assert_equal_bits(await running.trainer.compute_logprobs(samples), logprobs)
        assert await running.publish() == version
        assert await running.draw() == drawn
        alive = RunError("something else")
        with pytest.raises(RunError) as raised:
            await running.cluster.restart_trainer(alive)
        assert raised.value is alive

    running.run(steps())
    after = processes(running.cluster.trainer)
    assert not {p.pid for p in before.values()} & {p.pid for p in after.values()}
    assert [processes(member)[0].pid for member in running.pool.members] == generators
    assert running.lost() == ["trainer"]
