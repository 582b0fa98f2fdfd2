"""A run's own actors, all of them: two trainer ranks, a generator, two processes that score."""

import asyncio
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

from actors.backend import ActorLearner, ActorPublisher, ActorSampler, ActorScorer
from actors.calls import ActorCallError, Timeouts
from actors.canary import CanaryError, LogprobCanary
from actors.fleet import close_fleet, start_fleet
from actors.fleet_config import FleetConfig
from actors.reward import RewardActor
from actors.roles import LogSettings
from actors.router import Router
from actors.sync_check import SyncCheck
from actors.turns import Turns
from rl.distributed.mesh import ParallelismConfig
from rl.distributed.process_group import World
from rl.models.qwen3 import model_registry
from rl.models.starting_point import write_random_model
from rl.rollouts.episodes import Episodes
from rl.rollouts.samples import policy_sample
from rl.rollouts.settings import EpisodeLimits
from rl.tasks.sum_digits import make_problem
from rl.training.checkpoint_files import DamagedCheckpointError
from rl.training.config import TrainingConfig
from rl.training.engine import TrainingEngine
from rl.training.optimizer import Optimizer
from rl.types import SamplingParams
from rl.weights.errors import WeightCanaryError
from tests.support.conversations import Counting, TwinRenderer
from tests.support.fakes import prompt_of, rollout_of
from tests.support.fleet_actors import AskedGenerator, AskedStore, AskedTrainer, rubric
from tests.support.monarch_meshes import monarch_meshes
from tests.support.scored import replied

pytestmark = [pytest.mark.medium, pytest.mark.timeout(240)]

SPEC = model_registry("tiny")
PROMPTS = [prompt_of(make_problem([n, 30 + n])) for n in range(11, 16)]
SETUP_TIMEOUT_S = 200
CANARY = np.concatenate([PROMPTS[0].token_ids, PROMPTS[1].token_ids])
CONFIG = FleetConfig(
    trainer=AskedTrainer.Config(
        num_procs=2,
        num_threads=2,
        parallelism=ParallelismConfig(data_parallel_shard_degree=2),
        optimizer=Optimizer.Config(lr=1e-2),
        training=TrainingConfig(max_tokens_per_microbatch=128),
    ),
    generator=AskedGenerator.Config(
        dtype="float32", max_model_len=256, cpu_kv_cache_gib=0.05, num_threads=2, can_sleep=True
    ),
    reward=RewardActor.Config(num_procs=2),
    timeouts=Timeouts(close_s=10),
)


class Running:
    """A fleet whose generator serves the starting weights."""

    def __init__(self, meshes, folder):
        self.run = meshes.run
        self.folder = folder
        self.assets = str(write_random_model(folder / "assets", spec=SPEC, seed=0))
        starting = start_fleet(
            CONFIG,
            store=AskedStore.Config().build(dtype="float32"),
            check=SyncCheck(LogprobCanary(token_ids=CANARY, max_diff=1e-5)),
            model_spec=SPEC,
            hf_assets_path=self.assets,
            rubric=rubric(),
            failure_folder=folder,
            logs=LogSettings(folder=folder / "logs", console_level="WARNING"),
        )
        self.fleet = meshes.run(starting, timeout_s=SETUP_TIMEOUT_S)
        self.learner = ActorLearner(self.fleet.trainer)
        self.publisher = ActorPublisher(
            trainer=self.fleet.trainer,
            generators=self.fleet.generators,
            store=self.fleet.store,
            check=self.fleet.check,
        )
        assert self.run(self.publish()) == 0
        self.samples = self.run(self.draw())

    async def publish(self):
        """The version that is served now."""
        version = await self.publisher.push()
        checked = await self.publisher.serve(version)
        assert checked.canary_diff is not None
        assert checked.canary_diff < 1e-5
        return version

    async def draw(self):
        """Two completions of each prompt, the first good and the second bad."""
        sampling = SamplingParams(max_tokens=12, num_samples=2, seed=1)
        groups = await ActorSampler(self.fleet.generators[0]).generate(
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
        return self.run(self.learner.compute_logprobs(self.samples))


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with monarch_meshes() as meshes:
        running = Running(meshes, tmp_path_factory.mktemp("fleet"))
        yield running
        meshes.run(close_fleet(running.fleet))


def assert_close(actual, wanted, *, atol):
    assert len(actual) == len(wanted)
    for ours, theirs in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)


