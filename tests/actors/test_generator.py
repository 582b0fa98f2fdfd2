"""Generator actors on two tensor-parallel ranks, with weights from a real store."""

import asyncio
from typing import Any

import numpy as np
import pytest

from actors.generator import VLLMGenerator, generator_env
from rl.models.generate import generate
from rl.rollouts.samples import make_demonstration_sample
from rl.types import SamplingParams
from rl.weights.store import WeightStore
from tests.support.monarch_meshes import monarch_meshes
from tests.support.policies import (
    VOCAB_SIZE,
    config_folder,
    prompts_of,
    random_model,
    small_spec,
    tokens_of,
)
from tests.support.policy_actors import PolicyPusher

pytestmark = [pytest.mark.medium, pytest.mark.timeout(240)]

SPEC = small_spec(experts=True)
PROMPTS = prompts_of([5, 40, 1])
SETUP_TIMEOUT_S = 150
CONFIG = VLLMGenerator.Config(
    tensor_parallel_degree=2,
    dtype="float32",
    max_model_len=256,
    cpu_kv_cache_gib=0.05,
    rank_timeout_s=60,
    on_update="recompute",
    can_sleep=True,
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
            "generator", VLLMGenerator, config=CONFIG, model_spec=SPEC, store=store
        )
        meshes.run(self.generator.setup.call(folder), timeout_s=SETUP_TIMEOUT_S)

    def run(self, awaitable):
        return self._meshes.run(awaitable)

    def publish(self, version, *, seed):
        """Push, announce and pull a version."""
        self.pull(self.trainer.push.call_one(version, seed))

    def pull(self, push):
        snapshot = self.store.announce([self.run(push)])
        self.run(self.generator.pull_model_state_dict.call(snapshot))

    async def generate(self, prompts, *, call_id="", begun=None, **settings):
        sampling = SamplingParams(**settings)
        answers = await self.generator.generate.call(
            prompts, sampling=sampling, call_id=call_id, begun=begun
        )
        first, second = (answer for _, answer in answers.items())
        assert second == []
        return first


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with monarch_meshes() as meshes:
        served = Served(
            meshes, config_folder(tmp_path_factory.mktemp("generator") / "assets", SPEC)
        )
        yield served
        meshes.run(served.generator.close.call())


def test_generator_samples_from_the_pulled_weights_and_buffers(served):
    """A mixture's router has a buffer, without which it would choose other experts."""
    settings: dict[str, Any] = {"max_tokens": 20, "num_samples": 2, "seed": 3}
    served.publish(1, seed=10)
    completions = served.run(served.generate(PROMPTS, **settings))
    expected = generate(random_model(SPEC, seed=10), PROMPTS, sampling=SamplingParams(**settings))
    assert tokens_of(completions) == tokens_of(expected)
    assert {v for of in completions for c in of for v in c.policy_versions.tolist()} == {1}


def test_aborted_call_continues_under_the_next_weights(served):
    served.publish(8, seed=16)
    settings: dict[str, Any] = {"max_tokens": 200, "seed": 3}

    async def end_it():
        call = asyncio.ensure_future(served.generate(PROMPTS, call_id="a", **settings))
        await served.generate(PROMPTS, max_tokens=5)
        counts = [n for _, n in (await served.generator.abort.call(["a"])).items()]
        return counts, await call

    counts, begun = served.run(end_it())
    assert counts == [3, 0]
    assert {c.finish_reason for of in begun for c in of} == {"abort"}
    served.publish(9, seed=16)
    made = served.run(served.generate(PROMPTS, begun=begun, **settings))
    model = random_model(SPEC, seed=16)
    assert tokens_of(made) == tokens_of(
        generate(model, PROMPTS, sampling=SamplingParams(**settings))
    )
    for (old,), (new,) in zip(begun, made, strict=True):
        num_old = len(old.token_ids)
        assert new.policy_versions.tolist() == [8] * num_old + [9] * (200 - num_old)


def test_generator_samples_from_merged_adapters(served):
    """The generator has merged weights; the trainer computes logprobs with unmerged adapters."""
    replies = np.random.default_rng(0).integers(0, VOCAB_SIZE, (len(PROMPTS), 12)).astype(np.int32)
    taught = [
        make_demonstration_sample(prompt, reply)
        for prompt, reply in zip(PROMPTS, replies, strict=True)
    ]
    served.pull(served.trainer.push_adapted.call_one(15, taught))
    completions = served.run(served.generate(PROMPTS, max_tokens=20, num_samples=2, seed=3))
    samples = [
        make_demonstration_sample(prompt, completion.token_ids)
        for prompt, of_prompt in zip(PROMPTS, completions, strict=True)
        for completion in of_prompt
    ]
    (trained,) = (answer for _, answer in served.run(served.trainer.logprobs.call(samples)).items())
    generated = [completion.logprobs for of_prompt in completions for completion in of_prompt]
    for ours, theirs in zip(trained, generated, strict=True):
        np.testing.assert_allclose(ours[-len(theirs) :], theirs, atol=1e-4)
    # The trained replies are likely now; 12 random tokens of 64 cost 4 nats each.
    (again,) = (answer for _, answer in served.run(served.trainer.logprobs.call(taught)).items())
    assert np.mean([logprobs[-12:].mean() for logprobs in again]) > -3.5
