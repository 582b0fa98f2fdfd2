"""A run's own actors, killed in the middle of their work: what is lost is replaced, with the same numbers."""

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.backend import ActorLearner, ActorPublisher, ActorSampler, ActorScorer
from actors.calls import ActorLostError, Timeouts
from actors.canary import LogprobCanary
from actors.fleet import close_fleet, start_fleet
from actors.fleet_config import FleetConfig
from actors.generator import VLLMGenerator
from actors.processes import kill
from actors.revive import revive_trainer
from actors.reward import RewardActor
from actors.roles import LogSettings
from actors.router import Router
from actors.supervision import RecoveryConfig
from actors.sync_check import SyncCheck
from rl.distributed.mesh import ParallelismConfig
from rl.errors import RunError
from rl.models.qwen3 import model_registry
from rl.models.starting_point import write_random_model
from rl.rollouts.samples import policy_sample
from rl.tasks.sum_digits import make_problem
from rl.training.config import TrainingConfig
from rl.training.optimizer import Optimizer
from rl.types import SamplingParams
from tests.support.fakes import prompt_of, rollout_of
from tests.support.monarch_meshes import monarch_meshes
from tests.support.mortal_actors import DeadlyLoss, MortalStore, MortalTrainer, rubric
from tests.support.scored import replied

pytestmark = [pytest.mark.medium, pytest.mark.timeout(400)]

SPEC = replace(model_registry("tiny"), batch_invariant=True)
PROMPTS = [prompt_of(make_problem([n, 30 + n])) for n in range(11, 17)]
TOKENS = [prompt.token_ids for prompt in PROMPTS]
SAMPLING = SamplingParams(max_tokens=200, num_samples=2, seed=1)
CANARY = np.concatenate(TOKENS[:2])
LIMIT_S = 200.0
"""For a restart on a machine that is busy with other tests; docs/reliability.md has what it takes alone."""
CONFIG = FleetConfig(
    trainer=MortalTrainer.Config(
        num_procs=2,
        parallelism=ParallelismConfig(data_parallel_shard_degree=2),
        optimizer=Optimizer.Config(lr=1e-2),
        training=TrainingConfig(max_tokens_per_microbatch=512),
    ),
    generator=VLLMGenerator.Config(
        num_replicas=2, dtype="float32", max_model_len=256, cpu_kv_cache_gib=0.05, block_size=32
    ),
    reward=RewardActor.Config(num_procs=2, time_limit_s=60),
    timeouts=Timeouts(close_s=10),
    recovery=RecoveryConfig(max_restarts=20, pause_s=0.0),
)


class Running:
    """A fleet that serves, and is told of what it lost and recovered."""

    sampling = SAMPLING

    def __init__(self, meshes, folder, *, config=CONFIG, store=None):
        self.run = meshes.run
        self.folder = folder
        self.assets = str(write_random_model(folder / "assets", spec=SPEC, seed=0))
        self.told: list[tuple[str, dict[str, Any]]] = []
        starting = start_fleet(
            config,
            store=store or MortalStore.Config().build(dtype="float32"),
            check=SyncCheck(LogprobCanary(token_ids=CANARY, max_diff=0.0)),
            model_spec=SPEC,
            hf_assets_path=self.assets,
            rubric=rubric(),
            failure_folder=folder,
            logs=LogSettings(folder=folder / "logs", console_level="ERROR"),
            events=lambda event, /, **fields: self.told.append((event, fields)),
        )
        self.fleet = meshes.run(starting, timeout_s=LIMIT_S)
        self.run(self.publish(), timeout_s=LIMIT_S)

    @property
    def learner(self):
        return ActorLearner(self.fleet.trainer)

    @property
    def router(self):
        slots = self.fleet.pool.slots
        return Router([ActorSampler(slot) for slot in slots], pool=self.fleet.pool)

    def publisher(self):
        fleet = self.fleet
        return ActorPublisher(
            trainer=fleet.trainer,
            generators=fleet.generators,
            store=fleet.store,
            check=fleet.check,
            pool=fleet.pool,
        )

    async def publish(self):
        publisher = self.publisher()
        version = await publisher.push()
        checked = await publisher.serve(version)
        assert checked.canary_diff == 0.0
        return version

    async def draw(self):
        """Of every completion its tokens, logprobs and versions."""
        groups = await self.router.generate(TOKENS, sampling=SAMPLING)
        return [
            (c.token_ids.tolist(), c.logprobs.tolist(), c.policy_versions.tolist())
            for group in groups
            for c in group
        ]

    async def all_up(self):
        """Until every generator serves."""
        while len(self.fleet.pool.up()) < len(self.fleet.pool.slots):
            await asyncio.sleep(0.05)

    def lost(self):
        """Who was, since this was asked last; each has recovered."""
        told, self.told[:] = list(self.told), []
        roles = [fields["role"] for event, fields in told if event == "lost"]
        assert sorted(f["role"] for event, f in told if event == "recovered") == sorted(roles)
        return roles

    async def samples(self):
        groups = await ActorSampler(self.fleet.generators[0]).generate(
            TOKENS, sampling=replace(SAMPLING, max_tokens=12)
        )
        return [
            policy_sample(
                rollout_of(prompt, c, sample=i, text=""),
                advantages_C=np.full(len(c.token_ids), 1.0 - 2 * i),
                temperature=1.0,
            )
            for prompt, group in zip(PROMPTS, groups, strict=True)
            for i, c in enumerate(group)
        ]


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with monarch_meshes() as meshes:
        running = Running(meshes, tmp_path_factory.mktemp("recovery"))
        yield running
        meshes.run(close_fleet(running.fleet))


