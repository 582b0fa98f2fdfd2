"""The Tinker backend over two trainer ranks and a generator computes the numbers of the one in this
process.

What the contract (tests/tinker/test_contract.py) shows of one rank is not repeated here.
"""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import pytest

from actors.generator import VLLMGenerator
from actors.launch.cleanup import RUN, RUN_VARIABLE, find_by_environment
from rl.distributed.mesh import ParallelismConfig
from rl.tinker.backend import BackendLostError
from rl.tinker.types import InvalidRequestError, LimitReachedError
from tests.support.tinker_backends import actor_config
from tests.tinker.parts import (
    add_gradient,
    assert_same_outputs,
    create,
    created,
    load,
    local_backend,
    open_saved,
    random_data,
    request,
    sampled,
    save,
    settings,
    step,
    tokens_of,
    train,
)


async def life(backend, folder):
    """Train, publish, save, load and sample; return everything that is computed."""
    outputs = await created(backend, "lora") + await created(backend, "full", rank=0)
    lora, full = [await backend.publish(name) for name in ("lora", "full")]
    outputs.append(await add_gradient(backend, "lora", random_data(3, seed=9), backward=False))
    outputs += await train(backend, "lora", seed=30)
    for kind in ("state", "sampler"):
        (folder / kind).mkdir(parents=True)
        await save(backend, "lora", folder / kind, optimizer=kind == "state")
    await create(backend, "loaded", settings(4, seed=99))
    await load(backend, "loaded", folder / "state", optimizer=True)
    outputs += await train(backend, "loaded", seed=40)
    saved = await open_saved(backend, settings(4), folder / "sampler")
    base = await backend.open(None, None)
    answers = await asyncio.gather(
        *(sampled(backend, one) for one in (lora, base, full, saved, lora))
    )
    how = {"temperature": 0.8, "num_samples": 3, "seed": 11, "top_k": 40, "top_p": 0.9}
    answers.append(await sampled(backend, full, **how, prompt_logprobs=True))
    (letter, *_) = [token for token in tokens_of(answers[-1])[0][1:] if 32 <= token < 127]
    answers.append(await sampled(backend, full, **how, stop=("no such text", chr(letter))))
    answers.append(
        await backend.sample(base, request(backend.base_model, [7] * 64, prompt_logprobs=True))
    )
    return outputs, answers, base


async def refusals(backend, folder, base_version):
    """A refused call changes nothing, and a cancelled one lets others in."""
    base = backend.base_model
    assert (base.min_temperature, base.topk_prompt_logprobs) == (0.01, False)
    with pytest.raises(InvalidRequestError, match="the saved model's lora is"):
        await open_saved(backend, settings(2), folder / "sampler")
    with pytest.raises(InvalidRequestError, match=r"no optimizer\.safetensors"):
        await load(backend, "lora", folder / "sampler", optimizer=True)
    # Adapters have no limit of their own; one whole model is there already.
    adapters = [await backend.publish("lora") for _ in range(8)]
    models = [await backend.publish("full") for _ in range(5)]
    with pytest.raises(LimitReachedError, match="there are 6 snapshots of whole models in memory"):
        await backend.publish("full")
    for version in (*adapters[1:], *models):
        await backend.forget(version)
    second = adapters[0]
    await add_gradient(backend, "loaded", random_data(2, seed=1))
    await step(backend, "loaded", learning_rate=1e30)
    with pytest.raises(InvalidRequestError, match="its weights have diverged"):
        await backend.publish("loaded")
    running = asyncio.create_task(sampled(backend, base_version, max_tokens=50, num_samples=8))
    other = asyncio.create_task(sampled(backend, second))
    await asyncio.sleep(0)
    running.cancel()
    assert len(tokens_of(await other)[0]) == 12


async def after_a_death(backend):
    rank1 = backend._workers._cluster.trainer.processes[1]
    computing = asyncio.create_task(train(backend, "lora", steps=2000))
    waiting = asyncio.create_task(create(backend, "new", settings(4)))
    await train(backend, "full", steps=1)
    os.kill(rank1.pid, signal.SIGKILL)
    ends = await asyncio.gather(computing, waiting, return_exceptions=True)
    assert isinstance(ends[0], BackendLostError), ends
    assert "Close this backend" in str(ends[0])
    for call in (step(backend, "full"), backend.open(None, None)):
        with pytest.raises(BackendLostError, match="the backend is lost"):
            await call


