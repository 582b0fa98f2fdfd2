"""The local backend as a whole: turns, snapshots, files, ends; and the bits of training in samples."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl.tinker.backend import Backend
from rl.tinker.errors import InvalidRequestError, NotFoundError
from rl.tinker.local.backend import LocalBackend
from rl.tinker.local.base import Base
from rl.tinker.messages import AdamParams, LoRASettings, LossCall, ModelSettings, SampleOutput
from rl.training.config import TrainingConfig
from tests.tinker.local.data_parts import datum, random_data
from tests.tinker.local.local_parts import CROSS_ENTROPY, NAME, TRAINING, base_config, request, settings

DATA = random_data(5, seed=1)
PARAMS = AdamParams(learning_rate=1e-2)
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("base") / "tied"


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 120))

    return run


@asynccontextmanager
async def backend_of(*bases: Base.Config, **options: Any) -> AsyncIterator[LocalBackend]:
    config = LocalBackend.Config(bases=bases, training=TRAINING, device="cpu", gather_s=0.0, **options)
    made: LocalBackend = config.build()
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def train(backend: Backend, model_id: str, *, steps: int = 1) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    for _ in range(steps):
        found += (await backend.forward_backward(model_id, DATA, CROSS_ENTROPY, backward=True)).logprobs
        await backend.optim_step(model_id, PARAMS)
    return found


def tokens(output: SampleOutput) -> list[list[int]]:
    return [sequence.tokens.tolist() for sequence in output.sequences]


FREE = request(PROMPT, num_samples=2, max_tokens=12, stop=())


@in_loop
async def test_the_base_a_snapshot_and_saved_weights_are_sampled_from_at_once(assets, tmp_path):
    async with backend_of(base_config(assets)) as backend:
        await backend.create_model("m", settings())
        await backend.open_sampler("base", settings(), None)
        await backend.take_snapshot("m", "fresh")
        await train(backend, "m", steps=3)
        await backend.take_snapshot("m", "trained")
        await backend.save_sampler("m", tmp_path)
        await backend.open_sampler("saved", settings(), tmp_path)
        names = ["base", "fresh", "trained", "saved"] * 2
        pending = [asyncio.create_task(backend.sample(name, FREE)) for name in names]
        await train(backend, "m", steps=2)
        base, fresh, trained, saved, *again = [tokens(output) for output in await asyncio.gather(*pending)]
        assert again == [base, fresh, trained, saved]
        assert base == fresh
        assert trained == saved != base
        # Later training reaches none of them.
        assert [tokens(await backend.sample(name, FREE)) for name in names[:4]] == again


@in_loop
async def test_models_of_two_clients_trained_at_once_have_the_bits_of_each_alone(assets):
    async with backend_of(base_config(assets)) as backend:
        alone = []
        for seed in (1, 2):
            await backend.create_model(f"alone {seed}", settings(4, seed=seed))
            alone.append(await train(backend, f"alone {seed}", steps=3))
            await backend.create_model(f"both {seed}", settings(4, seed=seed))
        both = await asyncio.gather(*(train(backend, f"both {seed}", steps=3) for seed in (1, 2)))
        for one, other in zip(alone, both, strict=True):
            assert all(map(np.array_equal, one, other))


@in_loop
async def test_a_state_is_taken_up_by_another_model_of_a_new_backend(assets, tmp_path):
    async with backend_of(base_config(assets)) as backend:
        await backend.create_model("m", settings())
        await train(backend, "m", steps=2)
        await backend.save_state("m", tmp_path)
        expected = await train(backend, "m", steps=2)
        await backend.take_snapshot("m", "s")
        sampled = tokens(await backend.sample("s", FREE))
    async with backend_of(base_config(assets)) as backend:
        await backend.create_model("n", settings(seed=None))
        await backend.load_state("n", tmp_path, optimizer=True)
        found = await train(backend, "n", steps=2)
        await backend.take_snapshot("n", "s")
        assert all(map(np.array_equal, expected, found))
        assert tokens(await backend.sample("s", FREE)) == sampled


@pytest.mark.parametrize(
    ("rank", "tie"),
    [(4, True), (4, False), (1, True), (0, True)],
    ids=["lora", "lora of the head too", "rank 1", "all parameters"],
)
@in_loop
async def test_samples_have_the_bits_of_training_in_the_batch_invariant_mode(assets, tmp_path, rank, tie):
    config = base_config(assets if tie else tmp_path / "untied", tie=tie, batch_invariant=True)
    async with backend_of(config) as backend:
        await backend.create_model("m", settings(rank))
        await train(backend, "m", steps=2)
        await backend.take_snapshot("m", "s")
        asked = [request([5, 6, 7, n], num_samples=2, max_tokens=12, stop=()) for n in range(3)]
        outputs = await asyncio.gather(*(backend.sample("s", one) for one in asked))
        data, sampled = [], []
        for one, output in zip(asked, outputs, strict=True):
            for sequence in output.sequences:
                whole = np.concatenate([one.prompt, sequence.tokens]).tolist()
                counts = np.arange(len(whole) - 1) >= len(one.prompt) - 1
                data.append(
                    datum(
                        whole[:-1],
                        whole[1:],
                        logprobs=np.append(np.zeros(3), sequence.logprobs),
                        advantages=counts,
                    )
                )
                sampled.append(sequence.logprobs)
        found = await backend.forward_backward("m", data, LossCall(name="ppo"), backward=True)
        assert found.metrics["logprob_diff:max"] == 0.0
        assert found.metrics["num_clipped:sum"] == 0.0
        assert found.metrics["loss:sum"] == -72.0
        for logprobs, of_sampler in zip(found.logprobs, sampled, strict=True):
            assert np.array_equal(logprobs[3:], of_sampler)
        whole = np.append(data[0].tokens, data[0].loss_inputs["target_tokens"][-1])
        scored = await backend.sample("s", request(whole.tolist(), prompt_logprobs=True, max_tokens=1))
        assert scored.prompt_logprobs is not None
        assert np.array_equal(scored.prompt_logprobs[1:], found.logprobs[0])


@in_loop
async def test_a_call_that_is_cancelled_before_its_turn_is_never_made(assets):
    async with backend_of(base_config(assets)) as backend:
        await backend.create_model("m", settings())
        await backend.create_model("n", settings())
        calls: list[asyncio.Task[Any]] = [asyncio.create_task(train(backend, "m"))]
        calls += [asyncio.create_task(backend.optim_step("n", PARAMS)) for _ in range(3)]
        await asyncio.sleep(0)
        for call in calls[1:]:
            call.cancel()
        await asyncio.wait(calls, timeout=60)
        assert [call.cancelled() for call in calls] == [False, True, True, True]
        await backend.optim_step("n", PARAMS)
        assert backend._models["n"].engine.policy_version == 1


@in_loop
async def test_closing_ends_what_samples_and_refuses_what_comes_later(assets):
    backend: LocalBackend = LocalBackend.Config(
        bases=(base_config(assets),), training=TRAINING, device="cpu", gather_s=0.0
    ).build()
    await backend.start()
    await backend.open_sampler("s", settings(), None)
    waits = [asyncio.create_task(backend.sample("s", request(PROMPT, seed=n))) for n in range(3)]
    await asyncio.sleep(0)
    await backend.close()
    await backend.close()
    for wait in waits:
        with pytest.raises(RuntimeError, match="the local backend was closed"):
            await wait
    with pytest.raises(RuntimeError, match="the local backend is closed"):
        await backend.delete_model("m")
    assert backend.base_models == []


@in_loop
async def test_what_is_not_there_is_named(assets):
    async with backend_of(base_config(assets)) as backend:
        with pytest.raises(NotFoundError, match="there is no model 'm'"):
            await backend.forward_backward("m", DATA, CROSS_ENTROPY, backward=True)
        with pytest.raises(NotFoundError, match="there is no sampler 's'"):
            await backend.sample("s", FREE)
        with pytest.raises(InvalidRequestError, match="base_model='big': must be one of small"):
            await backend.create_model("m", ModelSettings(base_model="big", lora=None))
        await backend.create_model("m", settings())
        await backend.delete_model("m")
        with pytest.raises(NotFoundError, match="there is no model 'm'"):
            await backend.delete_model("m")
        await backend.open_sampler("s", settings(), None)
        await backend.close_sampler("s")
        with pytest.raises(NotFoundError, match="there is no sampler 's'"):
            await backend.close_sampler("s")


@in_loop
async def test_a_request_outlives_the_closing_of_its_sampler(assets):
    async with backend_of(base_config(assets)) as backend:
        await backend.create_model("m", settings())
        await backend.take_snapshot("m", "s")
        pending = asyncio.create_task(backend.sample("s", FREE))
        await asyncio.sleep(0)
        await backend.close_sampler("s")
        await backend.delete_model("m")
        assert [len(found) for found in tokens(await pending)] == [12, 12]


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        ({"rank": 129}, "lora_config.rank=129: must be 1 to 128, or 0 to train all parameters"),
        ({"rank": -1}, "lora_config.rank=-1: must be 1 to 128"),
        ({"rank": 1, "seed": -1}, "lora_config.seed=-1: must be 0 to 9223372036854775807, or none"),
        ({"rank": 1, "seed": 2**63}, "lora_config.seed=9223372036854775808: must be"),
        (
            {"rank": 1, "train_attn": False, "train_mlp": False},
            "nothing would have an adapter (this model's output head is its embedding, which has none)",
        ),
        (
            {"rank": 1, "train_attn": False, "train_mlp": False, "train_unembed": False},
            "train_unembed=False: nothing would have an adapter: one of the first two must be true",
        ),
    ],
)
@in_loop
async def test_settings_that_cannot_be_are_named(assets, lora, says):
    async with backend_of(base_config(assets)) as backend:
        wanted = ModelSettings(base_model=NAME, lora=LoRASettings(**lora))
        with pytest.raises(InvalidRequestError) as error:
            backend.check_settings(wanted)
        assert says in str(error.value)
        with pytest.raises(InvalidRequestError):
            await backend.create_model("m", wanted)


@in_loop
async def test_a_base_that_is_only_sampled_from_takes_no_models(assets):
    config = base_config(assets)
    config.trainable = False
    async with backend_of(config) as backend:
        with pytest.raises(InvalidRequestError, match="base_model='small': can only be sampled from"):
            backend.check_settings(settings())
        assert [model.trainable for model in backend.base_models] == [False]


@in_loop
async def test_bases_are_described(assets, tmp_path):
    drawn = Base.Config(name="drawn", seed=1)
    config = LocalBackend.Config(bases=(base_config(assets), drawn), device="cpu", cache=str(tmp_path))
    backend: LocalBackend = config.build()
    await backend.start()
    try:
        small, tiny = backend.base_models
        assert (small.name, small.architecture, small.max_context_length) == (NAME, "qwen3", 64)
        assert (tiny.name, tiny.max_context_length) == ("drawn", 1024)
        assert Path(tiny.tokenizer_folder).parent == tmp_path
        assert (Path(tiny.tokenizer_folder) / "tokenizer.json").is_file()
        # What is too long for one is not for the other.
        long = [datum([1] * 64)]
        with pytest.raises(
            InvalidRequestError, match=r"data\[0\].model_input: has shape \[64\]: must be 1 to 63"
        ):
            backend.check_data(settings(), long, CROSS_ENTROPY)
        backend.check_data(ModelSettings(base_model="drawn", lora=None), long, CROSS_ENTROPY)
    finally:
        await backend.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bases": ()}, "bases: has the names \\[\\]: must be at least one, each once"),
        ({"bases": (Base.Config(name="a"), Base.Config(name="a"))}, r"bases: has the names \['a', 'a'\]"),
        ({"num_threads": 0}, "num_threads=0: must be at least 1"),
        ({"max_sequences": 0}, "max_sequences=0: must be at least 1"),
        ({"gather_s": -1.0}, "gather_s=-1.0: must be a finite number of at least 0"),
        ({"training": TrainingConfig(cpu_offload=True)}, "training.cpu_offload=True: must be False"),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_field_and_value(options, says):
    with pytest.raises(ValueError, match=says):
        LocalBackend.Config(**options)


@pytest.mark.parametrize("name", ["", " a", "a\n"])
def test_a_bases_name_is_printable(name):
    with pytest.raises(ValueError, match="must be printable, not empty and without outer spaces"):
        Base.Config(name=name)


@in_loop
async def test_a_micro_batch_holds_the_longest_sequence(assets):
    config = LocalBackend.Config(
        bases=(base_config(assets),), training=TrainingConfig(max_tokens_per_microbatch=62), device="cpu"
    )
    backend: LocalBackend = config.build()
    with pytest.raises(ValueError, match="max_tokens_per_microbatch=62: must be at least 63, so that"):
        await backend.start()
    await backend.close()
