import asyncio
import threading
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch

from losses.cross_entropy import CrossEntropyLoss
from rl.local import LocalBackend
from rl.models.generate import generate
from rl.models.lora import LoRA
from rl.rollouts.samples import policy_sample
from rl.trainer_types import OptimParams
from rl.training.config import TrainingConfig
from rl.training.engine import TrainingEngine
from rl.types import Completion, Problem, Prompt, Rollout, SamplingParams, TrainingSample, Turn
from tests.support import policies
from tests.training.parts import make_samples, small_spec

PROMPTS = [np.array(ids, dtype=np.int32) for ids in ([3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9])]
SAMPLING = SamplingParams(max_tokens=12, num_samples=4, seed=5)
STEP = OptimParams(lr=0.05)


def with_backend(use, *, assets=None, spec=None, **settings):
    """Run `use` with a backend of an engine config's fields, and return its result."""

    async def run():
        config = TrainingEngine.Config(**settings)
        model = {"spec": spec or small_spec(), "hf_assets_path": assets}
        async with LocalBackend(config, **model, device="cpu") as local:
            return await use(local)

    return asyncio.run(run())


def sample_of(
    prompt: np.ndarray, completion: Completion, *, temperature: float = 1.0
) -> TrainingSample:
    turn = Turn(messages=(), prompt_ids=prompt, completion=completion, text="")
    problem = Problem(id="p", question="", answer="")
    rollout = Rollout(prompt=Prompt(problem=problem, token_ids=prompt), sample=0, turns=(turn,))
    advantages = np.linspace(-1, 1, len(completion.token_ids)).astype(np.float32)
    return policy_sample(rollout, advantages_C=advantages, temperature=temperature)


async def sampled(local: LocalBackend, sampling: SamplingParams = SAMPLING) -> list[TrainingSample]:
    """Sample from the current weights."""
    await local.pull(await local.push())
    groups = await local.generate(PROMPTS, sampling=sampling)
    return [
        sample_of(prompt, completion, temperature=sampling.temperature)
        for prompt, group in zip(PROMPTS, groups, strict=True)
        for completion in group
    ]


async def train(local: LocalBackend, num_steps: int = 3) -> None:
    for _ in range(num_steps):
        await local.forward_backward(make_samples(), loss=CrossEntropyLoss())
        await local.optim_step(STEP)


def ids_of(groups: list[list[Completion]]) -> list[list[int]]:
    return [completion.token_ids.tolist() for group in groups for completion in group]


# Samples come from the trainer's weights


@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        (small_spec(), {}),
        (small_spec(tie=False), {"converters": (LoRA.Config(rank=4),)}),
        (policies.small_spec(experts=True), {}),
        (small_spec(), {"training": TrainingConfig(cpu_offload=True)}),
    ],
    ids=["plain", "LoRA", "experts", "offloaded"],
)
def test_sampled_logprobs_equal_the_trainers_after_some_steps(spec, settings):
    vocab = spec.model.vocab_size

    async def use(local):
        fits = [replace(s, token_ids=s.token_ids % vocab) for s in make_samples()]
        for _ in range(3):
            await local.forward_backward(fits, loss=CrossEntropyLoss())
            await local.optim_step(STEP)
        samples = await sampled(local, replace(SAMPLING, temperature=0.8))
        return samples, await local.forward_backward(samples)

    samples, result = with_backend(use, spec=spec, **settings)
    assert all((s.policy_versions[s.mask] == 3).all() for s in samples)
    assert result.ratio_mean == pytest.approx(1.0, abs=1e-5)
    assert result.logprob_diff_max < 2e-5
    assert result.num_valid_tokens == sum(s.mask.sum() for s in samples) == 12 * 12


@pytest.mark.parametrize("float32_head", [False, True])
def test_sampling_uses_the_dtypes_of_the_trainers_forward(assets, float32_head):
    async def use(local):
        await local.pull(await local.push())
        groups = await local.generate(PROMPTS, sampling=SAMPLING)
        model = local.engine.policy.model
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
        return groups, generate(model, PROMPTS, sampling=SAMPLING)

    training = TrainingConfig(param_dtype="bfloat16")
    spec = replace(small_spec(), float32_head=float32_head)
    ours, theirs = with_backend(use, assets=assets, training=training, spec=spec)
    for mine, expected in zip(chain(*ours), chain(*theirs), strict=True):
        assert mine.logprobs.tolist() == expected.logprobs.tolist()


