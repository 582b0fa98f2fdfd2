"""Real actors killed in the middle of their work: they are replaced and the numbers stay the same."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.backend import ActorPublisher, GeneratorClient, RewardClient, TrainerClient
from actors.calls import ActorLostError
from actors.config import ClusterConfig, RecoveryConfig, Timeouts
from actors.generator import VLLMGenerator
from actors.members import LogSettings
from actors.parity import ParityCheck, ParityText
from actors.reward import RewardActor
from actors.router import Router
from actors.trainer import PolicyTrainer
from rl.distributed.mesh import ParallelismConfig
from rl.models.hf import write_random_model
from rl.models.qwen3 import model_registry
from rl.rollouts.samples import policy_sample
from rl.tasks.sum_digits import make_problem
from rl.training.config import TrainingConfig
from rl.training.optimizer import Optimizer
from rl.types import SamplingParams
from rl.utils.errors import RunError
from rl.utils.processes import kill
from rl.weights.store import WeightStore
from tests.support.clusters import start_cluster
from tests.support.fakes import prompt_of, rollout_of
from tests.support.monarch_meshes import monarch_meshes
from tests.support.mortal_actors import DeadlyLoss, rubric
from tests.support.scored import replied

pytestmark = [pytest.mark.medium, pytest.mark.timeout(400)]

SPEC = replace(model_registry("tiny"), batch_invariant=True)
PROMPTS = [prompt_of(make_problem([n, 30 + n])) for n in range(11, 17)]
TOKENS = [prompt.token_ids for prompt in PROMPTS]
SAMPLING = SamplingParams(max_tokens=200, num_samples=2, seed=1)
CANARY = np.concatenate(TOKENS[:2])
LIMIT_S = 200.0
"""Deadline in seconds of a restart on a busy machine; docs/running.md has the times of an idle one."""
CONFIG = ClusterConfig(
    trainer=PolicyTrainer.Config(
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
    """Cluster that serves, and records its losses and recoveries."""

    sampling = SAMPLING

    def __init__(self, meshes, folder, *, config=CONFIG, store=None):
        self.run = meshes.run
        self.folder = folder
        self.assets = str(write_random_model(folder / "assets", spec=SPEC, seed=0))
        self.told: list[tuple[str, dict[str, Any]]] = []
        starting = start_cluster(
            config,
            store=store or WeightStore.Config().build(dtype="float32"),
            check=ParityCheck(ParityText(token_ids=CANARY, max_diff=0.0)),
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
    def trainer(self):
        return TrainerClient(self.fleet.trainer)

    @property
    def router(self):
        slots = self.fleet.pool.members
        return Router([GeneratorClient(slot) for slot in slots], pool=self.fleet.pool)

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
        """Return tokens, logprobs and versions of every completion."""
        groups = await self.router.generate(TOKENS, sampling=SAMPLING)
        return [
            (c.token_ids.tolist(), c.logprobs.tolist(), c.policy_versions.tolist())
            for group in groups
            for c in group
        ]

    async def all_up(self):
        """Wait until every generator serves."""
        while len(self.fleet.pool.up()) < len(self.fleet.pool.members):
            await asyncio.sleep(0.05)

    def lost(self):
        """Return the roles lost since the last call, after checking that each has recovered."""
        told, self.told[:] = list(self.told), []
        roles = [fields["role"] for event, fields in told if event == "lost"]
        assert sorted(f["role"] for event, f in told if event == "recovered") == sorted(roles)
        return roles

    async def samples(self):
        groups = await GeneratorClient(self.fleet.generators[0]).generate(
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
        meshes.run(running.fleet.close())


def processes(group):
    return dict((group.group if hasattr(group, "group") else group).processes)


def test_generator_killed_while_generating_loses_no_token(running):
    async def steps():
        undisturbed = await running.draw()
        drawing = asyncio.ensure_future(running.draw())
        # When this later, short call is answered, the earlier completions have tokens too.
        await GeneratorClient(running.fleet.generators[0]).generate(
            TOKENS[:1], sampling=SamplingParams(max_tokens=3)
        )
        victim = processes(running.fleet.generators[0])[0]
        kill(victim)
        drawn = await drawing
        up = running.fleet.pool.up()
        await running.all_up()
        return undisturbed, drawn, up, victim, await running.draw()

    undisturbed, drawn, up, victim, after = running.run(steps(), timeout_s=LIMIT_S)
    assert up == [1]  # the other generator had answered everything before the restart was over
    assert drawn == undisturbed
    assert after == undisturbed
    assert processes(running.fleet.generators[0])[0].pid != victim.pid
    assert running.lost() == ["generator_0"]


def test_unanswered_rollouts_of_a_killed_reward_process_are_scored_again(running, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    rewarder = RewardClient(running.fleet.reward, num_procs=2, keep_groups=False)
    hanging = [replied("x", sample=0), replied(f"hang {tmp_path}", sample=1), replied("x", sample=2)]
    plain = [replied("x", sample=i) for i in range(3)]

    async def steps():
        # Rollouts alternate between the two processes, so the only one that hangs is in the second process.
        scoring = asyncio.ensure_future(rewarder.score([hanging, plain]))
        assert await asyncio.to_thread(Path(tmp_path / "fifo").read_text) == "began"
        before = await running.fleet.reward.current()
        kill(before.processes[1])
        return before, await scoring, await running.fleet.reward.current()

    before, scores, after = running.run(steps(), timeout_s=LIMIT_S)
    assert [[score.reward for score in of] for of in scores] == [[0, 1, 2]] * 2
    assert not {p.pid for p in before.processes.values()} & {p.pid for p in after.processes.values()}
    assert running.lost() == ["reward"]


def restart_trainer(running, error):
    running.run(running.fleet.restart_trainer(error), timeout_s=LIMIT_S)


async def save_state(running, folder):
    """Save a checkpoint; return the samples and their logprobs under the saved policy."""
    samples = await running.samples()
    await running.trainer.save_checkpoint(str(folder))
    return samples, await running.trainer.compute_logprobs(samples)


async def continue_from(running, folder, samples):
    """Load the checkpoint and publish it; return its logprobs and the completions drawn with it."""
    version = await running.trainer.load_checkpoint(str(folder))
    logprobs = await running.trainer.compute_logprobs(samples)
    assert await running.publish() == version
    return logprobs, await running.draw()


def assert_equal(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_trainer_with_a_rank_lost_in_forward_backward_continues_from_its_checkpoint(running, tmp_path):
    generators = [processes(slot)[0].pid for slot in running.fleet.pool.members]

    async def steps():
        drawn = await running.draw()
        samples, logprobs = await save_state(running, tmp_path / "saved")
        # This further step is lost; its version number returns with other weights.
        await running.trainer.forward_backward(samples)
        await running.trainer.optim_step()
        await running.publish()
        with pytest.raises(
            ActorLostError, match=r"^trainer\.forward_backward failed: rank 1 of 2 is dead"
        ) as told:
            await running.trainer.forward_backward(samples, loss=DeadlyLoss(rank=1))
        return drawn, samples, logprobs, told.value

    drawn, samples, logprobs, error = running.run(steps(), timeout_s=LIMIT_S)
    before = processes(running.fleet.trainer)
    restart_trainer(running, error)
    assert not {p.pid for p in before.values()} & {p.pid for p in processes(running.fleet.trainer).values()}
    again, drawn_again = running.run(continue_from(running, tmp_path / "saved", samples), timeout_s=LIMIT_S)
    assert_equal(again, logprobs)
    assert drawn_again == drawn
    assert [processes(slot)[0].pid for slot in running.fleet.pool.members] == generators
    other = RunError("something else")
    with pytest.raises(RunError) as raised:
        restart_trainer(running, other)  # it is alive
    assert raised.value is other
    assert running.lost() == ["trainer"]
