"""A push of the weights goes on while the engine computes, and what changes weights waits for it."""

import asyncio
import os
import signal

import numpy as np
import pytest
import torch

from actors.trainer import PolicyTrainer, PushGate
from losses.cross_entropy import CrossEntropyLoss
from rl.models.tokenizer import build_byte_tokenizer
from rl.types import TrainingSample
from rl.weights.errors import WeightTimeoutError
from rl.weights.files import FileWeightStore
from rl.weights.store import WeightStore
from tests.support.monarch_meshes import monarch_meshes
from tests.support.policies import VOCAB_SIZE, model_folder, random_model, small_spec

SAMPLE = TrainingSample(
    token_ids=np.arange(12, dtype=np.int32) % VOCAB_SIZE,
    mask=np.arange(12) > 3,
    advantages=np.ones(12, dtype=np.float32),
    generator_logprobs=np.zeros(12, dtype=np.float32),
    policy_versions=np.zeros(12, dtype=np.int32),
)


@pytest.mark.medium
@pytest.mark.timeout(180)
def test_a_push_overlaps_gradients_and_delivers_the_version_from_before_the_step(tmp_path):
    """The index of the store stands still while the push asks it; so the push lasts until it goes on."""
    spec = small_spec()
    model = random_model(spec, seed=0)
    assets = model_folder(tmp_path / "hf", spec, model)
    build_byte_tokenizer(assets)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    async def main(meshes_trainer, store_pid):
        trainer = meshes_trainer
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

    with monarch_meshes() as meshes:
        run = meshes.run
        trainer_mesh, store_mesh = meshes.spawn_mesh(1), meshes.spawn_mesh(1, process_group=False)
        store = WeightStore.Config(timeout_s=60).build(dtype="float32")
        run(store.start(store_mesh))
        trainer = trainer_mesh.spawn(
            "policy_trainer",
            PolicyTrainer,
            config=PolicyTrainer.Config(),
            model_spec=spec,
            store=store,
            failure_folder=str(tmp_path),
        )
        run(trainer.setup.call(assets))
        (pid,) = meshes.pids(store_mesh)
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        try:
            run(main(trainer, pid))
        finally:
            os.kill(pid, signal.SIGCONT)
        run(trainer.push_model_state_dict.call())
        received = {name: torch.zeros_like(p) for name, p in before.items()}
        for version in (0, 1):
            run(store.announce(version))
            run(store.pull(version=version, state_dict=received))
            is_old = [torch.equal(received[name], old) for name, old in before.items()]
            assert all(is_old) if version == 0 else not any(is_old)
        run(trainer.close.call())
        meshes.stop(trainer_mesh)

        # Through files the ranks meet in a push, so the engine's thread makes it.
        files = FileWeightStore(config=FileWeightStore.Config(), folder=tmp_path / "weights")
        trainer_mesh = meshes.spawn_mesh(1)
        run(files.start(trainer_mesh))
        trainer = trainer_mesh.spawn(
            "policy_trainer",
            PolicyTrainer,
            config=PolicyTrainer.Config(),
            model_spec=spec,
            store=files,
            failure_folder=str(tmp_path),
        )
        run(trainer.setup.call(assets))
        run(trainer.push_model_state_dict.call())
        run(files.announce(0))
        run(files.pull(version=0, state_dict=received))
        assert all(torch.equal(received[name], old) for name, old in before.items())
        run(trainer.close.call())
        run(files.stop())


async def _call(awaitable):
    return await awaitable


def test_a_push_that_does_not_end_is_an_error_of_what_waits_for_it():
    gate = PushGate(timeout_s=0.01, margin_s=0.01)
    gate.wait()
    gate.begin()
    with pytest.raises(WeightTimeoutError, match=r"a push of them did not end within 0\.01 s"):
        gate.wait()
    gate.end()
    gate.wait()
