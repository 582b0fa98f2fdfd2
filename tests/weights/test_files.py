"""Folder of a weight store's files; test_store.py tests the versions in it."""

import dataclasses
import os

import pytest
import torch

from rl.weights.files import VersionFolder
from rl.weights.store import WeightStore, check_unused
from rl.weights.types import WeightStoreError, WeightTimeoutError


@pytest.fixture
def config(tmp_path):
    return WeightStore.Config(transport="files", timeout_s=30, folder=str(tmp_path))


@pytest.mark.medium
def test_files_of_another_run_are_neither_used_nor_removed(cluster, tmp_path, config):
    run, first, second = cluster.meshes.run, config.build(), config.build()
    run(first.start(cluster.volume_mesh))
    shard = run(first.push(version=1, state_dict={"w": torch.ones(3)}))
    with pytest.raises(WeightStoreError, match="already exists and belongs to a running run"):
        run(second.start(cluster.volume_mesh))
    second.discard()
    assert list(tmp_path.rglob("*.bin")) == [shard.place]
    with pytest.raises(ValueError, match=r"weights\.folder: .*/policy already exists"):
        check_unused(config)
    check_unused(dataclasses.replace(config, state_dict_key="other"))
    run(first.stop())
    check_unused(config)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine").touch()
    with pytest.raises(WeightStoreError, match="or to something else: choose another folder"):
        run(dataclasses.replace(config, state_dict_key="other").build().start(cluster.volume_mesh))
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["mine"]


@pytest.mark.medium
def test_restarted_store_has_no_versions_of_lost_trainers(cluster, tmp_path, config):
    run, store, weights = cluster.meshes.run, config.build(), {"w": torch.ones(3)}
    run(store.start(cluster.volume_mesh))
    store.announce([run(store.push(version=4, state_dict=weights))])
    store.forget()
    store.discard()
    run(store.start(cluster.volume_mesh))
    assert store.versions() == []
    shard = run(store.push(version=4, state_dict={"w": torch.full((3,), 7.0)}))
    run(store.pull(store.announce([shard]), state_dict=weights))
    assert weights["w"].tolist() == [7, 7, 7]
    run(store.stop())


@pytest.mark.medium
def test_hanging_files_meet_the_deadline_and_a_file_that_cannot_be_written_is_named(
    cluster, tmp_path, config
):
    run, store, weights = cluster.meshes.run, config.build(), {"w": torch.ones(1000)}
    run(store.start(cluster.volume_mesh))
    snapshot = store.announce([run(store.push(version=3, state_dict=weights))])
    pipe = tmp_path / "policy" / "v3" / "rank0.bin"
    pipe.unlink()
    os.mkfifo(pipe)  # opening it waits, as there is no writer
    store.config = dataclasses.replace(config, timeout_s=0.5)
    with pytest.raises(WeightTimeoutError, match=rf"pull of version 3 .* waited for files in {tmp_path}"):
        run(store.pull(snapshot, state_dict=weights))
    os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))
    store.config = config
    (tmp_path / "policy" / "v4").touch()
    with pytest.raises(WeightStoreError, match=f"were not written to {tmp_path}/policy/v4/rank0.bin: "):
        run(store.push(version=4, state_dict=weights))
    run(store.stop())


def test_only_the_folder_of_a_killed_run_is_replaced(tmp_path, config):
    child = os.fork()
    if child == 0:
        VersionFolder(tmp_path / "policy").start()
        (tmp_path / "policy" / "v1").mkdir()
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert (tmp_path / "policy" / "v1").is_dir()
    check_unused(config)
    folder = VersionFolder(tmp_path / "policy")
    folder.start()
    assert [path.name for path in (tmp_path / "policy").iterdir()] == [".lock"]
    folder.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"folder": "/shared/weights"}, "folder='/shared/weights' has no effect without transport='files'"),
        ({"folder": "weights", "transport": "files"}, "folder='weights' must be an absolute path"),
        ({"state_dict_key": "a/b"}, "state_dict_key='a/b' must be the plain name of a folder"),
        ({"num_threads": 0}, "num_threads=0: must be at least 1"),
        ({"keep_versions": 0}, "keep_versions=0: must be at least 1"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        WeightStore.Config(**settings)
