"""A run's own actors, all of them: two trainer ranks, a generator, two processes that score."""

import numpy as np
import pytest

from actors.backend import ActorLearner, ActorPublisher, ActorSampler, ActorScorer
from actors.calls import Timeouts
from actors.fleet import FleetConfig, LogSettings, close_fleet, start_fleet
from actors.reward import RewardActor
from rl.distributed.mesh import ParallelismConfig
from rl.distributed.process_group import World
from rl.models.qwen3 import model_registry
from rl.models.starting_point import write_random_model
from rl.rollouts.renderer import ChatRenderer
from rl.rollouts.samples import policy_sample
from rl.tasks.sum_digits import make_problem
from rl.training.config import TrainingConfig
from rl.training.engine import TrainingEngine
from rl.training.optimizer import Optimizer
from rl.types import Rollout, SamplingParams
from tests.support.fakes import ByteTokenizer, completion
from tests.support.fleet_actors import AskedGenerator, AskedStore, AskedTrainer, rubric
from tests.support.monarch_meshes import monarch_meshes

pytestmark = [pytest.mark.medium, pytest.mark.timeout(240)]

SPEC = model_registry("tiny")
RENDERER = ChatRenderer(tokenizer=ByteTokenizer(), max_prompt_tokens=64)
PROMPTS = [RENDERER.prompt(make_problem([n, 30 + n])) for n in range(11, 16)]
SETUP_TIMEOUT_S = 200
CONFIG = FleetConfig(
    trainer=AskedTrainer.Config(
        num_procs=2,
        num_threads=2,
        parallelism=ParallelismConfig(data_parallel_shard_degree=2),
        optimizer=Optimizer.Config(lr=1e-2),
        training=TrainingConfig(max_tokens_per_microbatch=128),
    ),
    generator=AskedGenerator.Config(dtype="float32", max_model_len=64, cpu_kv_cache_gib=0.05, num_threads=2),
    reward=RewardActor.Config(num_procs=2),
    timeouts=Timeouts(close_s=10),
)


class Running:
    """A fleet whose generator serves the starting weights."""

    def __init__(self, meshes, folder):
        self.run = meshes.run
        self.assets = str(write_random_model(folder / "assets", spec=SPEC, seed=0))
        starting = start_fleet(
            CONFIG,
            store=AskedStore.Config().build(dtype="float32"),
            model_spec=SPEC,
            hf_assets_path=self.assets,
            rubric=rubric(),
            failure_folder=folder,
            logs=LogSettings(folder=folder / "logs", console_level="WARNING"),
        )
        self.fleet = meshes.run(starting, timeout_s=SETUP_TIMEOUT_S)
        self.learner = ActorLearner(self.fleet.trainer)
        self.publisher = ActorPublisher(
            trainer=self.fleet.trainer, generator=self.fleet.generator, store=self.fleet.store
        )
        assert self.run(self.publisher.publish()).policy_version == 0
        self.samples = self.run(self.draw())

    async def draw(self):
        """Two completions of each prompt, the first good and the second bad."""
        sampling = SamplingParams(max_tokens=12, num_samples=2, seed=1)
        groups = await ActorSampler(self.fleet.generator).generate(
            [p.token_ids for p in PROMPTS], sampling=sampling
        )
        return [
            policy_sample(
                Rollout(prompt=prompt, sample=i, completion=c, text=""),
                advantage=1.0 - 2 * i,
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
    """The trainers compute in the actor's thread; the generator's engine and the volumes do not."""
    fleet = running.fleet
    volumes = running.run(fleet.store.asked.num_compute_threads.call())
    assert [num for _, num in volumes.items()] == [1, 1]
    assert running.run(fleet.generator.call("num_compute_threads", limit="train_s")) == [1]
    assert running.run(fleet.trainer.call("num_compute_threads", limit="train_s")) == [2, 2]


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
    assert running.run(running.publisher.publish()).policy_version == 1
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


@pytest.mark.parametrize("num_rollouts", [0, 1, 5])
def test_scores_come_in_the_rollouts_order_from_both_processes_in_turn(running, num_rollouts):
    rollouts = [RENDERER.rollout(PROMPTS[0], completion("x"), sample=i) for i in range(num_rollouts)]
    scores = running.run(ActorScorer(running.fleet.reward, num_procs=2).score(rollouts))
    assert [score.reward for score in scores] == list(range(num_rollouts))
    assert [score.correct for score in scores] == [i % 2 == 0 for i in range(num_rollouts)]
    processes = [score.parts["process"] for score in scores]
    assert len(set(processes[::2])) <= 1
    assert len(set(processes[1::2])) <= 1
    assert len(set(processes)) == min(num_rollouts, 2)


def test_a_share_that_nobody_scored_is_no_shorter_answer(running):
    rollouts = [RENDERER.rollout(PROMPTS[0], completion("x"), sample=i) for i in range(5)]
    with pytest.raises(AssertionError, match="4 scores of 5 rollouts"):
        running.run(ActorScorer(running.fleet.reward, num_procs=3).score(rollouts))
