"""The real actors of a run: two trainer ranks, a generator and two reward processes."""

import asyncio
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

from actors.backend import ActorPublisher, GeneratorClient, TrainerClient
from actors.calls import ActorCallError
from actors.config import ClusterConfig, Timeouts
from actors.device_lock import DeviceLock
from actors.members import LogSettings
from actors.parity import LogprobParityError, ParityCheck, ParityText
from actors.reward import RewardActor
from actors.router import Router
from rl.distributed.mesh import ParallelismConfig
from rl.distributed.process_group import World
from rl.models.hf import write_random_model
from rl.models.qwen3 import model_registry
from rl.rollouts.environment import Environments
from rl.rollouts.episode import Episodes
from rl.rollouts.samples import policy_sample
from rl.tasks.sum_digits import make_problem
from rl.training.checkpoint_files import DamagedCheckpointError
from rl.training.config import TrainingConfig
from rl.training.engine import TrainingEngine
from rl.training.optimizer import Optimizer
from rl.types import SamplingParams
from rl.weights.types import WeightParityError
from tests.support.clusters import start_cluster
from tests.support.conversations import Counting, TwinRenderer
from tests.support.fakes import prompt_of, rollout_of
from tests.support.fleet_actors import InspectedGenerator, InspectedStore, InspectedTrainer, rubric
from tests.support.monarch_meshes import monarch_meshes

pytestmark = [pytest.mark.medium, pytest.mark.timeout(240)]

SPEC = model_registry("tiny")
PROMPTS = [prompt_of(make_problem([n, 30 + n])) for n in range(11, 16)]
SETUP_TIMEOUT_S = 200
CANARY = np.concatenate([PROMPTS[0].token_ids, PROMPTS[1].token_ids])
CONFIG = ClusterConfig(
    trainer=InspectedTrainer.Config(
        num_procs=2,
        num_threads=2,
        parallelism=ParallelismConfig(data_parallel_shard_degree=2),
        optimizer=Optimizer.Config(lr=1e-2),
        training=TrainingConfig(max_tokens_per_microbatch=128),
    ),
    generator=InspectedGenerator.Config(
        dtype="float32", max_model_len=256, cpu_kv_cache_gib=0.05, num_threads=2, can_sleep=True
    ),
    reward=RewardActor.Config(num_procs=2),
    timeouts=Timeouts(close_s=10),
)


class Running:
    """Cluster whose generator serves the starting weights."""

    def __init__(self, meshes, folder):
        self.run = meshes.run
        self.folder = folder
        self.assets = str(write_random_model(folder / "assets", spec=SPEC, seed=0))
        starting = start_cluster(
            CONFIG,
            store=InspectedStore.Config().build(dtype="float32"),
            check=ParityCheck(ParityText(token_ids=CANARY, max_diff=1e-5)),
            model_spec=SPEC,
            hf_assets_path=self.assets,
            rubric=rubric(),
            failure_folder=folder,
            logs=LogSettings(folder=folder / "logs", console_level="WARNING"),
        )
        self.fleet = meshes.run(starting, timeout_s=SETUP_TIMEOUT_S)
        self.trainer = TrainerClient(self.fleet.trainer)
        self.publisher = ActorPublisher(
            trainer=self.fleet.trainer,
            generators=self.fleet.generators,
            store=self.fleet.store,
            check=self.fleet.check,
        )
        assert self.run(self.publish()) == 0
        self.samples = self.run(self.draw())

    async def publish(self):
        """Push and serve the weights; return their version."""
        version = await self.publisher.push()
        checked = await self.publisher.serve(version)
        assert checked.canary_diff is not None
        assert checked.canary_diff < 1e-5
        return version

    async def draw(self):
        """Draw two completions of each prompt, the first with a positive advantage."""
        sampling = SamplingParams(max_tokens=12, num_samples=2, seed=1)
        groups = await GeneratorClient(self.fleet.generators[0]).generate(
            [p.token_ids for p in PROMPTS], sampling=sampling
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

    def logprobs(self):
        return self.run(self.trainer.compute_logprobs(self.samples))


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with monarch_meshes() as meshes:
        running = Running(meshes, tmp_path_factory.mktemp("fleet"))
        yield running
        meshes.run(running.fleet.close())


def assert_close(actual, wanted, *, atol):
    assert len(actual) == len(wanted)
    for ours, theirs in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)


def test_only_compute_threads_use_several_cores(running):
    """The engines compute in threads of their own; actors and volumes use one thread."""
    fleet = running.fleet
    volumes = running.run(fleet.store.asked.num_compute_threads.call())
    assert [num for _, num in volumes.items()] == [1, 1]
    assert running.run(fleet.generators[0].call("num_compute_threads", limit_s=600.0)) == [1]
    assert running.run(fleet.trainer.call("num_compute_threads", limit_s=600.0)) == [(2, 1), (2, 1)]