async def compare(folder):
    shards = ParallelismConfig(data_parallel_shard_degree=2)
    actors = actor_config(folder / "base", num_procs=2, parallelism=shards).build()
    local = local_backend(folder / "base")
    try:
        await actors.start()
        await local.start()
        outputs, answers, base = await life(actors, folder / "actors")
        expected, local_answers, _ = await life(local, folder / "local")
        assert_same_outputs(outputs, expected)
        for one, other in zip(answers, local_answers, strict=True):
            assert tokens_of(one) == tokens_of(other)
            for mine, theirs in zip(one.completions, other.completions, strict=True):
                np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-4, rtol=0)
            if other.of_prompt is not None:
                found, expected_logprobs = one.of_prompt.logprobs, other.of_prompt.logprobs
                np.testing.assert_allclose(found, expected_logprobs, atol=1e-4, rtol=0)
        # Each loads the files of the other.
        await load(local, "loaded", folder / "actors" / "state", optimizer=True)
        await load(actors, "loaded", folder / "local" / "state", optimizer=True)
        assert_same_outputs(*[await train(b, "loaded", seed=50) for b in (actors, local)])
        await refusals(actors, folder / "local", base)
        await after_a_death(actors)
    finally:
        await asyncio.gather(actors.close(), local.close())
    assert find_by_environment(RUN_VARIABLE, RUN) == []
    with pytest.raises(RuntimeError, match="the backend is closed"):
        await sampled(actors, base)


@pytest.mark.medium
@pytest.mark.timeout(300)
def test_two_ranks_compute_like_one_process_and_a_lost_rank_fails_all_later_calls(tmp_path):
    asyncio.run(compare(tmp_path))


HOW = {"temperature": 1.0, "seed": 4, "num_samples": 9, "max_tokens": 20}
CLIENTS = {"a": settings(4), "b": settings(16, train_mlp=False, seed=8)}


def bits(output):
    return [(c.token_ids.tobytes(), c.logprobs.tobytes()) for c in output.completions]


async def learn(backend, name, made, *, seed):
    """Train a client's model and sample from each version; return all numbers."""
    await create(backend, name, made)
    outputs, samples, versions = [], [], []
    for step_number in range(3):
        outputs += await train(backend, name, steps=1, seed=seed + step_number)
        versions.append(await backend.publish(name))
        samples.append(bits(await sampled(backend, versions[-1], **HOW)))
    return outputs, samples, versions


async def share(folder):
    backend = actor_config(folder / "base", tie=False, batch_invariant=True).build()
    await backend.start()
    try:
        alone = [
            await learn(backend, f"{name} alone", made, seed=ord(name))
            for name, made in CLIENTS.items()
        ]
        together = await asyncio.gather(
            *(learn(backend, name, made, seed=ord(name)) for name, made in CLIENTS.items())
        )
        for (outputs, samples, _), (expected, bits_alone, _) in zip(together, alone, strict=True):
            assert_same_outputs(outputs, expected, atol=0)
            assert samples == bits_alone
        versions = [version for _, _, own in together for version in own]
        expected = [one for _, samples, _ in together for one in samples]
        assert len({str(one) for one in expected}) == 6

        # All of them at once, some twice, after the generator has dropped two of them.
        (member,) = backend._workers._pool.members
        await member.call(VLLMGenerator.give_up_adapters, versions[1:3], timeout="sync_s")
        outputs = await asyncio.gather(
            *(sampled(backend, version, **HOW) for version in (*versions, *versions[:2]))
        )
        assert [bits(output) for output in outputs] == [*expected, *expected[:2]]
    finally:
        await backend.close()


@pytest.mark.medium
@pytest.mark.timeout(300)
def test_two_clients_learn_as_each_alone_and_snapshots_are_sampled_in_one_batch(tmp_path):
    """Identical bits in the batch-invariant mode."""
    asyncio.run(share(tmp_path))
