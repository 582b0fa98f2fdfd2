"""Starting from a folder, failing, closing: each test has an engine of its own, one after another."""

import asyncio
import resource
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.vllm.engine import GeneratorEngine
from actors.vllm.errors import DivergedError, GeneratorError
from rl.models.generate import generate
from rl.types import SamplingParams
from tests.support.policies import (
    config_folder,
    model_folder,
    prompts_of,
    random_model,
    recomputed_logprobs,
    small_spec,
    tokens_of,
    writer,
)

pytestmark = [pytest.mark.medium, pytest.mark.timeout(120)]

PROMPTS = prompts_of([5, 40, 1])


def engine_of(spec, folder, **settings):
    defaults: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "cpu_kv_cache_gib": 0.05}
    config = GeneratorEngine.Config(**defaults | settings)
    return GeneratorEngine(config=config, model_spec=spec, hf_assets_path=folder)


def engine_threads():
    return [thread for thread in threading.enumerate() if thread.name == "vllm-engine"]


def test_an_engine_starts_from_a_hugging_face_folder_and_ends_when_closed(tmp_path):
    # Untied, and of a head size that the attention kernels have.
    spec = small_spec(tie=False, head_dim=32)
    model = random_model(spec, seed=0)
    engine = engine_of(spec, model_folder(tmp_path / "hf", spec, model), initial_weights="folder")
    sampling = SamplingParams(max_tokens=20, num_samples=2, seed=1)

    async def life():
        await engine.start()
        assert engine.policy_version == 0
        completions = await engine.generate(PROMPTS, sampling=sampling)
        waiting = asyncio.create_task(engine.generate(PROMPTS, sampling=SamplingParams(max_tokens=200)))
        await engine.generate(PROMPTS, sampling=SamplingParams(max_tokens=1))
        await engine.close()
        with pytest.raises(GeneratorError, match="the generator was closed"):
            await waiting
        with pytest.raises(GeneratorError, match="the generator was closed"):
            await engine.generate(PROMPTS, sampling=sampling)
        await engine.close()
        return completions

    completions = asyncio.run(life())
    assert tokens_of(completions) == tokens_of(generate(model, PROMPTS, sampling=sampling))
    for prompt, of_prompt in zip(PROMPTS, completions, strict=True):
        for completion in of_prompt:
            expected = recomputed_logprobs(model, prompt, completion, sampling)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4, rtol=0)
            assert np.abs(completion.logprobs - expected).mean() <= 1e-5
    assert engine_threads() == []
    assert not torch.distributed.is_initialized()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1  # vLLM replaces this function by one that does nothing
    torch.set_num_threads(threads)


def test_requests_that_lack_of_cache_interrupts_get_the_same_tokens(tmp_path):
    spec = small_spec()
    old, new = random_model(spec, seed=0), random_model(spec, seed=1)
    # Room for 256 tokens, so for one of these completions at its end.
    engine = engine_of(
        spec, config_folder(tmp_path / "assets", spec), cpu_kv_cache_gib=9 / 2**15, on_update="keep"
    )
    prompts = prompts_of([100, 5, 30])
    sampling = SamplingParams(max_tokens=156, num_samples=4, seed=1)

    async def life():
        await engine.start()
        await engine.update_weights(writer(old), version=1)
        completions = await engine.generate(prompts, sampling=sampling)
        across = asyncio.create_task(engine.generate(prompts, sampling=sampling))
        await engine.generate(prompts[1:2], sampling=SamplingParams(max_tokens=40))
        await engine.update_weights(writer(new), version=2)
        completed = await across
        await engine.close()
        return completions, completed

    completions, across = asyncio.run(life())
    assert tokens_of(completions) == tokens_of(generate(old, prompts, sampling=sampling))
    num_new = 0
    for prompt, of_prompt in zip(prompts, across, strict=True):
        for completion in of_prompt:
            versions = completion.policy_versions
            assert len(versions) == 156
            assert (np.diff(versions) >= 0).all()
            by_old, by_new = (recomputed_logprobs(m, prompt, completion, sampling) for m in (old, new))
            drawn_by_old = versions == 1
            np.testing.assert_allclose(
                completion.logprobs[drawn_by_old], by_old[drawn_by_old], atol=1e-4, rtol=0
            )
            if not drawn_by_old.any():
                num_new += 1
                np.testing.assert_allclose(completion.logprobs, by_new, atol=1e-4, rtol=0)
    assert num_new > 0


def test_a_failed_step_fails_every_call_with_its_cause(tmp_path):
    spec = small_spec()
    engine = engine_of(spec, config_folder(tmp_path / "assets", spec), dtype="bfloat16")
    model = random_model(spec, seed=0)

    async def life():
        await engine.start()
        await engine.update_weights(writer(model), version=1)
        engine._core.model.norm.weight.data = torch.ones(3, dtype=torch.bfloat16)
        calls = [engine.generate(PROMPTS, sampling=SamplingParams(max_tokens=5)) for _ in range(2)]
        failed = await asyncio.gather(*calls, return_exceptions=True)
        with pytest.raises(GeneratorError, match="of generator rank 0 failed"):
            await engine.generate(PROMPTS, sampling=SamplingParams(max_tokens=5))
        with pytest.raises(GeneratorError, match="of generator rank 0 failed"):
            await engine.update_weights(writer(model), version=2)
        await engine.close()
        return failed

    for error in asyncio.run(life()):
        assert isinstance(error, GeneratorError)
        assert str(error).startswith("the engine of generator rank 0 failed: RuntimeError: ")
        assert isinstance(error.__cause__, RuntimeError)
    assert engine_threads() == []


