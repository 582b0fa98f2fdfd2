"""The backend in this process: numbers of training and sampling, files, and what is refused."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl.models import llama
from rl.models.decoder import FeedForward
from rl.models.lora import LoRA
from rl.tinker.local import LocalTinkerBackend
from rl.tinker.types import InvalidRequestError, UnsavedError
from rl.tinker.wire.datums import MIN_EPS
from rl.training.config import TrainingConfig
from rl.training.engine import TrainingEngine
from rl.training.models_by_id import check_config
from tests.tinker.parts import (
    NAME,
    PPO,
    add_gradient,
    assert_same_outputs,
    base_config,
    create,
    created,
    datum,
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
from tests.training.parts import spec_like

pytestmark = pytest.mark.anyio
DATA = random_data(5, seed=1)
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "tied"
    base_config(folder)
    return folder


@pytest.fixture
async def backend(assets: Path) -> AsyncIterator[LocalTinkerBackend]:
    started = local_backend(assets)
    await started.start()
    yield started
    await started.close()


def engine_of(backend: LocalTinkerBackend, model_id: str) -> Any:
    return backend._workers.models[model_id]  # type: ignore[union-attr]


def weights(backend: LocalTinkerBackend, model_id: str) -> dict[str, torch.Tensor]:
    trained = engine_of(backend, model_id).policy.trained_parameters
    return {name: parameter.detach().clone() for name, parameter in trained.items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# Training


async def test_lora_models_share_the_bases_memory_and_full_models_have_their_own(backend):
    for model_id, rank in (("a", 4), ("b", 2), ("full", 0)):
        await create(backend, model_id, settings(rank))
    own = {name: tensor.data_ptr() for name, tensor in backend._workers.models.frozen.items()}
    for model_id in ("a", "b"):
        parameters = engine_of(backend, model_id).policy.parameters
        assert {name: parameters[name].data_ptr() for name in own} == own
    full = {p.data_ptr() for p in engine_of(backend, "full").policy.parameters.values()}
    assert full.isdisjoint(own.values())


async def test_models_trained_at_once_have_the_bits_of_each_alone(backend):
    alone = [await created(backend, f"alone {rank}", rank=rank, steps=3) for rank in (4, 0)]
    for rank in (4, 0):
        await create(backend, f"both {rank}", settings(rank))
    both = await asyncio.gather(*(train(backend, f"both {rank}", steps=3) for rank in (4, 0)))
    for one, other in zip(alone, both, strict=True):
        assert_same_outputs(one, other, atol=0)


async def test_fresh_adapters_change_nothing_and_follow_their_seed(backend):
    torch.manual_seed(1)
    expected = torch.rand(1).item()
    torch.manual_seed(1)
    for model_id, made in (
        ("a", settings(seed=7)),
        ("b", settings(seed=7)),
        ("c", settings(seed=None)),
    ):
        await create(backend, model_id, made)
    assert torch.rand(1).item() == expected  # the process's own generator
    await create(backend, "full", settings(0))
    lora, full = [
        await add_gradient(backend, model_id, DATA, backward=False) for model_id in ("a", "full")
    ]
    assert_same_outputs([lora], [full])
    assert equal(weights(backend, "a"), weights(backend, "b"))
    assert not equal(weights(backend, "a"), weights(backend, "c"))


async def test_smallest_eps_leaves_parameters_without_a_gradient(backend):
    await create(backend, "m", settings())
    await add_gradient(backend, "m", DATA)
    before = weights(backend, "m")
    await step(backend, "m", learning_rate=0.1, eps=MIN_EPS)
    for name, tensor in weights(backend, "m").items():
        assert torch.isfinite(tensor).all(), name
        assert torch.equal(tensor, before[name]) == name.endswith("lora_a"), name


async def test_disk_that_refuses_a_model_is_told_and_the_model_trains_on(backend, tmp_path):
    await create(backend, "m", settings())
    with pytest.raises(UnsavedError, match=r"disk has refused it \(No such file or directory\)"):
        await save(backend, "m", tmp_path / "missing", optimizer=False)
    await train(backend, "m", steps=1)


async def test_loss_and_weights_that_are_not_finite_are_refused(backend):
    await create(backend, "m", settings())
    before = weights(backend, "m")
    huge = datum([1, 2], weights=[3e38, 3e38])
    await add_gradient(backend, "m", DATA)
    for backward in (True, False):
        with pytest.raises(InvalidRequestError, match=r"not a finite number .*is dropped"):
            await add_gradient(backend, "m", [huge], backward=backward)
    assert await step(backend, "m", weight_decay=0.0) == 0.0
    assert equal(before, weights(backend, "m"))
    await add_gradient(backend, "m", DATA)
    await step(backend, "m", learning_rate=1e30)
    with pytest.raises(InvalidRequestError, match="its weights have diverged"):
        await backend.publish("m")


# Files


@pytest.mark.parametrize("rank", [4, 0], ids=["lora", "all parameters"])
async def test_loaded_model_continues_with_the_same_bits(backend, tmp_path, rank):
    await created(backend, "m", rank=rank)
    await save(backend, "m", tmp_path, optimizer=True)
    expected = await train(backend, "m")
    await create(backend, "n", settings(rank, **({"seed": 99} if rank else {})))
    await add_gradient(backend, "n", DATA)  # Loading drops it.
    await load(backend, "n", tmp_path, optimizer=True)
    assert_same_outputs(await train(backend, "n"), expected, atol=0)
    await load(backend, "n", tmp_path, optimizer=False)
    states = engine_of(backend, "n").optimizer.state_tensors().values()
    assert all(tensor.count_nonzero() == 0 for state in states for tensor in state.values())
    assert not any("embed" in name for name in weights(backend, "m")) or rank == 0
    await create(backend, "other", settings(8, train_mlp=False))
    with pytest.raises(InvalidRequestError, match="the saved model's lora is"):
        await load(backend, "other", tmp_path, optimizer=True)


def truncate(content: bytes) -> bytes:
    return content[:-3]


def flip(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def edit(**change: Any) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps(json.loads(content) | change).encode()


async def test_damaged_file_is_named_and_the_model_stays(backend, tmp_path):
    await created(backend, "m", rank=2)
    before = weights(backend, "m")
    cases: tuple[tuple[str, Callable[[bytes], bytes] | None, str], ...] = (
        ("weights.safetensors", None, "file weights.safetensors is missing"),
        ("optimizer.safetensors", flip, "file optimizer.safetensors is damaged"),
        ("model.json", truncate, "file model.json is damaged"),
        ("model.json", edit(format=9), "the saved model's format is 9, but this model's is"),
        ("model.json", edit(base="x"), "the saved model's base is 'x'"),
        ("model.json", edit(files={}), r"has no weights\.safetensors: it was saved to sample from"),
    )
    for number, (name, damage, says) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        await save(backend, "m", folder, optimizer=True)
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        if damage is not None:
            (folder / name).write_bytes(damage(content))
        with pytest.raises(InvalidRequestError, match=says):
            await load(backend, "m", folder, optimizer=True)
    assert equal(before, weights(backend, "m"))


# Sampling


async def test_base_snapshot_and_saved_weights_are_sampled_from_at_once(backend, tmp_path):
    await create(backend, "m", settings())
    versions = [await backend.open(None, None), await backend.publish("m")]
    await train(backend, "m", steps=3)
    versions.append(await backend.publish("m"))
    await save(backend, "m", tmp_path, optimizer=False)
    versions.append(await open_saved(backend, settings(), tmp_path))
    pending = [asyncio.create_task(sampled(backend, version)) for version in versions * 2]
    await train(backend, "m")
    base, fresh, trained, saved, *again = [
        tokens_of(output) for output in await asyncio.gather(*pending)
    ]
    assert again == [base, fresh, trained, saved]
    assert base == fresh
    assert trained == saved != base
    for version in versions:
        await backend.forget(version)
    assert backend._workers.sampler.pushed == {}
    assert not backend._workers.sampler.model.bank.versions
    await sampled(backend, versions[0])  # the base stays


LLAMA = spec_like(llama, dim=36, head_dim=6, feed_forward=FeedForward.Config(hidden_dim=20))


@pytest.mark.parametrize(
    ("rank", "base"),
    [(4, {"tie": False}), (0, {"spec": LLAMA, "name": None})],
    ids=["lora of the head too", "all parameters, Llama, named by its folder"],
)
async def test_samples_have_the_bits_of_training_in_the_batch_invariant_mode(tmp_path, rank, base):
    backend = local_backend(tmp_path / "base", **base, batch_invariant=True)
    await backend.start()
    named = (backend.base_model.architecture, backend.base_model.name)
    assert named == (("llama", str(tmp_path / "base")) if "spec" in base else ("qwen3", NAME))
    await created(backend, "m", rank=rank)
    version = await backend.publish("m")
    base = backend.base_model
    vocab = base.vocab_size
    asked = [request(base, [5, 6, 7, n], num_samples=2, max_tokens=12, stop=()) for n in range(3)]
    outputs = await asyncio.gather(*(backend.sample(version, one) for one in asked))
    data = []
    for one, output in zip(asked, outputs, strict=True):
        for drawn in output.completions:
            whole = np.concatenate([one.prompt, drawn.token_ids]).tolist()
            logprobs = np.append(np.zeros(3), drawn.logprobs)
            data.append(datum(whole[:-1], whole[1:], logprobs=logprobs, advantages=logprobs != 0))
    found = await add_gradient(backend, "m", data, PPO)
    metrics = dict(found.metrics)
    assert metrics.pop("entropy:sum") > 0.0
    zeros = {"logprob_diff:max": 0.0, "logprob_diff:sum": 0.0, "num_clipped:sum": 0.0}
    assert metrics == {"loss:sum": -72.0, "num_tokens:sum": 72.0, **zeros}
    whole = np.append(data[0].tokens, data[0].loss_inputs["target_tokens"][-1])
    how = {"prompt_logprobs": True, "topk_prompt_logprobs": vocab, "max_tokens": 1}
    scored = (await backend.sample(version, request(base, whole.tolist(), **how))).of_prompt
    assert scored is not None
    assert np.array_equal(scored.logprobs[1:], found.logprobs[0])
    by_id = np.take_along_axis(scored.top_logprobs, np.argsort(scored.top_ids, axis=1), axis=1)
    assert np.array_equal(by_id[range(1, len(whole)), whole[1:]], found.logprobs[0])
    await backend.close()


async def test_samplers_of_several_snapshots_share_a_batch_with_the_bits_of_each_alone(tmp_path):
    """Different ranks and targets, a head with an adapter, and the base, in one forward."""
    backend = local_backend(tmp_path / "base", tie=False, batch_invariant=True)
    await backend.start()
    versions = [await backend.open(None, None)]
    for number, made in enumerate((settings(1), settings(8, train_mlp=False), settings(16))):
        await create(backend, f"m{number}", made)
        await train(backend, f"m{number}", steps=2, seed=number)
        versions.append(await backend.publish(f"m{number}"))
    how = {"temperature": 1.0, "seed": 4, "num_samples": 3, "max_tokens": 20}
    alone = [await sampled(backend, version, **how) for version in versions]

    groups: list[set[int]] = []
    workers: Any = backend._workers
    draw = workers._draw

    def note_and_draw(group: Any) -> None:
        groups.append(group.drawing.adapters)
        draw(group)

    workers._draw = note_and_draw
    together = await asyncio.gather(*(sampled(backend, version, **how) for version in versions))
    assert {len(adapters) for adapters in groups} == {4}
    for version, one, other in zip(versions, alone, together, strict=True):
        for mine, theirs in zip(one.completions, other.completions, strict=True):
            assert mine.token_ids.tobytes() == theirs.token_ids.tobytes()
            assert mine.logprobs.tobytes() == theirs.logprobs.tobytes()
            assert set(mine.policy_versions.tolist()) == {version}
    assert len({str(tokens_of(output)) for output in together}) == 4
    await backend.close()


async def test_requests_are_answered_together_without_changing_each_other(backend):
    version = await backend.open(None, None)
    base = backend.base_model
    mine = request(base, PROMPT, seed=11, num_samples=3)
    alone = tokens_of(await backend.sample(version, mine))
    all_ = [
        request(base, [9, 9], seed=4, num_samples=3, max_tokens=20),
        mine,
        request(base, PROMPT, seed=12, num_samples=3),
        request(base, PROMPT, seed=11, num_samples=3, temperature=0.5),
        mine,
    ]
    leaves = asyncio.create_task(
        backend.sample(version, request(base, [8], num_samples=3, max_tokens=60, stop=()))
    )
    groups = asyncio.gather(*(backend.sample(version, one) for one in all_))
    await asyncio.sleep(0.01)
    leaves.cancel()
    found = [tokens_of(output) for output in await groups]
    assert found[1] == found[4] == alone
    assert found[2] != alone != found[3]
    assert len(set(map(tuple, alone))) == 3


async def test_stop_texts_and_tokens_end_a_completion(backend):
    version = await backend.open(None, None)
    base = backend.base_model

    async def drawn(stop: object, reason: str = "stop") -> list[int]:
        (one,) = (
            await backend.sample(version, request(base, PROMPT, stop=stop, max_tokens=60))
        ).completions
        assert one.finish_reason == reason
        return one.token_ids.tolist()

    free = await drawn([], "length")
    # The tokens of ASCII letters are their bytes.
    at = next(i for i in range(60) if all(32 <= token < 127 for token in free[i : i + 2]))
    text = bytes(free[at : at + 2]).decode()
    assert await drawn(["no such text", text]) == free[: at + 2]
    assert await drawn([free[at]]) == free[: free.index(free[at]) + 1]


# Life and config


async def test_cancelled_call_is_never_made_and_closing_fails_the_rest(backend):
    for model_id in ("m", "n"):
        await create(backend, model_id, settings())
    version = await backend.open(None, None)
    training = asyncio.create_task(train(backend, "m"))
    calls = [asyncio.create_task(step(backend, "n")) for _ in range(3)]
    await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    await asyncio.wait([training, *calls])
    assert all(call.cancelled() for call in calls)
    assert engine_of(backend, "n").policy_version == 0
    waits = [asyncio.create_task(sampled(backend, version, max_tokens=50)) for _ in range(3)]
    await asyncio.sleep(0)
    await backend.close()
    await backend.close()
    for late in (*waits, step(backend, "m")):
        with pytest.raises(RuntimeError, match="closed"):
            await late


@pytest.mark.parametrize(
    ("training", "says"),
    [
        (
            TrainingConfig(max_tokens_per_microbatch=62),
            "max_tokens_per_microbatch=62: must be at least 63",
        ),
        (TrainingConfig(cpu_offload=True), r"training\.cpu_offload=True: must be False"),
    ],
)
def test_training_that_does_not_fit_is_refused_at_the_start(assets, training, says):
    config = dataclasses.replace(local_backend(assets).config, training=training)
    with pytest.raises(ValueError, match=says):
        asyncio.run(config.build().start())
    with pytest.raises(ValueError, match="converters: must be"):  # models have none in common
        check_config(TrainingEngine.Config(converters=(LoRA.Config(),)))
