"""Buffers of the trainer's model on their way through a store that casts parameters."""

from __future__ import annotations

import pytest
import torch

from actors.trainer import PolicyTrainer
from rl.models.tokenizer import build_byte_tokenizer
from tests.support.policies import ROUTE_BIAS, biased_spec, model_folder, random_model

pytestmark = [pytest.mark.medium, pytest.mark.timeout(180)]


def test_trainer_pushes_parameters_in_the_generators_dtype_and_buffers_in_their_own(cluster, tmp_path):
    run, spec = cluster.meshes.run, biased_spec()
    model = random_model(spec, seed=0)
    assets = model_folder(tmp_path / "hf", spec, model)
    build_byte_tokenizer(assets)
    mesh = cluster.meshes.spawn_mesh(1)
    store = cluster.start(mesh, dtype="bfloat16")
    trainer = mesh.spawn(
        "policy_trainer",
        PolicyTrainer,
        config=PolicyTrainer.Config(),
        model_spec=spec,
        store=store,
        failure_folder=str(tmp_path),
    )
    run(trainer.setup.call(assets))
    run(trainer.push_model_state_dict.call())
    run(store.announce(0))
    received = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    received["route_bias"] = torch.zeros(3)
    run(store.pull(version=0, state_dict=received))
    assert received.pop("route_bias").tolist() == list(ROUTE_BIAS)
    for name, parameter in model.named_parameters():
        assert torch.equal(received[name], parameter.detach().bfloat16().float()), name
    run(trainer.close.call())
    cluster.meshes.stop(mesh)
