"""What a checkpoint must hold to be loaded; the same question is asked of a model without memory before a run
starts (`tests/actors/test_checks.py`)."""

import dataclasses
import json
import shutil
from typing import Any

import pytest
import torch

from rl.models.converters.lora import LoRA
from rl.training.checkpoint_files import (
    MANIFEST,
    STATE,
    SavedState,
    read_state,
    sum_of_file,
    write_description,
)
from rl.training.optimizer import Optimizer
from tests.training.parts import engine_config, make_samples, small_spec, write_assets

SAMPLES = make_samples()
SETTINGS: dict[str, Any] = {"rank": 2, "alpha": 4.0, "target_modules": ("q_proj", "v_proj")}


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return write_assets(tmp_path_factory.mktemp("assets") / "model")


def make(assets, *converters, optimizer=None):
    config = engine_config()
    config.converters = converters
    config.optimizer = optimizer or config.optimizer
    return config.build(model_spec=small_spec(), hf_assets_path=assets, device="cpu")


def with_lora(assets, **settings):
    return make(assets, LoRA.Config(**(SETTINGS | settings)))


def step(engine):
    engine.forward_backward(SAMPLES)
    engine.optim_step()


@pytest.fixture(scope="module")
def saved(assets, tmp_path_factory):
    """Checkpoints after a step: without converters, with LoRA, and with Muon."""
    folder = tmp_path_factory.mktemp("saved")
    engines = {
        "plain": make(assets),
        "lora": with_lora(assets),
        "muon": make(assets, optimizer=Optimizer.Config(name="Muon", lr=1e-3)),
    }
    for name, engine in engines.items():
        step(engine)
        engine.save_checkpoint(str(folder / name))
    return folder


def copy_of_older_version(folder, copy):
    """As a version saved that noted nothing of converters."""
    shutil.copytree(folder, copy)
    content = json.loads((copy / STATE).read_text())
    manifest = json.loads((copy / MANIFEST).read_text())
    del content["converters"], content["base_model"]
    (copy / STATE).write_text(json.dumps(content))
    manifest["files"][STATE] = dataclasses.asdict(sum_of_file(copy / STATE))
    (copy / MANIFEST).write_text(json.dumps(manifest))
    return copy


def refused(engine, folder, **options):
    before = {name: p.detach().clone() for name, p in engine.policy.parameters.items()}
    with pytest.raises(ValueError) as error:  # noqa: PT011
        engine.load_checkpoint(str(folder), **options)
    for name, parameter in engine.policy.parameters.items():
        assert torch.equal(parameter, before[name]), name
    return str(error.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"alpha": 64.0}, "was made with LoRA.alpha=4.0, this run has 64.0"),
        # q, k and v are one weight, whose factors have the same shapes.
        (
            {"target_modules": ("q_proj", "k_proj")},
            "was made with LoRA.target_modules=['q_proj', 'v_proj'], this run has ['k_proj', 'q_proj']",
        ),
        (
            {"rank": 3, "alpha": 6.0},
            "was made with LoRA.rank=2, this run has 3, LoRA.alpha=4.0, this run has",
        ),
    ],
)
def test_adapters_of_other_settings_are_refused_by_field(assets, saved, settings, says):
    for options in ({}, {"model_only": True}):
        assert says in refused(with_lora(assets, **settings), saved / "lora", **options)


def test_the_order_of_targets_and_the_first_values_do_not_matter(assets, saved):
    engine = with_lora(assets, target_modules=("v_proj", "q_proj"), seed=7)
    assert engine.load_checkpoint(str(saved / "lora")) == 1


def test_adapters_without_lora_and_the_other_way_round_are_refused_by_what_is_missing(assets, saved):
    says = refused(make(assets), saved / "lora")
    assert (
        "was made with LoRA (rank=2, alpha=4.0, target_modules=['q_proj', 'v_proj'], unembedding=False), "
        "this run has no converter that adds weights; tensor model.layers.0.attention.qkv_proj_lora.lora_a "
        "has no place in the model, its shape is [4, 36]; give the run the same converters, or start from"
        in says
    )
    says = refused(with_lora(assets), saved / "plain", model_only=True)
    assert "was made with no converter that adds weights, this run has LoRA (rank=2" in says
    assert "qkv_proj_lora.lora_a is missing, the model needs it of shape [4, 36]" in says


def test_adapters_can_be_excluded_on_either_side(assets, saved):
    plain = make(assets)
    plain.load_checkpoint(str(saved / "plain"), model_only=True)
    lora = with_lora(assets)
    lora.load_checkpoint(str(saved / "plain"), model_only=True, exclude=["model.*_lora.*"])
    for name, weight in plain.model_state_dict().items():
        assert torch.equal(lora.model_state_dict()[name], weight), name  # the fresh product is zero
    plain.load_checkpoint(str(saved / "lora"), model_only=True, exclude=["model.*_lora.*"])
    frozen = make(assets).model_state_dict()
    assert all(torch.equal(weight, frozen[name]) for name, weight in plain.model_state_dict().items())


def test_an_older_checkpoint_loads_where_there_is_no_such_converter(assets, saved, tmp_path):
    plain, lora = (copy_of_older_version(saved / name, tmp_path / name) for name in ("plain", "lora"))
    assert make(assets).load_checkpoint(str(plain)) == 1
    says = refused(with_lora(assets), lora)
    assert "does not say with which converters it was made, this run has LoRA (rank=2" in says


def test_another_optimizers_state_is_refused_by_its_name_and_can_be_left_out(assets, saved):
    says = refused(make(assets), saved / "muon")
    assert "tensor optimizer.layers.0.attention.qkv_proj.weight.step is missing" in says
    assert "it was made with Muon, this run has Adam or AdamW" in says
    assert "or add optimizer to exclude_from_loading, and its state starts anew" in says
    muon = make(assets, optimizer=Optimizer.Config(name="Muon", lr=1e-3))
    says = refused(muon, saved / "plain")
    assert "qkv_proj.weight.momentum_buffer is missing, the model needs it of shape [48, 36]" in says
    assert "it was made with Adam or AdamW, this run has Muon" in says
    assert muon.load_checkpoint(str(saved / "plain"), exclude=["optimizer"]) == 1


def test_the_same_optimizer_of_other_parameters_is_told_apart(assets, saved):
    engine = make(assets)
    engine.policy.parameters["norm.weight"].requires_grad_(False)
    says = refused(engine, saved / "plain")
    assert (
        "tensor optimizer.norm.weight.step has no place in the model, its shape is []: Adam or AdamW" in says
    )
    assert "stepped other parameters than this run's does" in says


def test_what_converters_were_is_a_dictionary_or_the_file_is_named(tmp_path):
    state = SavedState(policy_version=1, model_only=False, position=None, converters={"LoRA": {"rank": 2}})
    write_description(tmp_path, state, {})
    assert read_state(tmp_path) == state
    content = json.loads((tmp_path / STATE).read_text())
    for wrong in (["LoRA"], {"LoRA": 3}):
        (tmp_path / STATE).write_text(json.dumps(content | {"converters": wrong}))
        with pytest.raises(ValueError, match=r"state\.json is corrupted"):
            read_state(tmp_path)
