"""The generator's actors on two tensor-parallel ranks, with weights from a real store."""

import asyncio
from typing import Any

import numpy as np
import pytest
from monarch.actor import ActorError

from actors.generator import generator_env
from rl.models.generate import generate
from rl.rollouts.samples import demonstration_sample
from rl.types import SamplingParams
from rl.weights.store import WeightStore
from tests.support.monarch_meshes import monarch_meshes
from tests.support.policies import (
    ROUTE_BIAS,
    VOCAB_SIZE,
    biased_spec,
    config_folder,
    prompts_of,
    random_model,
    tokens_of,
)
from tests.support.policy_actors import OpenGenerator, PolicyPusher

pytestmark = [pytest.mark.medium, pytest.mark.timeout(240)]

SPEC = biased_spec()
PROMPTS = prompts_of([5, 40, 1])
SETUP_TIMEOUT_S = 150
CONFIG = OpenGenerator.Config(
    tensor_parallel_degree=2, dtype="float32", max_model_len=256, cpu_kv_cache_gib=0.05, rank_timeout_s=60
)


class Served:
    def __init__(self, meshes, folder):
        self._meshes = meshes
        trainer_mesh = meshes.spawn_mesh(1)
        generator_mesh = meshes.spawn_mesh(2, env=generator_env(CONFIG))
        store = WeightStore.Config(timeout_s=60).build(dtype="float32")
        meshes.run(store.start(trainer_mesh))
        self.store = store
        self.trainer = trainer_mesh.spawn("trainer", PolicyPusher, SPEC, store)
        self.generator = generator_mesh.spawn(
            "generator", OpenGenerator, config=CONFIG, model_spec=SPEC, store=store
        )
        meshes.run(self.generator.setup.call(folder), timeout_s=SETUP_TIMEOUT_S)

    def run(self, awaitable):
        return self._meshes.run(awaitable)

    def publish(self, version, *, seed):
        """Push, announce, pull; what each rank answers."""
        self.run(self.trainer.push.call(version, seed))
        self.run(self.store.announce(version))
        return [result for _, result in self.run(self.generator.pull_model_state_dict.call(version)).items()]

    async def generate(self, prompts, **settings):
        answers = await self.generator.generate.call(prompts, SamplingParams(**settings))
        first, second = (answer for _, answer in answers.items())
        assert second == []
        return first


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with monarch_meshes() as meshes:
        served = Served(meshes, config_folder(tmp_path_factory.mktemp("generator") / "assets", SPEC))
        yield served
        meshes.run(served.generator.close.call())


def test_pulled_weights_are_what_is_sampled_from(served):
    settings: dict[str, Any] = {"max_tokens": 20, "num_samples": 2, "seed": 3}
    for version, seed in ((1, 10), (2, 11)):
        results = served.publish(version, seed=seed)
        assert [result.policy_version for result in results] == [version, version]
        completions = served.run(served.generate(PROMPTS, **settings))
        model = random_model(SPEC, seed=seed)
        assert tokens_of(completions) == tokens_of(
            generate(model, PROMPTS, sampling=SamplingParams(**settings))
        )
        assert {v for of in completions for c in of for v in c.policy_versions.tolist()} == {version}


def test_calls_overlap(served):
    served.publish(3, seed=12)
    order = []

    async def call(name, **settings):
        await served.generate(PROMPTS, **settings)
        order.append(name)

    async def both():
        await asyncio.gather(call("long", max_tokens=200), call("short", max_tokens=2))

    served.run(both())
    assert order == ["short", "long"]


def test_a_prompt_that_is_too_long_is_the_callers_error(served):
    served.publish(4, seed=13)
    with pytest.raises(ActorError, match=r"prompt 1 has 40 tokens: with sampling.max_tokens=217"):
        served.run(served.generate(PROMPTS, max_tokens=217))
    assert len(served.run(served.generate(PROMPTS, max_tokens=216))[1][0].token_ids) == 216


def test_a_version_that_is_not_there_is_an_error_and_the_next_heals(served):
    with pytest.raises(ActorError, match="99"):
        served.run(served.generator.pull_model_state_dict.call(99))
    served.publish(5, seed=14)
    assert len(served.run(served.generate(PROMPTS, max_tokens=3))) == 3


def test_a_buffer_of_the_trainers_weights_arrives_and_those_of_vllm_are_its_own(served):
    served.publish(6, seed=15)
    for bias in served.run(served.generator.weight.call("route_bias")).values():
        assert bias.tolist() == list(ROUTE_BIAS)


def test_merged_adapters_are_what_is_sampled_from(served):
    """The generator knows nothing of LoRA; the trainer's own logprobs are with adapters unmerged."""
    replies = np.random.default_rng(0).integers(0, VOCAB_SIZE, (len(PROMPTS), 12)).astype(np.int32)
    taught = [demonstration_sample(prompt, reply) for prompt, reply in zip(PROMPTS, replies, strict=True)]
    served.run(served.trainer.push_adapted.call(7, taught))
    served.run(served.store.announce(7))
    served.run(served.generator.pull_model_state_dict.call(7))
    completions = served.run(served.generate(PROMPTS, max_tokens=20, num_samples=2, seed=3))
    samples = [
        demonstration_sample(prompt, completion.token_ids)
        for prompt, of_prompt in zip(PROMPTS, completions, strict=True)
        for completion in of_prompt
    ]
    (trained,) = (answer for _, answer in served.run(served.trainer.logprobs.call(samples)).items())
    generated = [completion.logprobs for of_prompt in completions for completion in of_prompt]
    for ours, theirs in zip(trained, generated, strict=True):
        np.testing.assert_allclose(ours[-len(theirs) :], theirs, atol=1e-4)
    # What was taught is likely now: 12 tokens of 64 each, at 4 nats by chance.
    (again,) = (answer for _, answer in served.run(served.trainer.logprobs.call(taught)).items())
    assert np.mean([logprobs[-12:].mean() for logprobs in again]) > -3.0
