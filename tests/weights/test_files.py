"""Weights through files: the claims of test_store.py that depend on the transport."""

import asyncio
import dataclasses
import os
from typing import Any

import pytest
import torch
from monarch.actor import ActorError

from rl.weights.errors import (
    IncompleteVersionError,
    VersionExistsError,
    VersionNotFoundError,
    WeightMismatchError,
    WeightStoreError,
    WeightTimeoutError,
)
from rl.weights.files import FileWeightStore, check_unused, make_store
from rl.weights.store import WeightStore
from tests.support.distributed import run_ranks
from tests.support.forked import limit_files
from tests.support.weight_actors import UnevenNet, build_qwen3
from tests.weights.test_store import assert_same_bits, expected


def started(cluster, run_folder, *, dtype="float32", **settings):
    config = WeightStore.Config(transport="files", timeout_s=30, **settings)
    store = make_store(config, dtype=dtype, run_folder=run_folder)
    cluster.meshes.run(store.start(cluster.volume_mesh))
    return store


def files(folder):
    """All but the lock."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
    return sorted(str(path.relative_to(folder)) for path in paths)


@pytest.mark.medium
@pytest.mark.parametrize("target", ["tp", "single"])
@pytest.mark.parametrize("source", ["fsdp_tp", "hsdp"])
def test_float32_trainer_to_bfloat16_generator_is_bit_exact_after_the_cast(cluster, tmp_path, source, target):
    store = started(cluster, tmp_path, dtype="bfloat16")
    version, written = cluster.push(store, source)
    assert sum(written) == sum((tmp_path / file).stat().st_size for file in files(tmp_path))
    for full in cluster.pull(store, target, version, torch.bfloat16):
        assert_same_bits(full, expected(version, torch.bfloat16))
    cluster.meshes.run(store.stop())


@pytest.mark.medium
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_qwen3_from_the_trainers_plan_to_the_generators_is_bit_exact_after_the_cast(
    cluster, tmp_path, experts
):
    run, version = cluster.meshes.run, cluster.next_version()
    store = started(cluster, tmp_path, dtype="bfloat16")
    wanted = build_qwen3("whole", seed=version, dtype=torch.bfloat16, experts=experts)
    uncast = [name for name, tensor in wanted.items() if tensor.dtype == torch.float32]
    run(cluster.trainer.build_qwen3.call("trainer", version, torch.float32, experts))
    run(cluster.trainer.push.call(store, version, buffers=uncast))
    run(store.announce(version))
    run(cluster.generator.build_qwen3.call("generator", 999, torch.bfloat16, experts))
    run(cluster.generator.pull.call(store, version))
    answers = run(cluster.generator.full.call())
    for full in [full for _, full in answers.items()]:
        assert_same_bits(full, wanted)
    run(store.stop())


@pytest.mark.medium
def test_a_version_is_never_overwritten_and_not_readable_before_it_is_announced(cluster, tmp_path):
    run, store = cluster.meshes.run, started(cluster, tmp_path)
    first, second, target = {"w": torch.zeros(3)}, {"w": torch.ones(3)}, {"w": torch.full((3,), 7.0)}
    run(store.push(version=1, state_dict=first))
    with pytest.raises(VersionExistsError, match="version 1 is already pushed"):
        run(store.push(version=1, state_dict=second))
    with pytest.raises(VersionNotFoundError) as caught:
        run(store.pull(version=1, state_dict=target))
    assert str(caught.value) == (
        "version 1 is not in the store; announced are [], pushed and not announced are [1]"
    )
    assert run(store.announce(1)) == 1
    for again in (store.push(version=1, state_dict=second), store.announce(1)):
        with pytest.raises(VersionExistsError, match="version 1 is already announced"):
            run(again)
    with pytest.raises(VersionNotFoundError, match="nothing of version 2 was pushed"):
        run(store.announce(2))
    assert target["w"].tolist() == [7, 7, 7]
    assert run(store.pull(version=1, state_dict=target)).num_bytes == 12
    assert target["w"].tolist() == [0, 0, 0]


@pytest.mark.medium
def test_two_versions_are_kept_and_nothing_stays_when_the_store_stops(cluster, tmp_path):
    run, store = cluster.meshes.run, started(cluster, tmp_path)

    def push(version):
        run(store.push(version=version, state_dict={"w": torch.ones(1000)}))
        run(store.announce(version))
        return run(store.prune())

    assert [push(1), push(2), push(3)] == [[], [], [1]]
    assert run(store.versions()) == [2, 3]
    assert files(tmp_path) == [
        f"weights/policy/v{version}/{name}" for version in (2, 3) for name in (".metadata", "__0_0.distcp")
    ]
    assert run(store.stats()).num_bytes >= 2 * 4000
    with pytest.raises(VersionNotFoundError, match="version 1 is not in the store"):
        run(store.delete(1))
    run(store.stop())
    run(store.stop())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.medium
def test_mismatches_name_the_tensor_and_both_shapes_and_write_nothing(cluster, tmp_path):
    run, store = cluster.meshes.run, started(cluster, tmp_path, dtype="bfloat16")
    version, _ = cluster.push(store, "fsdp_tp")
    run(cluster.generator.build.call("tp", 0, torch.bfloat16))
    with pytest.raises(
        ActorError, match=r"'embed.weight' has shape \(11, 6\) in the store and \(12, 6\) here"
    ):
        run(cluster.generator.pull_wrong_shape.call(store, version))
    net = UnevenNet(seed=0).state_dict()
    del net["gate"]
    with pytest.raises(WeightMismatchError, match="missing 'extra', not asked for 'gate'"):
        run(store.pull(version=version, state_dict=net | {"extra": torch.zeros(1)}))
    with pytest.raises(ValueError, match=r"state_dict\['_extra_state'\] is a dict"):
        run(store.push(version=999, state_dict={"_extra_state": {}}))


@pytest.mark.medium
def test_a_version_that_was_not_written_to_its_end_cannot_be_announced(cluster, tmp_path):
    run, store = cluster.meshes.run, started(cluster, tmp_path)
    version, _ = cluster.push(store, "fsdp_tp", announce=False)
    # Rank 0 writes it last, when it knows that all have written.
    (tmp_path / "weights" / "policy" / f"v{version}.not-announced" / ".metadata").unlink()
    with pytest.raises(IncompleteVersionError, match=f"version {version} is incomplete"):
        run(store.announce(version))
    run(store.delete(version))
    assert files(tmp_path) == []
    _, written = cluster.push(store, "hsdp")
    assert len(written) == 4


@pytest.mark.medium
def test_files_of_another_run_are_neither_used_nor_removed(cluster, tmp_path):
    first = started(cluster, tmp_path, folder=str(tmp_path / "shared"))
    config = first.config
    second = make_store(config, dtype="float32", run_folder=tmp_path / "second")
    with pytest.raises(WeightStoreError, match="is there already, of a run that is going on"):
        cluster.meshes.run(second.start(cluster.volume_mesh))
    second.discard()
    assert first.folder.is_dir()
    with pytest.raises(ValueError, match=r"weights\.folder='.*/shared': .*/shared/policy is there already"):
        check_unused(config)
    check_unused(dataclasses.replace(config, state_dict_key="other"))
    first.discard()
    check_unused(config)
    with pytest.raises(WeightStoreError, match=r"call start\(\) first"):
        cluster.meshes.run(first.versions())


def push_on_a_full_disk(folder):
    store = FileWeightStore(config=FileWeightStore.Config(), folder=folder)
    asyncio.run(store.start(None))
    limit_files(100)
    try:
        asyncio.run(store.push(version=1, state_dict={"w": torch.ones(1000)}))
    except WeightStoreError as error:
        store.discard()
        return str(error)
    return "nothing raised"


def test_a_full_disk_is_an_error_that_names_version_and_folder(tmp_path):
    (error,) = run_ranks(push_on_a_full_disk, 1, tmp_path, timeout_s=50)
    partial = tmp_path / "policy" / "v1.not-announced"
    assert error.startswith(f"weight store: version 1 was not written to {partial}: ")
    assert os.strerror(27) in error  # File too large, as this full disk says
    assert list(tmp_path.iterdir()) == []


def test_files_that_hang_meet_the_deadline_and_do_not_hold_the_event_loop(tmp_path):
    store = FileWeightStore(config=FileWeightStore.Config(timeout_s=0.2), folder=tmp_path)
    asyncio.run(store.start(None))
    asyncio.run(store.push(version=3, state_dict={"w": torch.ones(4)}))
    asyncio.run(store.announce(3))
    pipe = store.folder / "v3" / "__0_0.distcp"
    pipe.unlink()
    os.mkfifo(pipe)  # nobody writes to it: whoever opens it waits

    async def fail(operation):
        """Its error, and how often the event loop went round meanwhile."""
        waiting, num_rounds = asyncio.ensure_future(operation), 0
        while not waiting.done():
            await asyncio.wait([waiting], timeout=0.01)
            num_rounds += 1
        return waiting.exception(), num_rounds

    async def fail_one_after_another():
        # Those that come later wait for the first.
        pull = store.pull(version=3, state_dict={"w": torch.zeros(4)})
        return [
            await fail(operation)
            for operation in (pull, store.announce(4), store.delete(3), store.versions())
        ]

    try:
        failures = asyncio.run(fail_one_after_another())
    finally:
        os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))
        asyncio.run(store.stop())
    assert all(isinstance(error, WeightTimeoutError) for error, _ in failures)
    operations = ["pull of version 3 (1 tensors)", "announce of version 4", "delete of version 3", "versions"]
    late = f"on rank 0 not finished within timeout_s=0.2: waited for files in {store.folder}"
    assert [str(error) for error, _ in failures] == [f"weight store: {what} {late}" for what in operations]
    assert min(num_rounds for _, num_rounds in failures) > 3
    assert list(tmp_path.iterdir()) == []


def test_the_transport_chooses_the_store(tmp_path):
    assert type(make_store(WeightStore.Config(), dtype="float32", run_folder=tmp_path)) is WeightStore
    store = make_store(WeightStore.Config(transport="files"), dtype="bfloat16", run_folder=tmp_path)
    assert isinstance(store, FileWeightStore)
    assert (store.folder, store.dtype) == (tmp_path / "weights" / "policy", "bfloat16")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"folder": "/shared/weights"}, "folder='/shared/weights' has no effect with transport='auto'"),
        ({"folder": "weights", "transport": "files"}, "folder='weights' must be an absolute path"),
        ({"state_dict_key": "a/b"}, "state_dict_key='a/b' must be a name"),
    ],
)
def test_settings_without_effect_or_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        WeightStore.Config(**settings)


def test_a_store_whose_pushers_are_lost_starts_again_without_their_versions(tmp_path):
    store = make_store(WeightStore.Config(transport="files"), dtype="float32", run_folder=tmp_path)
    mesh: Any = None  # it has no part in it
    weights = {"w": torch.ones(3)}

    async def steps():
        await store.start(mesh)
        await store.push(version=4, state_dict=weights)
        await store.announce(4)
        await store.push(version=5, state_dict=weights)  # never announced
        store.forget()
        store.discard()
        await store.start(mesh)
        assert await store.versions() == []
        await store.push(version=4, state_dict={"w": torch.full((3,), 7.0)})
        await store.announce(4)
        await store.pull(version=4, state_dict=weights)
        await store.stop()

    asyncio.run(steps())
    assert weights["w"].tolist() == [7, 7, 7]
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_replaced_and_what_is_no_runs_is_not(tmp_path):
    config = FileWeightStore.Config(folder=str(tmp_path))

    def start_and_die(folder):
        store = FileWeightStore(config=FileWeightStore.Config(), folder=folder)
        asyncio.run(store.start(None))
        (store.folder / "v1").mkdir()
        os._exit(3)

    child = os.fork()
    if child == 0:
        start_and_die(tmp_path)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert (tmp_path / "policy" / "v1").is_dir()
    check_unused(config)
    store = FileWeightStore(config=config, folder=tmp_path)
    asyncio.run(store.start(None))
    assert list(store.folder.iterdir()) == []
    store.discard()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "mine").touch()
    with pytest.raises(ValueError, match="or of somebody else: choose another folder"):
        check_unused(config)
    with pytest.raises(WeightStoreError, match="or of somebody else"):
        asyncio.run(store.start(None))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["mine", "policy"]