def test_pull_tells_what_merged_adapters_lost(assets):
    """The sampler's weights are in the dtype of forwards."""

    async def use(local):
        first = await local.pull(await local.push())
        await train(local, num_steps=1)
        second = await local.pull(await local.push())
        again = await local.pull(1)
        assert again == second
        assert first.num_bytes == second.num_bytes
        sizes.append(first.num_bytes)
        return first.merge_lost, second.merge_lost

    sizes: list[int] = []
    lora = (LoRA.Config(rank=4, merge=True),)
    for plain in ((), (LoRA.Config(rank=4),)):
        assert with_backend(use, assets=assets, converters=plain) == (None, None)
    whole, of_adapter = sizes
    assert 4 * of_adapter < whole
    first, in_float32 = with_backend(use, assets=assets, converters=lora)
    assert first == 0.0
    training = TrainingConfig(param_dtype="bfloat16")
    first, in_bfloat16 = with_backend(use, assets=assets, converters=lora, training=training)
    assert first == 0.0
    assert 0.0 < in_float32 < 1e-4 < 1e-3 < in_bfloat16


# Versions


def test_served_weights_are_a_snapshot(assets):
    async def use(local):
        drawn = []

        async def draw():
            drawn.append(await local.generate(PROMPTS, sampling=SAMPLING))

        await local.pull(await local.push())
        await draw()
        await train(local)
        await draw()
        version = await local.push()
        await train(local)  # The pushed weights are a copy, independent of the trainer.
        await draw()
        await local.pull(version)
        await draw()
        await local.pull(await local.push())
        await draw()
        return drawn

    drawn = with_backend(use, assets=assets)
    ids = [ids_of(groups) for groups in drawn]
    assert ids[0] == ids[1] == ids[2]
    assert [int(groups[0][0].policy_versions[0]) for groups in drawn] == [0, 0, 0, 3, 6]
    assert len({str(some) for some in ids[2:]}) == 3


# Cancelled and closed


def test_cancelled_generate_ends_at_its_next_token_and_the_next_one_runs(assets):
    began, cancelled = threading.Event(), threading.Event()
    forwards = []

    def hold(*_):
        forwards.append(began.is_set())
        if not began.is_set():
            began.set()
            assert cancelled.wait(30)

    async def use(local):
        await local.pull(await local.push())
        expected = await local.generate(PROMPTS, sampling=SAMPLING)
        hook = local.sampler.model.register_forward_hook(hold)
        call = asyncio.create_task(local.generate(PROMPTS, sampling=SAMPLING))
        await asyncio.to_thread(began.wait, 30)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        cancelled.set()
        await local.pull(0)  # After the call that was in progress.
        assert forwards == [False]
        hook.remove()
        assert ids_of(await local.generate(PROMPTS, sampling=SAMPLING)) == ids_of(expected)

    with_backend(use, assets=assets)


def test_close_finishes_the_current_call_and_refuses_waiting_ones(assets):
    called, may_end = threading.Event(), threading.Event()

    def waiting_loss(inputs):
        called.set()
        assert may_end.wait(30)
        return CrossEntropyLoss()(inputs)

    async def use(local):
        training = asyncio.create_task(local.forward_backward(make_samples(), loss=waiting_loss))
        await asyncio.to_thread(called.wait, 30)
        waiting = asyncio.create_task(local.optim_step(STEP))
        await asyncio.sleep(0)
        closing = asyncio.create_task(local.__aexit__(None, None, None))
        while not local._closed.is_set():
            await asyncio.sleep(0)
        may_end.set()
        await closing
        assert (await training).num_samples == len(make_samples())
        for late in (waiting, local.optim_step(STEP), local.generate(PROMPTS, sampling=SAMPLING)):
            with pytest.raises(RuntimeError, match="the local backend is closed"):
                await late

    with_backend(use, assets=assets)


def test_stop_texts_without_a_tokenizer_are_refused():
    async def use(local):
        with pytest.raises(
            ValueError, match=r"stop_texts=\('a',\): needs a tokenizer: set hf_assets_path"
        ):
            await local.generate(PROMPTS, sampling=replace(SAMPLING, stop_texts=("a",)))

    with_backend(use)


def test_more_than_one_process_is_refused(assets, monkeypatch):
    environment = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="WORLD_SIZE=2: a local backend is a single process"):
        LocalBackend(TrainingEngine.Config(), spec=small_spec(), hf_assets_path=assets)