def test_weights_that_are_not_finite_fail_their_calls_and_with_others_the_engine_goes_on(tmp_path):
    spec = small_spec()
    engine = engine_of(spec, config_folder(tmp_path / "assets", spec))
    model, broken = random_model(spec, seed=0), random_model(spec, seed=0)
    with torch.no_grad():
        broken.norm.weight[0] = torch.nan
        for name, parameter in broken.named_parameters():
            if name.endswith("qkv_proj.weight"):
                parameter.fill_(torch.nan)  # and so what is cached
    sampling = SamplingParams(max_tokens=5, temperature=0.0)

    async def life():
        await engine.start()
        await engine.update_weights(writer(broken), version=1)
        calls = [engine.generate(PROMPTS, sampling=sampling) for _ in range(2)]
        failed = await asyncio.gather(*calls, engine.compute_logprobs(PROMPTS), return_exceptions=True)
        await engine.update_weights(writer(model), version=2)
        completions = await engine.generate(PROMPTS, sampling=sampling)
        await engine.close()
        return failed, completions

    failed, completions = asyncio.run(life())
    for error in failed:
        assert isinstance(error, DivergedError)
        assert "logprobs are NaN" in str(error)
    assert tokens_of(completions) == tokens_of(generate(model, PROMPTS, sampling=sampling))


def test_an_engine_that_cannot_start_leaves_nothing(tmp_path):
    spec = small_spec()
    engine = engine_of(spec, config_folder(tmp_path / "assets", spec), cpu_kv_cache_gib=1e6)

    async def life():
        try:
            await engine.start()
        finally:
            await engine.close()

    with pytest.raises(ValueError, match="Available memory"):
        asyncio.run(life())
    assert engine_threads() == []
    assert not torch.distributed.is_initialized()


def test_a_folder_without_weights_is_refused_before_the_start(tmp_path):
    spec = small_spec()
    engine = engine_of(spec, config_folder(tmp_path / "assets", spec), initial_weights="folder")
    with pytest.raises(ValueError, match=r"weights file .*/assets/model.safetensors is missing"):
        asyncio.run(engine.start())
    assert engine_threads() == []


def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["plain", "batch-invariant"])
def test_a_sleeping_engine_holds_no_cache_and_no_weights_and_serves_when_awake(tmp_path, batch_invariant):
    spec = replace(small_spec(), batch_invariant=batch_invariant)
    model = random_model(spec, seed=0)
    # 300 MiB of cache, of which what is used becomes resident: 64 MiB of it are written.
    engine = engine_of(
        spec, config_folder(tmp_path / "assets", spec), can_sleep=True, cpu_kv_cache_gib=0.3, max_num_seqs=300
    )
    sampling = SamplingParams(max_tokens=20, num_samples=2, seed=1)
    many = prompts_of([250] * 300)

    async def life():
        await engine.start()
        await engine.update_weights(writer(model), version=1)
        await engine.generate(many, sampling=SamplingParams(max_tokens=1))
        running = asyncio.create_task(engine.generate(PROMPTS, sampling=sampling))
        await engine.generate(PROMPTS[:1], sampling=SamplingParams(max_tokens=2))
        used = resident_mib()
        await engine.sleep()
        freed = used - resident_mib()
        assert sum(p.untyped_storage().nbytes() for p in engine.model_state_dict().values()) == 0
        with pytest.raises(GeneratorError, match="the generator sleeps: wake must be called"):
            await engine.generate(PROMPTS, sampling=sampling)
        with pytest.raises(GeneratorError, match="wake must be called before version 2 is taken"):
            await engine.update_weights(writer(model), version=2)
        await engine.sleep()
        await engine.wake()
        with pytest.raises(GeneratorError, match="no weights"):
            await engine.generate(PROMPTS, sampling=sampling)
        await engine.update_weights(writer(model), version=2)
        again = await engine.generate(PROMPTS, sampling=sampling)
        await engine.sleep()
        await engine.close()
        return await running, again, freed

    before, again, freed = asyncio.run(life())
    expected = tokens_of(generate(model, PROMPTS, sampling=sampling))
    assert tokens_of(before) == tokens_of(again) == expected
    assert {c.policy_versions[0] for of in again for c in of} == {2}
    assert freed > 60


def test_an_engine_that_was_not_started_for_it_refuses_to_sleep(tmp_path):
    spec = small_spec()
    engine = engine_of(spec, config_folder(tmp_path / "assets", spec))
    with pytest.raises(ValueError, match=r"generator\.can_sleep=False: must be True"):
        asyncio.run(engine.sleep())
