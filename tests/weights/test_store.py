"""The store between processes: Monarch meshes, gloo process groups, FSDP2 and TP."""

from __future__ import annotations

import copy
import dataclasses
import os
import signal
from pathlib import Path

import pytest
import torch

from rl.weights.checksum import check_sums
from rl.weights.shared_memory import SegmentMaps
from rl.weights.types import (
    VersionExistsError,
    VersionNotFoundError,
    WeightMismatchError,
    WeightParityError,
    WeightStoreError,
    WeightTimeoutError,
)
from tests.support.weight_actors import UnevenNet, build, is_buffer

pytestmark = [pytest.mark.medium, pytest.mark.timeout(180)]


LAYOUTS = [
    ("auto", "uneven", "fsdp_tp", "tp"),
    ("auto", "uneven", "fsdp_tp", "single"),
    ("auto", "uneven", "hsdp", "tp"),
    ("auto", "uneven", "fsdp", "single"),
    ("auto", "uneven", "ddp", "tp"),
    ("auto", "uneven", "ddp_dtensor", "single"),
    ("auto", "uneven", "single", "tp"),
    ("files", "uneven", "fsdp_tp", "single"),
    ("auto", "dense", "fsdp_tp", "tp"),
    ("auto", "dense", "fsdp_tp", "single"),
    ("auto", "dense", "pp_fsdp", "tp"),
    ("auto", "experts", "fsdp_tp", "tp"),
    ("auto", "experts", "fsdp_tp", "single"),
]


def expected(version, kind="uneven"):
    """Return the weights of a version: parameters in bfloat16, buffers in their own dtype."""
    weights = build(kind, "single", seed=version, dtype=torch.float32)
    return {name: value if is_buffer(name) else value.bfloat16() for name, value in weights.items()}


def assert_same_bits(actual, wanted):
    assert actual.keys() == wanted.keys()
    for name, value in wanted.items():
        assert actual[name].dtype == value.dtype, name
        assert torch.equal(actual[name].detach(), value), name


@pytest.mark.parametrize(("cluster", "kind", "source", "target"), LAYOUTS, indirect=["cluster"])
def test_float32_trainer_to_bfloat16_generator_is_bit_exact_after_the_cast(
    cluster, kind, source, target
):
    """A router's bias is not cast: a rounded bias would choose other experts."""
    snapshot = cluster.push(cluster.bf16, source, kind)
    wanted = expected(snapshot.version, kind)
    if kind != "uneven":  # every box is sent once
        sent = sum(torch.Size(box.shape).numel() for box in snapshot.sums)
        assert sent == sum(tensor.numel() for tensor in wanted.values())
    received = cluster.pull(cluster.bf16, target, snapshot, torch.bfloat16, kind)
    assert len(received) == (2 if target == "tp" else 1)
    for full in received:
        assert_same_bits(full, wanted)
    cluster.meshes.run(cluster.bf16.delete(snapshot.version))


