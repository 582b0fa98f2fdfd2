"""What is saved of a model comes back bit by bit, and what is not whole is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rl.tinker.errors import InvalidRequestError
from rl.tinker.local.base import Base
from rl.tinker.local.models import open_saved
from tests.tinker.local.data_parts import random_data
from tests.tinker.local.local_parts import (
    CROSS_ENTROPY,
    equal,
    make_model,
    open_base,
    same,
    settings,
    train,
    weights,
)
from tests.training.parts import write_assets

DATA = random_data(5, seed=1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return open_base(tmp_path_factory.mktemp("base") / "tied")


def saved(base: Base, folder: Path, rank: int = 4) -> Path:
    folder.mkdir()
    model = make_model(base, rank)
    train(model, DATA)
    model.save_state(folder)
    return folder


@pytest.mark.parametrize("rank", [4, 0], ids=["lora", "all parameters"])
def test_a_model_that_is_loaded_goes_on_with_the_same_bits(base, tmp_path, rank):
    first = make_model(base, rank)
    train(first, DATA, steps=2)
    first.save_state(tmp_path)
    expected = train(first, DATA, steps=2)
    second = make_model(base, rank, seed=99)
    second.load_state(tmp_path, optimizer=True)
    assert same(train(second, DATA, steps=2), expected)
    assert equal(weights(first), weights(second))


def test_weights_alone_start_the_optimizer_anew(base, tmp_path):
    first = make_model(base)
    train(first, DATA, steps=2)
    first.save_state(tmp_path)
    second = make_model(base, seed=99)
    train(second, DATA)
    second.load_state(tmp_path, optimizer=False)
    assert equal(weights(first), weights(second))
    states = second.engine.optimizer.state_tensors().values()
    assert all(tensor.count_nonzero() == 0 for state in states for tensor in state.values())
    train(first, DATA)
    train(second, DATA)
    assert not equal(weights(first), weights(second))


def test_loading_drops_an_accumulated_gradient(base, tmp_path):
    folder = saved(base, tmp_path / "s")
    model = make_model(base)
    model.forward_backward(DATA, CROSS_ENTROPY, backward=True)
    model.load_state(folder, optimizer=True)
    assert all(p.grad is None for p in model.engine.policy.trained_parameters.values())


def test_a_state_before_any_step_continues_as_the_model_did(base, tmp_path):
    first = make_model(base)
    first.save_state(tmp_path)
    second = make_model(base, seed=99)
    second.load_state(tmp_path, optimizer=True)
    assert same(train(first, DATA, steps=2), train(second, DATA, steps=2))


def test_only_what_is_trained_is_written(base, tmp_path):
    lora, full = saved(base, tmp_path / "lora", 2), saved(base, tmp_path / "full", 0)
    sizes = [(folder / "weights.safetensors").stat().st_size for folder in (lora, full)]
    assert sizes[0] < sizes[1] / 4
    assert sorted(p.name for p in lora.iterdir()) == [
        "model.json",
        "optimizer.safetensors",
        "weights.safetensors",
    ]


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def other_format(file: Path) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 2}))


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("weights.safetensors", Path.unlink, "file weights.safetensors is missing"),
        ("optimizer.safetensors", Path.unlink, "file optimizer.safetensors is missing"),
        ("model.json", Path.unlink, "file model.json is missing"),
        ("weights.safetensors", truncate, "file weights.safetensors is damaged: it has"),
        ("optimizer.safetensors", flip, "file optimizer.safetensors is damaged: it has"),
        ("model.json", truncate, None),
        ("model.json", other_format, "file model.json has format 2; this version reads 1"),
    ],
)
def test_a_file_that_is_not_whole_is_named_and_the_model_stays(base, tmp_path, name, damage, says):
    folder = saved(base, tmp_path / "s")
    (folder / "model.json").write_text((folder / "model.json").read_text().rstrip("\n"))
    damage(folder / name)
    model = make_model(base)
    train(model, DATA)
    before = weights(model)
    with pytest.raises(InvalidRequestError, match=says or "file model.json is damaged"):
        model.load_state(folder, optimizer=True)
    assert equal(before, weights(model))


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        '{"format": 1}',
        '{"format": 1, "base_fingerprint": "", "lora": {"rank": 1, "x": 2}, "files": {}}',
    ],
)
def test_a_description_of_anything_else_is_damaged(base, tmp_path, content):
    (tmp_path / "model.json").write_text(content)
    with pytest.raises(InvalidRequestError, match=r"file model.json is damaged"):
        make_model(base).load_state(tmp_path, optimizer=False)


def test_a_model_with_other_settings_is_refused(base, tmp_path):
    folder = saved(base, tmp_path / "s")
    for other in (make_model(base, 8), make_model(base, 0), make_model(base, 4, train_mlp=False)):
        with pytest.raises(
            InvalidRequestError, match=r"the saved model has other settings: LoRASettings\(rank=4"
        ):
            other.load_state(folder, optimizer=True)
    # What has no effect does not matter: the head is the embedding.
    make_model(base, 4, train_unembed=False, seed=1).load_state(folder, optimizer=True)


def test_other_weights_of_the_base_are_found_out(base, tmp_path):
    folder = saved(base, tmp_path / "s")
    write_assets(tmp_path / "other")
    flip(tmp_path / "other" / "model.safetensors")
    other = open_base(tmp_path / "other")
    with pytest.raises(InvalidRequestError, match="was trained on other weights than base_model='small' has"):
        make_model(other).load_state(folder, optimizer=True)


@pytest.mark.parametrize("rank", [4, 0], ids=["lora", "all parameters"])
def test_a_saved_sampler_has_the_weights_and_no_optimizer(base, tmp_path, rank):
    model = make_model(base, rank)
    train(model, DATA)
    model.save_sampler(tmp_path)
    opened = open_saved(base, settings(rank), tmp_path)
    assert equal(dict(opened.trained), weights(model))
    with pytest.raises(
        InvalidRequestError, match=r"has no optimizer.safetensors: its weights were saved to sam"
    ):
        make_model(base, rank).load_state(tmp_path, optimizer=True)
    truncate(tmp_path / "weights.safetensors")
    with pytest.raises(InvalidRequestError, match=r"file weights.safetensors is damaged"):
        open_saved(base, settings(rank), tmp_path)


def test_a_snapshot_stays_as_it_was_while_its_model_trains_on(base):
    model = make_model(base)
    train(model, DATA)
    snapshot = model.snapshot()
    before = {name: tensor.clone() for name, tensor in snapshot.trained.items()}
    train(model, DATA)
    assert equal(before, dict(snapshot.trained))
    assert not equal(before, weights(model))
    assert {t.dtype for t in before.values()} == {torch.float32}
