"""Pushes overlap computation, and changes of the weights wait for them."""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from actors.trainer import PolicyTrainer
from losses.cross_entropy import CrossEntropyLoss
from rl.distributed.process_group import World
from rl.models.files.tokenizer import build_byte_tokenizer
from rl.models.lora import LoRA
from rl.training.config import ReferenceConfig
from rl.training.engine import TrainingEngine
from rl.types import TrainingSample
from rl.utils.processes import use_threads
from rl.weights.store import WeightStore
from tests.support.monarch_meshes import monarch_meshes
from tests.support.policies import VOCAB_SIZE, model_folder, random_model, small_spec

SPEC = small_spec()
SAMPLE = TrainingSample(
    token_ids=np.arange(12, dtype=np.int32) % VOCAB_SIZE,
    mask=np.arange(12) > 3,
    advantages=np.ones(12, dtype=np.float32),
    generator_logprobs=np.zeros(12, dtype=np.float32),
    policy_versions=np.zeros(12, dtype=np.int32),
)


@pytest.fixture(scope="module")
def meshes():
    with monarch_meshes() as meshes:
        yield meshes


@pytest.fixture
def assets(tmp_path):
    """A Hugging Face folder, and its tensors by the trainer's names."""
    model = random_model(SPEC, seed=0)
    folder = model_folder(tmp_path / "hf", SPEC, model)
    build_byte_tokenizer(folder)
    return folder, {name: p.detach().clone() for name, p in model.named_parameters()}


def spawn_trainer(meshes, mesh, *, store, folder, assets, num_procs=1, converters=()):
    """Return a trainer after its set-up."""
    trainer = mesh.spawn(
        "policy_trainer",
        PolicyTrainer,
        config=PolicyTrainer.Config(
            num_procs=num_procs,
            converters=converters,
            reference=ReferenceConfig(enable=True),
        ),
        model_spec=SPEC,
        store=store,
        failure_folder=str(folder),
    )
    meshes.run(trainer.setup.call(assets))
    return trainer


def are_old(meshes, store, before, shards):
    """Announce and pull a version; return for each tensor whether it equals the one in `before`."""
    received = {name: torch.zeros_like(p) for name, p in before.items()}
    meshes.run(store.pull(store.announce(shards), state_dict=received))
    return [torch.equal(received[name], old) for name, old in before.items()]


async def push_while_the_store_is_stopped(trainer, store_pid):
    push = asyncio.ensure_future(_call(trainer.push_model_state_dict.call_one()))
    gradient = await _call(trainer.forward_backward.call_one([SAMPLE], loss=CrossEntropyLoss()))
    assert gradient.num_samples == 1
    logprobs = await _call(trainer.compute_logprobs.call_one([SAMPLE]))
    assert logprobs[0].shape == (12,)
    step = asyncio.ensure_future(_call(trainer.optim_step.call_one()))
    after = asyncio.ensure_future(_call(trainer.compute_logprobs.call_one([SAMPLE])))
    done, _ = await asyncio.wait({push, step, after}, timeout=1.0)
    assert not done, "the step was made, or the push was over, while the store stood still"
    os.kill(store_pid, signal.SIGCONT)
    shard = await push
    assert shard.version == 0
    assert (await step).policy_version == 1
    assert not np.array_equal((await after)[0], logprobs[0])
    of_reference = await _call(trainer.compute_reference_logprobs.call_one([SAMPLE]))
    assert np.array_equal(of_reference[0], logprobs[0])
    return shard


@pytest.mark.medium
@pytest.mark.timeout(180)
def test_push_overlaps_gradients_and_delivers_the_version_before_the_step(meshes, assets, tmp_path):
    """The stopped volume of the store keeps the push waiting until it continues."""
    folder, before = assets
    trainer_mesh, store_mesh = meshes.spawn_mesh(1), meshes.spawn_mesh(1, process_group=False)
    store = WeightStore.Config(timeout_s=60).build(dtype="float32")
    meshes.run(store.start(store_mesh))
    trainer = spawn_trainer(meshes, trainer_mesh, store=store, folder=tmp_path, assets=folder)
    (pid,) = meshes.pids(store_mesh)
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    try:
        first = meshes.run(push_while_the_store_is_stopped(trainer, pid))
    finally:
        os.kill(pid, signal.SIGCONT)
    second = meshes.run(trainer.push_model_state_dict.call_one())
    assert all(are_old(meshes, store, before, [first]))
    assert not any(are_old(meshes, store, before, [second]))
    meshes.run(trainer.close.call())