@pytest.mark.parametrize("cluster", ["auto", "files"], indirect=True)
def test_pruning_keeps_two_versions_and_frees_the_others(cluster, tmp_path):
    run, store = cluster.meshes.run, cluster.start(cluster.volume_mesh, tmp_path)
    (pid,) = cluster.meshes.pids(cluster.volume_mesh)
    size = 32 * 2**20
    state_dict = {"w": torch.ones(size // 4), "b": torch.ones(3)}

    def push(version):
        store.announce([run(store.push(version=version, state_dict=state_dict))])
        return run(store.prune())

    assert [push(1), push(2), push(3)] == [[], [], [1]]
    assert store.versions() == [2, 3]
    resident = resident_bytes(pid)
    for version in range(4, 10):
        assert push(version) == [version - 2]
    assert store.versions() == [8, 9]
    assert resident_bytes(pid) - resident < 3 * size
    if cluster.transport == "files":
        assert [file.parent.name for file in sorted(tmp_path.rglob("*.bin"))] == ["v8", "v9"]
    run(store.stop())
    run(store.stop())
    assert list(tmp_path.rglob("v*")) == []


def resident_bytes(pid):
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("cluster", ["auto", "files"], indirect=True)
def test_version_is_never_overwritten_but_may_return_after_its_deletion(cluster, tmp_path):
    run, store = cluster.meshes.run, cluster.start(cluster.volume_mesh, tmp_path)
    target = torch.full((3,), 7.0)

    def push(value):
        return run(store.push(version=1, state_dict={"w": torch.full((3,), value)}))

    shard = push(0.0)
    with pytest.raises(
        VersionExistsError, match=r"1 is already pushed|pushed: .*v1/rank0\.bin exists"
    ):
        push(1.0)
    with pytest.raises(
        VersionNotFoundError, match=r"version 1 is not in the store; there are \[\]"
    ):
        store.snapshot(1)
    first = store.announce([shard])
    with pytest.raises(VersionExistsError, match="version 1 is already announced"):
        store.announce([shard])
    run(store.pull(first, state_dict={"w": target}))
    assert target.tolist() == [0, 0, 0]
    run(store.delete(1))
    run(store.delete(1))
    second = store.announce([push(1.0)])
    if cluster.transport == "auto":
        with pytest.raises(VersionNotFoundError, match="has used the memory for another version"):
            run(store.pull(first, state_dict={"w": target}))
    run(store.pull(second, state_dict={"w": target}))
    assert target.tolist() == [1, 1, 1]
    if cluster.transport == "files":
        run(store.delete(1))
        with pytest.raises(VersionNotFoundError, match=r"was deleted: there is no .*v1/rank0\.bin"):
            run(store.pull(second, state_dict={"w": target}))
    run(store.stop())


def test_version_that_a_rank_has_not_pushed_is_refused_and_may_be_pushed_again(cluster):
    run, store, version = cluster.meshes.run, cluster.bf16, cluster.next_version()
    run(cluster.trainer.build.call("uneven", "fsdp", version, torch.float32))
    shard = run(cluster.trainer.slice(procs=0).push.call_one(store, version))
    with pytest.raises(
        WeightMismatchError, match=r"'embed.weight': the store covers .* of the 66 elements"
    ):
        run(store.pull(store.announce([shard]), state_dict=UnevenNet(seed=0).state_dict()))
    run(store.delete(version))
    shards = run(cluster.trainer_ranks("fsdp").push.call(store, version))
    snapshot = store.announce([shard for _, shard in shards.items()])
    wanted = expected(version)
    for full in cluster.pull(store, "tp", snapshot, torch.bfloat16):
        assert_same_bits(full, wanted)
    run(store.delete(version))


def test_mismatches_name_the_tensor_and_both_shapes(cluster):
    run, store = cluster.meshes.run, cluster.bf16
    snapshot = cluster.push(store, "fsdp_tp")
    net = UnevenNet(seed=0).state_dict()
    with pytest.raises(
        WeightMismatchError, match=r"'embed.weight' .* \(11, 6\) in the store and \(12, 6\)"
    ):
        run(store.pull(snapshot, state_dict=net | {"embed.weight": torch.zeros(12, 6)}))
    del net["gate"]
    with pytest.raises(WeightMismatchError, match="missing 'extra', not asked for 'gate'"):
        run(store.pull(snapshot, state_dict=net | {"extra": torch.zeros(1)}))
    run(store.delete(snapshot.version))


def test_restarted_store_has_no_files_of_lost_trainers(cluster, tmp_path):
    run, weights = cluster.meshes.run, {"w": torch.ones(3)}
    store = cluster.start(cluster.volume_mesh, tmp_path, transport="files")
    store.announce([run(store.push(version=4, state_dict=weights))])
    store.forget()
    run(store.start(cluster.volume_mesh))
    assert store.versions() == []
    shard = run(store.push(version=4, state_dict={"w": torch.full((3,), 7.0)}))
    run(store.pull(store.announce([shard]), state_dict=weights))
    assert weights["w"].tolist() == [7, 7, 7]
    run(store.stop())


def test_hanging_files_meet_the_deadline_and_a_file_that_cannot_be_written_is_named(
    cluster, tmp_path
):
    run, weights = cluster.meshes.run, {"w": torch.ones(1000)}
    store = cluster.start(cluster.volume_mesh, tmp_path, transport="files", timeout_s=0.5)
    folder = tmp_path / "weights"
    snapshot = store.announce([run(store.push(version=3, state_dict=weights))])
    pipe = folder / "v3" / "rank0.bin"
    pipe.unlink()
    os.mkfifo(pipe)  # opening it waits, as there is no writer
    with pytest.raises(
        WeightTimeoutError, match=rf"pull of version 3 .* waited for files in {folder}"
    ):
        run(store.pull(snapshot, state_dict=weights))
    os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))
    (folder / "v4").touch()
    with pytest.raises(WeightStoreError, match=f"were not written to {folder}/v4/rank0.bin: "):
        run(store.push(version=4, state_dict=weights))
    run(store.stop())


