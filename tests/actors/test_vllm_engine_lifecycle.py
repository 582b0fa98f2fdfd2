"""Start, sleep, close and failure of an engine; the tests of `cramped` share one and stand last."""

import asyncio
import json
import resource
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from actors.vllm.config import GeneratorConfig
from actors.vllm.requests import GeneratorError
from rl.models.generate import generate
from rl.types import SamplingParams
from tests.support.policies import (
    logprob_errors,
    prompts_of,
    random_model,
    small_spec,
    tokens_of,
    writer,
)
from tests.support.served_engine import Served, make_engine

pytestmark = [pytest.mark.medium, pytest.mark.timeout(120)]

PROMPTS = prompts_of([5, 40, 1])


def engine_threads():
    return [thread for thread in threading.enumerate() if thread.name == "vllm-engine"]


def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def test_engine_starts_sleeps_and_ends_when_closed(tmp_path):
    spec = replace(small_spec(tie=False, head_dim=32), batch_invariant=True)
    model = random_model(spec, seed=0)
    # 300 MiB of cache, of which only the used part becomes resident: 64 MiB are written.
    engine = make_engine(
        tmp_path,
        spec,
        can_sleep=True,
        cpu_kv_cache_gib=0.3,
        max_num_seqs=300,
    )
    sampling = SamplingParams(max_tokens=20, num_samples=2, seed=1)
    many = prompts_of([250] * 300)

    async def life():
        await engine.start()
        with pytest.raises(GeneratorError, match="no weights"):
            await engine.generate(PROMPTS, sampling=sampling)
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
        await engine.update_weights(writer(model), version=2)
        again = await engine.generate(PROMPTS, sampling=sampling)
        waiting = asyncio.create_task(
            engine.generate(PROMPTS, sampling=SamplingParams(max_tokens=200))
        )
        await engine.generate(PROMPTS, sampling=SamplingParams(max_tokens=1))
        await engine.close()
        for call in (waiting, engine.generate(PROMPTS, sampling=sampling)):
            with pytest.raises(GeneratorError, match="the generator was closed"):
                await call
        await engine.close()
        return await running, again, freed

    before, again, freed = asyncio.run(life())
    expected = tokens_of(generate(model, PROMPTS, sampling=sampling))
    assert tokens_of(before) == tokens_of(again) == expected
    assert {c.policy_versions[0] for of in again for c in of} == {2}
    assert freed > 60
    assert engine_threads() == []
    assert not torch.distributed.is_initialized()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1  # vLLM replaces this function with a stub
    torch.set_num_threads(threads)


def test_engine_that_cannot_start_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(GeneratorConfig, "count_cpu_cache_bytes", lambda *_: 2**50)
    engine = make_engine(tmp_path, small_spec())

    async def life():
        try:
            await engine.start()
        finally:
            await engine.close()

    with pytest.raises(ValueError, match="Available memory"):
        asyncio.run(life())
    assert engine_threads() == []
    assert not torch.distributed.is_initialized()


def test_sleep_that_is_not_allowed_is_refused(tmp_path):
    engine = make_engine(tmp_path, small_spec())
    with pytest.raises(ValueError, match=r"generator\.can_sleep=False: must be True"):
        asyncio.run(engine.sleep())


LLAMA = small_spec(family="llama")
MODEL = random_model(LLAMA, seed=0)


@pytest.fixture(scope="module")
def cramped(tmp_path_factory):
    """A family that ignores the window in config.json, with a cache for 256 tokens."""
    folder = tmp_path_factory.mktemp("cramped")
    engine = make_engine(folder, LLAMA, cpu_kv_cache_gib=9 / 2**15)
    file = folder / "assets-0" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"sliding_window": 16}))
    with asyncio.Runner() as runner:
        runner.run(engine.start())
        served = Served(runner, engine)
        served.load(MODEL)
        yield served
        served.run(engine.close())


def test_preempted_requests_get_the_same_tokens(cramped):
    prompts = prompts_of([100, 5, 30])
    # The cache has room for a single one of these completions at its end.
    sampling = SamplingParams(max_tokens=156, num_samples=4, seed=1)
    completions = cramped.run(cramped.engine.generate(prompts, sampling=sampling))
    assert tokens_of(completions) == tokens_of(generate(MODEL, prompts, sampling=sampling))


def test_window_of_config_json_that_the_family_ignores_hides_no_token(cramped):
    sampling = SamplingParams(max_tokens=4, seed=1)
    completions = cramped.run(cramped.engine.generate(PROMPTS, sampling=sampling))
    assert logprob_errors(MODEL, PROMPTS, completions, sampling).max() < 1e-4


def test_failed_step_fails_every_call(cramped):
    """The last test of this engine, which serves nothing afterwards."""
    engine = cramped.engine
    sampling = SamplingParams(max_tokens=5)

    async def break_and_call():
        engine._core.model.embed_tokens.weight.data = torch.ones(3)
        calls = [engine.generate(PROMPTS, sampling=sampling) for _ in range(2)]
        failed = await asyncio.gather(*calls, return_exceptions=True)
        for call in (
            engine.generate(PROMPTS, sampling=sampling),
            engine.update_weights(writer(MODEL), version=2),
        ):
            with pytest.raises(GeneratorError, match="of generator rank 0 failed"):
                await call
        await engine.close()
        return failed

    for error in cramped.run(break_and_call()):
        assert isinstance(error, GeneratorError)
        assert str(error).startswith("the engine of generator rank 0 failed: RuntimeError: ")
        assert isinstance(error.__cause__, RuntimeError)
    assert engine_threads() == []