def test_logprobs_of_two_ranks_equal_those_of_one_rank_and_of_the_generator(running):
    config = TrainingEngine.Config(training=CONFIG.trainer.training)
    alone = TrainingEngine(
        config=config, model_spec=SPEC, hf_assets_path=running.assets, device="cpu", world=World()
    )
    logprobs = running.logprobs()
    assert_close(logprobs, alone.compute_logprobs(running.samples), atol=1e-5)
    drawn = [
        np.where(s.mask, s.generator_logprobs, p) for s, p in zip(running.samples, logprobs, strict=True)
    ]
    assert_close(logprobs, drawn, atol=1e-4)


def test_loaded_checkpoint_restores_weights_and_version_on_all_ranks_and_the_generator(running, tmp_path):
    async def step():
        await running.trainer.forward_backward(running.samples)
        return (await running.trainer.optim_step()).policy_version

    start = running.logprobs()
    assert running.run(step()) == 1
    saved = running.logprobs()
    running.run(running.trainer.save_checkpoint(str(tmp_path / "one")))
    assert running.run(step()) == 2
    later = running.logprobs()
    moved = max(np.abs(a - b).max() for a, b in zip(saved, later, strict=True))
    assert moved > 0.1

    assert running.run(running.trainer.load_checkpoint(str(tmp_path / "one"))) == 1
    assert_close(running.logprobs(), saved, atol=0)
    assert running.run(running.publish()) == 1
    for sample, logprobs in zip(
        drawn := running.run(running.draw()),
        running.run(running.trainer.compute_logprobs(drawn)),
        strict=True,
    ):
        np.testing.assert_allclose(
            sample.generator_logprobs[sample.mask], logprobs[sample.mask], rtol=0, atol=1e-4
        )
        assert set(sample.policy_versions[sample.mask]) == {1}

    assert running.run(running.trainer.load_checkpoint(running.assets)) == 0
    assert_close(running.logprobs(), start, atol=0)


def test_damaged_checkpoint_is_reported_through_the_actors_and_not_loaded(running, tmp_path):
    folder, before = tmp_path / "damaged", running.logprobs()
    running.run(running.trainer.save_checkpoint(str(folder), attachments={"loop.pickle": b"state"}))
    assert (folder / "loop.pickle").read_bytes() == b"state"
    tensors = next(folder.glob("*.distcp"))
    content = bytearray(tensors.read_bytes())
    content[len(content) // 2] ^= 1
    tensors.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=rf"{tensors} is corrupted: its crc32 is"):
        running.run(running.trainer.load_checkpoint(str(folder)))
    assert_close(running.logprobs(), before, atol=0)


async def train(running, trainer=None):
    """Train up to a version that is not published yet, and return it."""
    trainer = trainer or running.trainer
    published = await running.fleet.store.versions()
    while True:
        await trainer.forward_backward(running.samples)
        if (version := (await trainer.optim_step()).policy_version) not in published:
            return version


def test_generator_that_keeps_its_old_weights_is_not_served(running):
    generator = running.fleet.generators[0]
    running.run(train(running))
    running.run(generator.call("misuse_next_pull", "stale", limit_s=600.0))
    with pytest.raises(WeightParityError, match=r"version \d: generator 'generator' holds other bits in "):
        running.run(running.publish())


def test_generator_that_does_not_compute_with_the_pulled_weights_is_not_served(running):
    """The checksums are right; the logprobs are those of the previous weights."""
    generator = running.fleet.generators[0]
    running.run(train(running))
    running.run(generator.call("misuse_next_pull", "aside", limit_s=600.0))
    with pytest.raises(
        LogprobParityError, match=r"version \d generator differs from the trainer by .* nats a token"
    ):
        running.run(running.publish())


def test_aborted_completion_continues_under_next_version(running):
    """Abort, update and continue, like a custom loop."""
    prompts = [p.token_ids for p in PROMPTS]
    sampling = SamplingParams(max_tokens=200, num_samples=2, seed=7)

    async def steps():
        (generator,) = running.fleet.generators
        router = Router([GeneratorClient(generator)])
        assert await router.abort() == 0
        await train(running)
        old = await running.publish()
        drawing = asyncio.ensure_future(router.generate(prompts, sampling=sampling))
        # When this later call is answered, all completions of the earlier call have tokens.
        await GeneratorClient(generator).generate(prompts, sampling=SamplingParams(max_tokens=3))
        num_ended = await router.abort()
        begun = await drawing
        await train(running)
        new = await running.publish()
        return num_ended, begun, await router.generate(prompts, sampling=sampling, begun=begun), (old, new)

    num_ended, begun, made, (old, new) = running.run(steps())
    assert num_ended == 10
    assert new == old + 1
    for before, after in zip(chain(*begun), chain(*made), strict=True):
        assert before.finish_reason == "abort"
        assert after.finish_reason == "length"
        num_old = len(before.token_ids)
        assert 0 < num_old < 200
        np.testing.assert_array_equal(after.token_ids[:num_old], before.token_ids)
        np.testing.assert_array_equal(after.logprobs[:num_old], before.logprobs)
        assert after.policy_versions.tolist() == [old] * num_old + [new] * (200 - num_old)