def processes(group):
    return dict((group.group if hasattr(group, "group") else group).processes)


def test_a_generator_killed_while_it_generates_costs_time_and_no_token(running):
    async def steps():
        undisturbed = await running.draw()
        drawing = asyncio.ensure_future(running.draw())
        # A later call of a few tokens is answered: the earlier ones have some too.
        await ActorSampler(running.fleet.generators[0]).generate(
            TOKENS[:1], sampling=SamplingParams(max_tokens=3)
        )
        victim = processes(running.fleet.generators[0])[0]
        kill(victim)
        drawn = await drawing
        up = running.fleet.pool.up()
        await running.all_up()
        return undisturbed, drawn, up, victim, await running.draw()

    undisturbed, drawn, up, victim, after = running.run(steps(), timeout_s=LIMIT_S)
    assert up == [1]  # the other one had answered all when it was still being started
    assert drawn == undisturbed
    assert after == undisturbed
    assert processes(running.fleet.generators[0])[0].pid != victim.pid
    assert running.lost() == ["generator_0"]


def test_a_generator_killed_when_nobody_asks_for_anything_is_replaced(running):
    async def steps():
        kill(processes(running.fleet.generators[1])[0])
        while running.fleet.pool.up() != [0]:
            await asyncio.sleep(0.05)
        before = await running.draw()
        await running.all_up()
        return before, await running.draw()

    before, after = running.run(steps(), timeout_s=LIMIT_S)
    assert before == after
    assert running.lost() == ["generator_1"]


def test_a_generator_killed_while_it_pulls_holds_nobody_up_and_comes_back_with_the_new_version(running):
    async def steps():
        learner, store = running.learner, running.fleet.store
        await learner.forward_backward(await running.samples())
        await learner.optim_step()
        slot = running.fleet.pool.slots[0]
        await slot.call("use_store", store.deadly("pull"), limit="sync_s")
        started = time.monotonic()
        version = await running.publish()
        took_s = time.monotonic() - started
        served_by = running.fleet.pool.up()
        drawn = await running.draw()
        await running.all_up()
        alone = [await ActorSampler(s).generate(TOKENS, sampling=SAMPLING) for s in running.fleet.pool.slots]
        return version, took_s, served_by, drawn, alone

    version, took_s, served_by, drawn, alone = running.run(steps(), timeout_s=LIMIT_S)
    assert served_by == [1]
    assert took_s < 20
    assert {v for _, _, versions in drawn for v in versions} == {version}
    for groups in alone:
        assert [c.token_ids.tolist() for of in groups for c in of] == [tokens for tokens, _, _ in drawn]
        assert {v for of in groups for c in of for v in c.policy_versions.tolist()} == {version}
    assert running.lost() == ["generator_0"]