def test_only_the_thread_that_computes_has_more_than_one_thread(running):
    """The engines of trainer and generator compute in threads of their own; actors and volumes do not."""
    fleet = running.fleet
    volumes = running.run(fleet.store.asked.num_compute_threads.call())
    assert [num for _, num in volumes.items()] == [1, 1]
    assert running.run(fleet.generators[0].call("num_compute_threads", limit="train_s")) == [1]
    assert running.run(fleet.trainer.call("num_compute_threads", limit="train_s")) == [(2, 1), (2, 1)]


def test_logprobs_of_two_ranks_are_those_of_one_and_of_the_generator(running):
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


def test_a_learner_without_a_reference_policy_says_so(running):
    with pytest.raises(
        ActorCallError, match=r"there is no reference policy to ask: reference\.enable is False"
    ):
        running.run(running.learner.compute_reference_logprobs(running.samples))


def test_a_loaded_checkpoint_brings_back_weights_and_version_to_all_ranks_and_the_generator(
    running, tmp_path
):
    async def step():
        await running.learner.forward_backward(running.samples)
        return (await running.learner.optim_step()).policy_version

    start = running.logprobs()
    assert running.run(step()) == 1
    saved = running.logprobs()
    running.run(running.learner.save_checkpoint(str(tmp_path / "one")))
    assert running.run(step()) == 2
    later = running.logprobs()
    moved = max(np.abs(a - b).max() for a, b in zip(saved, later, strict=True))
    assert moved > 0.1

    assert running.run(running.learner.load_checkpoint(str(tmp_path / "one"))) == 1
    assert_close(running.logprobs(), saved, atol=0)
    assert running.run(running.publish()) == 1
    for sample, logprobs in zip(
        drawn := running.run(running.draw()),
        running.run(running.learner.compute_logprobs(drawn)),
        strict=True,
    ):
        np.testing.assert_allclose(
            sample.generator_logprobs[sample.mask], logprobs[sample.mask], rtol=0, atol=1e-4
        )
        assert set(sample.policy_versions[sample.mask]) == {1}

    assert running.run(running.learner.load_checkpoint(running.assets)) == 0
    assert_close(running.logprobs(), start, atol=0)


def test_a_checkpoint_that_is_damaged_is_said_to_be_so_through_the_actors_and_nothing_is_loaded(
    running, tmp_path
):
    folder, before = tmp_path / "damaged", running.logprobs()
    running.run(running.learner.save_checkpoint(str(folder), attachments={"loop.pickle": b"state"}))
    assert (folder / "loop.pickle").read_bytes() == b"state"
    tensors = next(folder.glob("*.distcp"))
    content = bytearray(tensors.read_bytes())
    content[len(content) // 2] ^= 1
    tensors.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=rf"{tensors} is corrupted: its crc32 is"):
        running.run(running.learner.load_checkpoint(str(folder)))
    assert_close(running.logprobs(), before, atol=0)


async def train(running, learner=None):
    """To a version that was not published before."""
    learner = learner or running.learner
    published = await running.fleet.store.versions()
    while True:
        await learner.forward_backward(running.samples)
        if (version := (await learner.optim_step()).policy_version) not in published:
            return version


def test_a_generator_that_keeps_its_old_weights_does_not_serve(running):
    generator = running.fleet.generators[0]
    running.run(train(running))
    running.run(generator.call("misuse_next_pull", "stale", limit="train_s"))
    with pytest.raises(WeightCanaryError, match=r"version \d: generator 'generator' holds other bits in "):
        running.run(running.publish())


def test_a_generator_that_does_not_compute_with_what_it_pulled_does_not_serve(running):
    """Its sums are right, its logprobs are of the weights before."""
    generator = running.fleet.generators[0]
    running.run(train(running))
    running.run(generator.call("misuse_next_pull", "aside", limit="train_s"))
    with pytest.raises(
        CanaryError, match=r"version \d generator differs from the trainer by .* nats a token"
    ):
        running.run(running.publish())


def test_what_a_sampler_aborts_goes_on_under_the_next_version(running):
    """As a loop of one's own does it: abort, update, continue."""
    prompts = [p.token_ids for p in PROMPTS]
    sampling = SamplingParams(max_tokens=200, num_samples=2, seed=7)

    async def steps():
        (generator,) = running.fleet.generators
        sampler = Router([ActorSampler(generator)])
        assert await sampler.abort() == 0
        await train(running)
        old = await running.publish()
        drawing = asyncio.ensure_future(sampler.generate(prompts, sampling=sampling))
        # By another's call, which begins later and is not aborted, tokens of all of them are drawn.
        await ActorSampler(generator).generate(prompts, sampling=SamplingParams(max_tokens=3))
        num_ended = await sampler.abort()
        begun = await drawing
        await train(running)
        new = await running.publish()
        return num_ended, begun, await sampler.generate(prompts, sampling=sampling, begun=begun), (old, new)

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
    """The trainer, whose answers to `compute_logprobs` come when they are released."""

    def __init__(self, group):
        self.name, self.timeouts, self.group = group.name, group.timeouts, group
        self.released = asyncio.Event()

    async def call(self, endpoint, *args, **settings):
        answer = await self.group.call(endpoint, *args, **settings)
        if endpoint == "compute_logprobs":
            await self.released.wait()
        return answer