def test_hanging_volume_meets_the_deadline_and_a_dead_one_is_named(cluster, tmp_path):
    run, mesh = cluster.meshes.run, cluster.meshes.spawn_mesh(1, process_group=False)
    store = cluster.start(mesh, tmp_path, transport="torchstore")
    (pid,) = cluster.meshes.pids(mesh)
    state_dict = {"w": torch.zeros(1000), "b": torch.zeros(4)}
    snapshot = store.announce([run(store.push(version=1, state_dict=state_dict))])
    store.config = dataclasses.replace(store.config, timeout_s=3)
    os.kill(pid, signal.SIGSTOP)
    # One thread may still answer until all have stopped.
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    with pytest.raises(
        WeightTimeoutError, match=r"push of version 2 .* timeout_s=3: waited for the tr"
    ):
        run(store.push(version=2, state_dict=state_dict))
    with pytest.raises(
        WeightTimeoutError, match=r"pull of version 1 \(2 tensors\) on rank 0 .* the trainer"
    ):
        run(store.pull(snapshot, state_dict=state_dict))
    os.kill(pid, signal.SIGKILL)
    store.config = dataclasses.replace(store.config, timeout_s=60)
    with pytest.raises(
        WeightStoreError, match=r"push of version 3 .* on rank 0 failed: lost the tr"
    ):
        run(store.push(version=3, state_dict=state_dict))
    cluster.meshes.stop(mesh)


def test_parity_catches_corrupted_stale_and_miscast_weights(cluster):
    run, store = cluster.meshes.run, cluster.bf16
    snapshot = cluster.push(store, "fsdp_tp")
    version = snapshot.version

    def pulled(pulled_snapshot=snapshot, dtype=torch.bfloat16):
        run(cluster.generator.build.call("uneven", "tp", 999, dtype))
        answers = run(cluster.generator.pull.call(store, pulled_snapshot))
        return [box for _, sums in answers.items() for box in sums]

    def check(boxes):
        check_sums(version=version, pushed=snapshot.sums, pulled={"generator": boxes})

    check(pulled())
    with pytest.raises(
        WeightParityError, match=r"other bits in 'down.weight' .* still of another version"
    ):
        check(pulled(cluster.push(store, "fsdp_tp")))
    with pytest.raises(WeightParityError, match=r"'float32', .* was sent as \('bfloat16'"):
        check(pulled(dtype=torch.float32))
    shard = snapshot.shards[0]
    (stored,) = (part for part in shard.parts if part.name == "up.weight")
    with SegmentMaps(max_age=1).hold(shard.place) as data:
        stored.view(data).view(torch.int16)[0, 1] ^= 1
    with pytest.raises(
        WeightParityError, match=f"version {version}: generator 'generator' holds other bits"
    ):
        check(pulled())
    run(store.delete(version))
    run(store.delete(version + 1))


def test_messages_carry_a_pushed_version_to_hosts_that_share_no_memory(cluster):
    run, store = cluster.meshes.run, cluster.bf16
    snapshot = cluster.push(store, "fsdp_tp")
    far = copy.copy(store)
    far.config = dataclasses.replace(store.config, transport="torchstore")
    wanted = expected(snapshot.version)
    for full in cluster.pull(far, "tp", snapshot, torch.bfloat16):
        assert_same_bits(full, wanted)
    run(store.delete(snapshot.version))
