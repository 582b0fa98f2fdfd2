"""Checkpoints from elsewhere: nothing in them runs, and what they hold besides tensors is refused
in one line.
"""

import json
import os
import pickle
import re
import shutil
from dataclasses import replace
from random import gauss
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from actors.preflight.checks import check_source
from configs.sum_digits import tiny
from rl.models.files.hf import write_random_model
from rl.models.qwen3 import model_registry
from rl.starting_point import describe_random_model
from rl.training.checkpoints.config import CheckpointConfig, find_load_source
from rl.training.checkpoints.files import (
    METADATA,
    DamagedCheckpointError,
    check_files,
    is_checkpoint,
    read_state,
    sum_of_file,
    write_description,
)
from rl.training.checkpoints.metadata import read_saved_tensors
from rl.training.checkpoints.tensors import select_own_exclusions
from rl.utils.processes import seed_everything
from tests.training.parts import make_engine, step, weights, write_assets


class Attack:
    """Object that makes a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return an engine after a step, and its checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    engine = make_engine(write_assets(folder / "assets"))
    step(engine)
    engine.save_checkpoint(str(folder / "saved"))
    return engine, folder / "saved"


@pytest.fixture
def received(trained, tmp_path):
    """Return a copy of the checkpoint."""
    return shutil.copytree(trained[1], tmp_path / "received")


def replace_file(folder, name, content):
    """Write a file of a checkpoint and list it, as somebody does who wants it to be read."""
    (folder / name).write_bytes(content)
    describe(folder)


def describe(folder):
    names = [
        file.name for file in folder.iterdir() if file.name not in ("manifest.json", "state.json")
    ]
    write_description(
        folder, read_state(folder), {name: sum_of_file(folder / name) for name in names}
    )


def assert_refused(folder, message, *, kind=ValueError, **options):
    engine = make_engine(None)
    before = weights(engine)
    with pytest.raises(kind, match=message) as refused:
        engine.load_checkpoint(str(folder), **options)
    assert "\n" not in str(refused.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(engine).items())


# The file of names


def text(value):
    """Return a text as a pickle has it."""
    return b"\x8c" + bytes([len(value)]) + value.encode()


def test_pickle_in_place_of_the_metadata_does_not_run(received, tmp_path):
    replace_file(received, METADATA, pickle.dumps(Attack(tmp_path / "mark")))
    message = (
        rf"checkpoint file {received}/\.metadata names 'posix\.mkdir', which a checkpoint "
        r"has no use for"
    )
    for model_only in (False, True):
        assert_refused(received, message, model_only=model_only)
    assert not (tmp_path / "mark").exists()


def test_controller_refuses_a_pickle_before_a_run_starts(received, tmp_path):
    replace_file(received, METADATA, pickle.dumps(Attack(tmp_path / "mark")))
    config = tiny()
    config.trainer.checkpoint = CheckpointConfig(initial_load_path=str(received))
    source = find_load_source(config.trainer.checkpoint)
    start = describe_random_model(tmp_path, spec=model_registry("tiny"), seed=0)
    with pytest.raises(ValueError, match=r"\.metadata names 'posix\.mkdir'"):
        check_source(source, start=start, trainer=config.trainer, num_steps=80, on_gpu=False)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"), ("builtins", "getattr"), ("os", "system"), ("torch", "load"),
        ("torch", "Tensor"),
        ("torch.serialization", "load"), ("functools", "partial"), ("torch", "Size.__new__"),
        ("io", "open"),
        ("torch.distributed.checkpoint.metadata", "os"),
        ("torch.distributed.checkpoint.filesystem", "pickle.loads"),
        ("pathlib", "Path"),
    ],
)  # fmt: skip
def test_metadata_may_name_the_classes_of_a_checkpoint_only(tmp_path, module, name):
    (tmp_path / METADATA).write_bytes(b"\x80\x04" + text(module) + text(name) + b"\x93.")
    with pytest.raises(ValueError, match=rf"\.metadata names '{re.escape(f'{module}.{name}')}'"):
        read_saved_tensors(tmp_path)


@pytest.mark.parametrize("field", ["__setstate__", "__init__", "fields"])
def test_metadata_cannot_change_the_classes_that_read_it(tmp_path, trained, field):
    # BUILD on a class: sets attributes of the class itself.
    module = "torch.distributed.checkpoint.metadata"
    state = b"N}" + text(field) + text("x") + b"s\x86"
    (tmp_path / METADATA).write_bytes(
        b"\x80\x04" + text(module) + text("Metadata") + b"\x93" + state + b"b."
    )
    with pytest.raises(DamagedCheckpointError, match=r"\.metadata is corrupted: "):
        read_saved_tensors(tmp_path)
    assert read_saved_tensors(trained[1]).shapes


@pytest.mark.parametrize(
    "content",
    [
        b"}" + b")" + b"2\x86" * 60 + b"Ns.",
        b"}(" + b")" + b"2\x86" * 60 + b"Nu.",
        b"(" + b")" + b"2\x86" * 60 + b"Nd.",
        b"\x8f(" + b")" + b"2\x86" * 60 + b"\x90.",
        b"(" + b")" + b"2\x86" * 60 + b"\x91.",
    ],
)
def test_metadata_cannot_make_the_reader_hash_for_ever(tmp_path, content):
    (tmp_path / METADATA).write_bytes(b"\x80\x04" + content)
    with pytest.raises(DamagedCheckpointError, match=r"\.metadata is corrupted: "):
        read_saved_tensors(tmp_path)


def test_metadata_cannot_make_its_error_endless(tmp_path, trained):
    good = pickle.loads((trained[1] / METADATA).read_bytes())
    name, entry = next(iter(good.state_dict_metadata.items()))
    endless: Any = ()
    for _ in range(60):
        endless = (endless, endless)
    odd = replace(entry, properties=replace(entry.properties, dtype=endless))
    (tmp_path / METADATA).write_bytes(pickle.dumps(replace(good, state_dict_metadata={name: odd})))
    with pytest.raises(
        DamagedCheckpointError, match="corrupted: TypeError: tuple in place of a dtype"
    ):
        read_saved_tensors(tmp_path)


ODD: list[Any] = [None, "x", [], (), {}, 1, -1, (1, "x"), (-1,), torch.float32, {"a": 1}, 2**70]


def odd_metadata(good):
    """Yield the metadata with one value replaced by something else."""
    name, entry = next(iter(good.state_dict_metadata.items()))
    index, place = next(item for item in good.storage_data.items() if item[0].fqn == name)
    good = replace(good, state_dict_metadata={name: entry}, storage_data={index: place})
    for odd in ODD:
        yield odd
        yield replace(good, state_dict_metadata=odd)
        yield replace(good, storage_data=odd)
        yield replace(good, state_dict_metadata={name: odd})
        yield replace(good, state_dict_metadata={name: replace(entry, size=odd)})
        yield replace(good, state_dict_metadata={name: replace(entry, chunks=odd)})
        yield replace(good, state_dict_metadata={name: replace(entry, chunks=[odd])})
        yield replace(good, state_dict_metadata={name: replace(entry, properties=odd)})
        yield replace(good, storage_data={"x": place})
        yield replace(good, storage_data={index: odd})
        yield replace(good, storage_data={index: replace(place, relative_path=odd)})
        yield replace(good, storage_data={index: replace(place, offset=odd)})


def test_odd_metadata_is_refused_by_the_error_for_users(tmp_path, trained):
    good = pickle.loads((trained[1] / METADATA).read_bytes())
    refused = 0
    for odd in odd_metadata(good):
        (tmp_path / METADATA).write_bytes(pickle.dumps(odd))
        try:
            read_saved_tensors(tmp_path)
        except ValueError:  # any other error fails the test
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    "change",
    [
        *({"relative_path": path} for path in ("../x.distcp", "/etc/passwd", "state.json",
            "__0_0.distcp/../x", "")),
        {"transform_descriptors": ["zstd"]}, {"offset": -1}, {"length": "1"},
    ],
)  # fmt: skip
def test_tensors_lie_in_files_of_the_checkpoint_as_they_are(tmp_path, trained, change):
    good = pickle.loads((trained[1] / METADATA).read_bytes())
    places = {index: replace(place, **change) for index, place in good.storage_data.items()}
    (tmp_path / METADATA).write_bytes(pickle.dumps(replace(good, storage_data=places)))
    with pytest.raises(DamagedCheckpointError, match=r"\.metadata is corrupted: "):
        read_saved_tensors(tmp_path)


def test_own_checkpoint_may_be_continued_without_its_random_states():
    patterns = ("random", "optimizer", "tokenizer")
    assert select_own_exclusions(patterns, model_only=False) == ("tokenizer", "random")
    assert select_own_exclusions(patterns, model_only=True) == ("tokenizer",)
    assert select_own_exclusions(("model",), model_only=False) == ()


@pytest.mark.parametrize(
    "content", [b"", b"x", b"\x80\x04", b"\x80\x04.", b"\x80\x04\x8d" + b"\xff" * 8, b"(" * 1000]
)
def test_metadata_that_is_no_pickle_is_damage(tmp_path, content):
    (tmp_path / METADATA).write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=rf"{tmp_path}/\.metadata is corrupted: "):
        read_saved_tensors(tmp_path)


def test_missing_metadata_is_damage(received):
    (received / METADATA).unlink()
    describe(received)
    assert_refused(received, rf"{received}/\.metadata is missing", kind=DamagedCheckpointError)


# Objects that are no tensors


def test_object_in_place_of_a_tensor_does_not_run(received, trained, tmp_path):
    entries = dict(trained[0].checkpointer.tensors())
    scalar = next(name for name, tensor in entries.items() if tensor.dim() == 0)
    entries[scalar] = Attack(tmp_path / "mark")
    for file in received.glob("__*"):
        file.unlink()
    state_dict_saver.save(entries, storage_writer=FileSystemWriter(received), no_dist=True)
    describe(received)
    assert_refused(received, r"BytesStorageMetadata in place of TensorStorageMetadata")
    assert not (tmp_path / "mark").exists()


def test_object_in_a_file_of_tensors_does_not_run(received, tmp_path):
    place = next(iter(pickle.loads((received / METADATA).read_bytes()).storage_data.values()))
    torch.save(Attack(tmp_path / "mark"), tmp_path / "object")
    content = bytearray((received / place.relative_path).read_bytes())
    object_ = (tmp_path / "object").read_bytes()
    content[place.offset : place.offset + place.length] = object_.ljust(place.length, b"\0")[
        : place.length
    ]
    replace_file(received, place.relative_path, bytes(content))
    engine = make_engine(None)
    with pytest.raises(Exception, match=f"checkpoint {received} could not be read: ") as refused:
        engine.load_checkpoint(str(received))
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "mark").exists()


def test_random_states_are_tensors(trained):
    _, folder = trained
    assert read_saved_tensors(folder).pickled == ()
    assert sorted(file.name for file in folder.iterdir()) == [
        ".metadata", "__0_0.distcp", "manifest.json", "random.1.0.safetensors", "state.json",
    ]  # fmt: skip
    states = load_file(folder / "random.1.0.safetensors")
    assert states["python"].shape == (625,)
    assert states["numpy"].shape == (626,)


def test_random_states_are_restored_with_the_same_bits(tmp_path):
    engine = make_engine(None)
    seed_everything(7)
    gauss(0, 1)  # leaves a second number of the pair for later
    np.random.standard_normal()
    engine.save_checkpoint(str(tmp_path / "saved"))
    expected = gauss(0, 1), np.random.standard_normal(3).tolist(), torch.rand(3).tolist()
    seed_everything(8)
    engine.load_checkpoint(str(tmp_path / "saved"))
    assert (gauss(0, 1), np.random.standard_normal(3).tolist(), torch.rand(3).tolist()) == expected


@pytest.mark.parametrize("name", ["python", "numpy", "torch"])
def test_tensors_that_are_no_random_states_are_refused_and_nothing_is_loaded(received, name):
    file = received / "random.1.0.safetensors"
    for odd in (
        torch.zeros(3),
        torch.zeros(625, dtype=torch.int64) - 1,
        torch.zeros(5, dtype=torch.uint8),
    ):
        replace_file(received, file.name, save(load_file(file) | {name: odd}))
        assert_refused(received, rf"checkpoint file {file} has no random states: ")


def test_checkpoint_with_pickled_random_states_continues_without_them(received, trained, tmp_path):
    engine, _ = trained
    entries = dict(engine.checkpointer.tensors()) | {
        "random.1.0": pickle.dumps(Attack(tmp_path / "mark"))
    }
    for file in (*received.glob("__*"), *received.glob("random*")):
        file.unlink()
    state_dict_saver.save(entries, storage_writer=FileSystemWriter(received), no_dist=True)
    describe(received)
    for name in ("state.json", "manifest.json"):
        file = received / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 3}))
    sums = json.loads((received / "manifest.json").read_text())
    state = sum_of_file(received / "state.json")
    sums["files"]["state.json"] = {"num_bytes": state.num_bytes, "crc32": state.crc32}
    (received / "manifest.json").write_text(json.dumps(sums))
    assert_refused(
        received, "of an older version, .* add random to checkpoint.exclude_from_loading"
    )
    for options in ({"exclude": ("random",)}, {"model_only": True}):
        other = make_engine(None)
        assert other.load_checkpoint(str(received), **options) == (
            0 if "model_only" in options else 1
        )
        assert all(torch.equal(weights(engine)[n], tensor) for n, tensor in weights(other).items())
    assert not (tmp_path / "mark").exists()


# Files beside it


@pytest.mark.parametrize("name", ["../saved.distcp", "/etc/passwd", "sub/x", ".", ""])
def test_manifest_names_files_of_its_folder_only(received, name):
    content = json.loads((received / "manifest.json").read_text())
    content["files"][name] = {"num_bytes": 0, "crc32": 0}
    (received / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(
        DamagedCheckpointError,
        match=r"manifest.json lists '.*': must be the name of a file beside it",
    ):
        check_files(received, tensors=False)


@pytest.mark.parametrize("name", ["state.json", ".metadata", "__0_0.distcp"])
def test_link_that_leaves_a_checkpoint_is_refused(received, tmp_path, name):
    shutil.move(received / name, tmp_path / "elsewhere")
    (received / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=f"{received / name} is a link that leaves its folder"):
        check_files(received, tensors=False)


@pytest.mark.parametrize(
    "change",
    [
        {"position": 1},
        {"position": {"step": 1}},
        {"tokenizer": []},
        {"tokenizer": {"x": 1}},
        {"more": 1},
    ],
)
def test_state_of_another_shape_is_damage(received, change):
    file = received / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(DamagedCheckpointError, match=rf"checkpoint file {file} is corrupted: "):
        read_state(received)


@pytest.mark.parametrize("in_hf", [True, False])
def test_hugging_face_folder_stays_one_with_files_of_a_checkpoint_in_it(
    trained, received, tmp_path, in_hf
):
    folder = write_random_model(tmp_path / "hf", spec=model_registry("tiny"), seed=0)
    for file in received.iterdir():
        shutil.copy(file, folder)
    replace_file(folder, METADATA, pickle.dumps(Attack(tmp_path / "mark")))
    assert not is_checkpoint(folder)
    config = CheckpointConfig(initial_load_path=str(folder), initial_load_in_hf=in_hf)
    if not in_hf:
        with pytest.raises(
            ValueError, match=r"must be a checkpoint, .*with initial_load_in_hf, a Hugging Face"
        ):
            find_load_source(config)
        return
    source = find_load_source(config)
    assert source is not None
    assert source.model_only
    engine = make_engine(None)
    assets = write_assets(tmp_path / "assets")
    for file in received.iterdir():
        shutil.copy(file, assets)
    engine.load_checkpoint(assets)
    assert engine.policy_version == 0
    assert not (tmp_path / "mark").exists()


def test_checkpoint_is_no_hugging_face_folder(received):
    config = CheckpointConfig(initial_load_path=str(received), initial_load_in_hf=True)
    with pytest.raises(ValueError, match=f"initial_load_in_hf=True: {received} is a checkpoint"):
        find_load_source(config)
