"""A push of the weights goes on while the engine computes, and what changes weights waits for it."""

import asyncio
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.trainer import PolicyTrainer, PushGate
from losses.cross_entropy import CrossEntropyLoss
from rl.machine_limits import Workload
from rl.models.tokenizer import build_byte_tokenizer
from rl.observability.spans import read_spans
from rl.training.reference import ReferenceConfig
from rl.types import TrainingSample
from rl.weights.errors import WeightTimeoutError
from rl.weights.files import FileWeightStore
from rl.weights.store import WeightStore
from tests.support.kept_spans import kept_spans
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


def spawn_trainer(meshes, mesh, *, store, folder, assets):
    """A trainer of one rank, set up."""
    trainer = mesh.spawn(
        "policy_trainer",
        PolicyTrainer,
        config=PolicyTrainer.Config(reference=ReferenceConfig(enable=True)),
        model_spec=SPEC,
        store=store,
        failure_folder=str(folder),
    )
    meshes.run(trainer.setup.call(assets))
    return trainer


def are_old(meshes, store, before, *, version):
    """Of each tensor of the version, which is announced here, whether it is the one from before."""
    received = {name: torch.zeros_like(p) for name, p in before.items()}
    meshes.run(store.announce(version))
    meshes.run(store.pull(version=version, state_dict=received))
    return [torch.equal(received[name], old) for name, old in before.items()]


async def push_while_the_store_stands_still(trainer, store_pid):
    push = asyncio.ensure_future(_call(trainer.push_model_state_dict.call_one()))
    gradient = await _call(trainer.forward_backward.call_one([SAMPLE], CrossEntropyLoss()))
    assert gradient.num_samples == 1
    logprobs = await _call(trainer.compute_logprobs.call_one([SAMPLE]))
    assert logprobs[0].shape == (12,)
    step = asyncio.ensure_future(_call(trainer.optim_step.call_one()))
    after = asyncio.ensure_future(_call(trainer.compute_logprobs.call_one([SAMPLE])))
    done, _ = await asyncio.wait({push, step, after}, timeout=1.0)
    assert not done, "the step was made, or the push was over, while the store stood still"
    os.kill(store_pid, signal.SIGCONT)
    assert (await push).policy_version == 0
    assert (await step).policy_version == 1
    assert not np.array_equal((await after)[0], logprobs[0])
    of_reference = await _call(trainer.compute_reference_logprobs.call_one([SAMPLE]))
    assert np.array_equal(of_reference[0], logprobs[0])


@pytest.mark.medium
@pytest.mark.timeout(180)
def test_a_push_overlaps_gradients_and_delivers_the_version_from_before_the_step(meshes, assets, tmp_path):
    """The index of the store stands still while the push asks it; so the push lasts until it goes on."""
    folder, before = assets
    trainer_mesh, store_mesh = meshes.spawn_mesh(1), meshes.spawn_mesh(1, process_group=False)
    store = WeightStore.Config(timeout_s=60).build(dtype="float32")
    meshes.run(store.start(store_mesh))
    trainer = spawn_trainer(meshes, trainer_mesh, store=store, folder=tmp_path, assets=folder)
    (pid,) = meshes.pids(store_mesh)
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    try:
        meshes.run(push_while_the_store_stands_still(trainer, pid))
    finally:
        os.kill(pid, signal.SIGCONT)
    meshes.run(trainer.push_model_state_dict.call())
    assert all(are_old(meshes, store, before, version=0))
    assert not any(are_old(meshes, store, before, version=1))
    meshes.run(trainer.close.call())


@pytest.mark.medium
@pytest.mark.timeout(180)
def test_through_files_where_ranks_meet_in_a_push_the_engines_thread_makes_it(meshes, assets, tmp_path):
    folder, before = assets
    store = FileWeightStore(config=FileWeightStore.Config(), folder=tmp_path / "weights")
    mesh = meshes.spawn_mesh(1)
    meshes.run(store.start(mesh))
    trainer = spawn_trainer(meshes, mesh, store=store, folder=tmp_path, assets=folder)
    meshes.run(trainer.push_model_state_dict.call())
    assert all(are_old(meshes, store, before, version=0))
    meshes.run(trainer.close.call())
    meshes.run(store.stop())


@pytest.mark.medium
@pytest.mark.timeout(180)
def test_logprobs_come_with_the_loss_from_one_rank_and_a_step_may_be_empty(meshes, assets, tmp_path):
    folder, _ = assets
    store = FileWeightStore(config=FileWeightStore.Config(), folder=tmp_path / "weights")
    mesh = meshes.spawn_mesh(2)
    meshes.run(store.start(mesh))
    trainer = spawn_trainer(meshes, mesh, store=store, folder=tmp_path, assets=folder)

    def all_ranks(endpoint, *args):
        return [result for _, result in meshes.run(endpoint.call(*args)).items()]

    samples = [replace(SAMPLE, token_ids=np.roll(SAMPLE.token_ids, n)) for n in range(3)]
    expected = all_ranks(trainer.compute_logprobs, samples)[0]
    results = all_ranks(trainer.forward_backward, samples, CrossEntropyLoss(), True)
    measured = all_ranks(trainer.forward, samples, CrossEntropyLoss())
    assert [r.loss_sum for r in (*results, *measured)] == [results[0].loss_sum] * 4
    for first, other in (results, measured):
        assert all(np.array_equal(a, b) for a, b in zip(first.logprobs, expected, strict=True))
        assert other.logprobs is None
    all_ranks(trainer.drop_gradient)
    steps = all_ranks(trainer.optim_step, None, True)
    assert [(step.grad_norm, step.policy_version) for step in steps] == [(0.0, 1)] * 2
    meshes.run(trainer.close.call())
    meshes.run(store.stop())


async def _call(awaitable):
    return await awaitable


def test_a_push_that_does_not_end_is_an_error_of_what_waits_for_it(tmp_path):
    gate = PushGate(timeout_s=0.01, margin_s=0.01)
    gate.wait()
    gate.begin()
    with (
        kept_spans(tmp_path),
        pytest.raises(WeightTimeoutError, match=r"a push of them did not end within 0\.01 s"),
    ):
        gate.wait()
    gate.end()
    gate.wait()
    (span,) = read_spans(tmp_path)  # where there is no push nobody waits
    assert (span.name, span.kind) == ("waits for a push", "wait")
    assert 0.02 <= span.duration_s < 10


@pytest.mark.medium
@pytest.mark.timeout(180)
def test_rank_0_says_what_its_machine_can_do_with_the_threads_that_compute(meshes, assets, tmp_path):
    folder, _ = assets
    store = FileWeightStore(config=FileWeightStore.Config(), folder=tmp_path / "weights")
    mesh = meshes.spawn_mesh(2)
    meshes.run(store.start(mesh))
    trainer = spawn_trainer(meshes, mesh, store=store, folder=tmp_path, assets=folder)
    workload = Workload(dtype="float32", num_bytes=1 << 20)

    def ask():
        answers = meshes.run(trainer.measure_machine.call(workload, str(tmp_path / "cache")))
        return [answer for _, answer in answers.items()]

    limits, nothing = ask()
    assert nothing is None
    assert limits.flops_per_s > 1e9
    assert limits.host_bytes_per_s == limits.memory_bytes_per_s > 1e8
    if limits.file:  # else the machine was busy
        assert json.loads(Path(limits.file).read_text())["of"]["threads"] == 1
        assert ask() == [limits, None]
    meshes.run(trainer.close.call())
    meshes.run(store.stop())