@pytest.mark.medium
@pytest.mark.timeout(180)
def test_two_ranks_push_to_files_and_answer_once(meshes, assets, tmp_path):
    """One rank returns logprobs and measures its machine; a step may be empty; adapters that are
    merged are at first zero.
    """
    folder, before = assets
    store = WeightStore.Config(transport="files").build(run_folder=tmp_path)
    mesh = meshes.spawn_mesh(2)
    meshes.run(store.start(mesh))
    trainer = spawn_trainer(
        meshes,
        mesh,
        store=store,
        folder=tmp_path,
        assets=folder,
        num_procs=2,
        converters=(LoRA.Config(rank=4, merge=True),),
    )

    def all_ranks(endpoint, *args, **options):
        return [result for _, result in meshes.run(endpoint.call(*args, **options)).items()]

    shards = all_ranks(trainer.push_model_state_dict)
    assert all(are_old(meshes, store, before, shards))
    assert [shard.merge_lost for shard in shards] == [0.0, 0.0]
    limits, nothing = all_ranks(trainer.measure_machine, "float32", 1 << 20)
    assert nothing is None
    assert limits.flops_per_s > 1e9
    assert limits.host_bytes_per_s == limits.memory_bytes_per_s > 1e8

    samples = [replace(SAMPLE, token_ids=np.roll(SAMPLE.token_ids, n)) for n in range(3)]
    expected = all_ranks(trainer.compute_logprobs, samples)[0]
    loss = CrossEntropyLoss()
    result, nothing = all_ranks(trainer.forward_backward, samples, loss=loss, return_logprobs=True)
    measured, _ = all_ranks(trainer.forward, samples, loss=loss)
    assert nothing is None
    assert measured.loss_sum == result.loss_sum
    for found in (result, measured):
        assert all(np.array_equal(a, b) for a, b in zip(found.logprobs, expected, strict=True))
    all_ranks(trainer.drop_gradient)
    step, _ = all_ranks(trainer.optim_step, allow_empty=True)
    assert (step.grad_norm, step.policy_version) == (0.0, 1)

    all_ranks(trainer.forward_backward, samples, loss=loss)
    all_ranks(trainer.optim_step)
    first, second = all_ranks(trainer.push_model_state_dict)
    # The store's dtype is float32.
    assert 0.0 < first.merge_lost == second.merge_lost < 1e-3
    meshes.run(trainer.close.call())
    meshes.run(store.stop())


async def _call(awaitable):
    return await awaitable


# A rank beside others waits for them: its tokens a second are not its own.
@pytest.mark.parametrize(("num_procs", "amount"), [(1, 12), (2, 0)])
def test_gradients_follow_the_load_and_steps_of_the_optimizer_do_not(
    monkeypatch, num_procs, amount
):
    spec = replace(SPEC, batch_invariant=True)
    config = PolicyTrainer.Config(num_threads=2, num_procs=num_procs)
    trainer = PolicyTrainer(config=config, model_spec=spec, store=WeightStore.Config().build())
    trainer._threads = trainer._make_threads(World())
    assert trainer._threads._follows
    trainer._threads._choice.count = 1
    before = torch.get_num_threads()

    engine, samples = Mock(), [Mock(token_ids=range(5)), Mock(token_ids=range(7))]
    methods: dict[Callable[..., Any], int] = {
        TrainingEngine.forward_backward: 1,
        TrainingEngine.forward: 1,
        TrainingEngine.compute_logprobs: 1,
        TrainingEngine.optim_step: 2,
    }
    for method in methods:
        setattr(engine, method.__name__, lambda _: torch.get_num_threads())
    trainer._rank = 0
    monkeypatch.setattr(trainer, "find_engine", lambda _: engine)

    async def call():
        await trainer._compute(use_threads, 2)
        return [await trainer.call_engine(method, samples, model_id="") for method in methods]

    try:
        assert asyncio.run(call()) == list(methods.values())
        # Those of the first call; the others take other times for a token.
        assert trainer._threads._window.amount == amount
    finally:
        assert trainer._thread.stop(timeout_s=10.0)
        use_threads(before)


@pytest.mark.parametrize(
    ("changes", "invariant"),
    [
        ({}, False),
        ({"follow_load": False}, True),
        ({"num_threads": 1}, True),
        ({"converters": (LoRA.Config(),)}, True),
    ],
)
def test_trainer_keeps_its_threads_where_bits_might_change(changes, invariant):
    config = PolicyTrainer.Config(**{"num_threads": 2} | changes)
    spec = replace(SPEC, batch_invariant=invariant)
    trainer = PolicyTrainer(config=config, model_spec=spec, store=WeightStore.Config().build())
    try:
        assert not trainer._make_threads(World())._follows
    finally:
        assert trainer._thread.stop(timeout_s=10.0)