def test_what_a_killed_reward_process_had_not_answered_is_scored_again(running, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    scorer = ActorScorer(running.fleet.reward, num_procs=2, keep_groups=False)
    group = [replied("x", sample=0), replied(f"hang {tmp_path}", sample=1), replied("x", sample=2)]

    async def steps():
        scoring = asyncio.ensure_future(scorer.score([group, group]))
        assert await asyncio.to_thread(Path(tmp_path / "fifo").read_text) == "began"
        before = await running.fleet.reward.group()
        # The second of a group's three is the second process's, and both wait for all.
        kill(before.processes[1])
        return before, await scoring, await running.fleet.reward.group()

    before, scores, after = running.run(steps(), timeout_s=LIMIT_S)
    assert [[score.reward for score in of] for of in scores] == [[0, 1, 2]] * 2
    assert not {p.pid for p in before.processes.values()} & {p.pid for p in after.processes.values()}
    assert running.lost() == ["reward"]


def revive(running, error):
    """The time that it took; from then on `running` has the new trainer."""
    started = time.monotonic()
    running.fleet = running.run(revive_trainer(running.fleet, error), timeout_s=LIMIT_S)
    return time.monotonic() - started


async def saved(running, folder):
    """A checkpoint, what the policy says of the samples then, and the samples."""
    samples = await running.samples()
    await running.learner.save_checkpoint(str(folder))
    return samples, await running.learner.compute_logprobs(samples)


async def goes_on(running, folder, samples):
    """From the checkpoint: its logprobs, a published version, and what generators draw with it."""
    version = await running.learner.load_checkpoint(str(folder))
    logprobs = await running.learner.compute_logprobs(samples)
    assert await running.publish() == version
    return logprobs, await running.draw()


def assert_equal(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_trainer_of_which_a_rank_dies_in_forward_backward_goes_on_from_its_checkpoint(running, tmp_path):
    generators = [processes(slot)[0].pid for slot in running.fleet.pool.slots]

    async def steps():
        drawn = await running.draw()
        samples, logprobs = await saved(running, tmp_path / "saved")
        # One more step, which is lost, and whose version comes again with other weights.
        await running.learner.forward_backward(samples)
        await running.learner.optim_step()
        await running.publish()
        with pytest.raises(
            ActorLostError, match=r"^trainer\.forward_backward failed: rank 1 of 2 is dead"
        ) as told:
            await running.learner.forward_backward(samples, loss=DeadlyLoss(rank=1))
        return drawn, samples, logprobs, told.value

    drawn, samples, logprobs, error = running.run(steps(), timeout_s=LIMIT_S)
    before = processes(running.fleet.trainer)
    revive(running, error)
    assert not {p.pid for p in before.values()} & {p.pid for p in processes(running.fleet.trainer).values()}
    again, drawn_again = running.run(goes_on(running, tmp_path / "saved", samples), timeout_s=LIMIT_S)
    assert_equal(again, logprobs)
    assert drawn_again == drawn
    assert [processes(slot)[0].pid for slot in running.fleet.pool.slots] == generators
    assert running.lost() == ["trainer"]


def test_a_trainer_that_dies_in_a_push_is_replaced_while_generators_draw(running, tmp_path):
    async def steps():
        samples, logprobs = await saved(running, tmp_path / "saved")
        drawn = await running.draw()
        await running.learner.forward_backward(samples)
        await running.learner.optim_step()
        await running.fleet.trainer.call(
            "have_store", running.fleet.store.deadly("push", rank=0), limit="train_s"
        )
        drawing = asyncio.ensure_future(running.draw())
        with pytest.raises(RunError) as told:
            await running.publish()
        assert await drawing == drawn  # they do not need it for that
        return drawn, samples, logprobs, told.value

    drawn, samples, logprobs, error = running.run(steps(), timeout_s=LIMIT_S)
    revive(running, error)
    again, drawn_again = running.run(goes_on(running, tmp_path / "saved", samples), timeout_s=LIMIT_S)
    assert_equal(again, logprobs)
    assert drawn_again == drawn
    assert running.lost() == ["trainer"]


def test_a_trainer_that_dies_while_generators_pull_leaves_them_waiting_for_nothing(running, tmp_path):
    async def steps():
        samples, logprobs = await saved(running, tmp_path / "saved")
        drawn = await running.draw()
        for slot in running.fleet.pool.slots:
            await slot.call("use_store", running.fleet.store.deadly("hang"), limit="sync_s")
        publisher = running.publisher()
        await running.learner.forward_backward(samples)
        await running.learner.optim_step()
        version = await publisher.push()
        serving = asyncio.ensure_future(publisher.serve(version))
        # Behind its pull a generator's engine makes no step: this has come to all when they answer.
        await asyncio.gather(*(s.call("abort", None, limit="close_s") for s in running.fleet.pool.slots))
        kill(processes(running.fleet.trainer)[1])
        with pytest.raises(
            ActorLostError, match=rf"^trainer\.pull of version {version} failed: rank 1 of 2"
        ) as e:
            await serving
        return drawn, samples, logprobs, e.value

    drawn, samples, logprobs, error = running.run(steps(), timeout_s=LIMIT_S)
    assert revive(running, error) < CONFIG.timeouts.sync_s / 2
    again, drawn_again = running.run(goes_on(running, tmp_path / "saved", samples), timeout_s=LIMIT_S)
    assert_equal(again, logprobs)
    assert drawn_again == drawn
    assert running.lost() == ["trainer"]


def test_an_error_that_is_not_the_trainers_death_is_raised_as_it_is(running):
    error = RunError("something else")
    with pytest.raises(RunError) as raised:
        revive(running, error)
    assert raised.value is error
    assert running.lost() == []