class AnswersLater:
    """Trainer that holds back the answers to `compute_logprobs` until they are released."""

    def __init__(self, group):
        self.name, self.timeouts, self.group = group.name, group.timeouts, group
        self.released = asyncio.Event()

    async def call(self, endpoint, *args, **settings):
        answer = await self.group.call(endpoint, *args, **settings)
        if endpoint == "compute_logprobs":
            await self.released.wait()
        return answer


def test_push_returns_before_the_parity_logprobs_and_serve_waits_for_them(running):
    async def publish():
        trainer = AnswersLater(running.fleet.trainer)
        publisher = ActorPublisher(
            trainer=trainer,
            generators=running.fleet.generators,
            store=running.fleet.store,
            check=running.fleet.check,
        )
        await train(running)
        version = await asyncio.wait_for(publisher.push(), 30)
        trainer.released.set()
        return await publisher.serve(version)

    checked = running.run(publish())
    assert checked.canary_diff < 1e-5
    assert checked.canary_s > 0


def test_sleeping_trainer_refuses_calls_and_wakes_with_equal_bits(running):
    trainer = running.fleet.trainer
    before = running.logprobs()
    freed = running.run(trainer.call("sleep", limit_s=600.0))
    assert min(freed) > 0
    with pytest.raises(ActorCallError, match="the trainer is asleep: call wake first"):
        running.logprobs()
    assert running.run(trainer.call("wake", limit_s=600.0)) == freed
    assert_close(running.logprobs(), before, atol=0)
    # On CPU the check of shared GPUs needs nothing.
    running.run(trainer.call("check_sharing", 0.9, limit_s=600.0))


def test_trainer_and_generator_that_share_devices_serve_the_trained_weights(running):
    fleet = running.fleet

    async def steps():
        await fleet.generators[0].call("sleep", limit_s=600.0)
        turns = DeviceLock(trainer=fleet.trainer, generators=fleet.generators, check=fleet.check)
        trainer, (generator,) = TrainerClient(turns.trainer), turns.generators
        publisher = ActorPublisher(
            trainer=turns.trainer,
            generators=turns.generators,
            store=fleet.store,
            check=fleet.check,
        )
        version = await train(running, trainer)
        await publisher.serve(await publisher.push())
        await trainer.save_checkpoint(
            str(running.folder / "between")
        )  # the generator sleeps here and has to pull again
        sampling = SamplingParams(max_tokens=8, seed=3)
        ((drawn,),) = await GeneratorClient(generator).generate([CANARY], sampling=sampling)
        sample = policy_sample(
            rollout_of(replace(PROMPTS[0], token_ids=CANARY), drawn, text=""),
            advantages_C=np.ones(len(drawn.token_ids)),
            temperature=1.0,
        )
        logprobs = await trainer.compute_logprobs([sample])
        await fleet.generators[0].call("wake", limit_s=600.0)
        return version, sample, logprobs[0]

    version, sample, logprobs = running.run(steps())
    assert set(sample.policy_versions[sample.mask]) == {version}
    np.testing.assert_allclose(sample.generator_logprobs[sample.mask], logprobs[sample.mask], atol=1e-4)


class Folding(TwinRenderer):
    """Renderer that decodes several ids to the same letter."""

    def text(self, token_ids: np.ndarray) -> str:
        return "".join(chr(97 + t % 26) for t in token_ids.tolist())


def test_every_turn_is_trained_on_with_the_tokens_and_context_of_the_engine(running):
    async def rolled_out():
        await train(running)
        await running.publish()
        episodes = Episodes(
            generator=GeneratorClient(running.fleet.generators[0]),
            renderer=Folding(),
            environments=Environments(make=lambda problem: Counting(problem=problem, turns=2)),
            max_tokens=256,
        )
        sampling = SamplingParams(max_tokens=12, num_samples=2, seed=3)
        (group,) = await episodes.run([make_problem([47, 82])], sampling=sampling, session="s")
        samples = [
            policy_sample(r, advantages_C=np.ones(r.num_completion_tokens), temperature=1.0) for r in group
        ]
        return group, samples, await running.trainer.compute_logprobs(samples)

    group, samples, logprobs = running.run(rolled_out())
    for rollout, sample, expected in zip(group, samples, logprobs, strict=True):
        assert [len(turn.completion.token_ids) for turn in rollout.turns] == [12] * 3
        assert sample.mask.sum() == 36
        # The trainer reads the whole conversation at once: any other token would change the logprobs.
        np.testing.assert_allclose(sample.generator_logprobs[sample.mask], expected[sample.mask], atol=1e-4)