def test_a_push_is_done_before_the_canarys_logprobs_are_which_its_check_waits_for(running):
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


def test_a_trainer_that_slept_says_so_and_has_its_bits_back(running):
    trainer = running.fleet.trainer
    before = running.logprobs()
    freed = running.run(trainer.call("sleep", limit="train_s"))
    assert min(freed) > 0
    with pytest.raises(ActorCallError, match="the trainer is asleep: call wake first"):
        running.logprobs()
    assert running.run(trainer.call("wake", limit="train_s")) == freed
    assert_close(running.logprobs(), before, atol=0)
    # What it would need of a GPU is asked on GPUs only.
    running.run(trainer.call("check_sharing", 0.9, limit="train_s"))


def test_trainer_and_generator_that_take_turns_serve_what_was_trained(running):
    fleet = running.fleet

    async def steps():
        await fleet.generators[0].call("sleep", limit="train_s")
        turns = Turns(trainer=fleet.trainer, generators=fleet.generators, check=fleet.check)
        learner, (generator,) = ActorLearner(turns.trainer), turns.generators
        publisher = ActorPublisher(
            trainer=turns.trainer,
            generators=turns.generators,
            store=fleet.store,
            check=fleet.check,
        )
        version = await train(running, learner)
        await publisher.serve(await publisher.push())
        await learner.save_checkpoint(str(running.folder / "between"))  # they sleep, and have to pull again
        sampling = SamplingParams(max_tokens=8, seed=3)
        ((drawn,),) = await ActorSampler(generator).generate([CANARY], sampling=sampling)
        sample = policy_sample(
            rollout_of(replace(PROMPTS[0], token_ids=CANARY), drawn, text=""),
            advantages_C=np.ones(len(drawn.token_ids)),
            temperature=1.0,
        )
        logprobs = await learner.compute_logprobs([sample])
        await fleet.generators[0].call("wake", limit="train_s")
        return version, sample, logprobs[0]

    version, sample, logprobs = running.run(steps())
    assert set(sample.policy_versions[sample.mask]) == {version}
    np.testing.assert_allclose(sample.generator_logprobs[sample.mask], logprobs[sample.mask], atol=1e-4)


class Folding(TwinRenderer):
    """Decodes every id, ten of them and more to the same letter."""

    def text(self, token_ids: np.ndarray) -> str:
        return "".join(chr(97 + t % 26) for t in token_ids.tolist())


def test_every_turn_is_trained_on_as_the_engine_drew_it_and_after_what_it_had_read(running):
    async def rolled_out():
        await train(running)
        await running.publish()
        episodes = Episodes(
            sampler=ActorSampler(running.fleet.generators[0]),
            renderer=Folding(),
            environment=lambda problem: Counting(problem=problem, turns=2),
            limits=EpisodeLimits(),
            max_tokens=256,
        )
        sampling = SamplingParams(max_tokens=12, num_samples=2, seed=3)
        (group,) = await episodes.run([make_problem([47, 82])], sampling=sampling, session="s")
        samples = [
            policy_sample(r, advantages_C=np.ones(r.num_completion_tokens), temperature=1.0) for r in group
        ]
        return group, samples, await running.learner.compute_logprobs(samples)

    group, samples, logprobs = running.run(rolled_out())
    for rollout, sample, expected in zip(group, samples, logprobs, strict=True):
        assert [len(turn.completion.token_ids) for turn in rollout.turns] == [12] * 3
        assert sample.mask.sum() == 36
        # The trainer reads the whole conversation at once: other tokens anywhere would give other logprobs.
        np.testing.assert_allclose(sample.generator_logprobs[sample.mask], expected[sample.mask], atol=1e-4)


def test_scores_come_in_order_from_both_processes_in_turn(running):
    scorer = ActorScorer(running.fleet.reward, num_procs=2, keep_groups=False)
    (scores,) = running.run(scorer.score([[replied("x", sample=i) for i in range(5)]]))
    assert [score.reward for score in scores] == list(range(5))
    processes = [score.parts["process"] for score in scores]
    assert len(set(processes[::2])) == len(set(processes[1::2])) == 1
    assert len(set(processes)) == 2
