"""Weights through shared memory between processes: what the canary catches, reuse, slow readers, two runs."""

import copy
import dataclasses
import os
from pathlib import Path

import pytest
import torch

from rl.weights import messages
from rl.weights.canary import check_sums
from rl.weights.errors import SharedMemoryError, VersionNotFoundError, WeightCanaryError
from rl.weights.plan import plan_reads
from rl.weights.segments import MappedSegment
from rl.weights.shards import parts_of
from rl.weights.store import WeightStore
from tests.weights.test_store import assert_same_bits, expected

pytestmark = [pytest.mark.medium, pytest.mark.timeout(180)]


def locate(store, run, version):
    """(name, where a box of it lies), of all boxes."""
    stored = run(store._index.locate.call_one(version))
    return [(key.rpartition("/")[2], place) for key, places in stored.items() for place in places]


def pulled_sums(cluster, store, version, dtype=torch.bfloat16):
    cluster.meshes.run(cluster.generator.build.call("tp", 999, dtype))
    answers = cluster.meshes.run(cluster.generator.pull.call(store, version))
    return [box for _, transfer in answers.items() for box in transfer.sums]


def check(cluster, version, pulled):
    check_sums(version=version, pushed=cluster.pushed[version], pulled={"generator": pulled})


def test_a_shard_that_is_corrupted_in_shared_memory_is_caught(cluster):
    run, store = cluster.meshes.run, cluster.bf16
    version, _ = cluster.push(store, "fsdp_tp")
    check(cluster, version, pulled_sums(cluster, store, version))
    places = [place for name, place in locate(store, run, version) if name == "up.weight"]
    assert len(places) == 4
    mapped = MappedSegment(places[2].segment)
    places[2].part.view(mapped.data).view(torch.int16)[0, 1] ^= 1
    with pytest.raises(
        WeightCanaryError, match=f"version {version}: generator 'generator' holds other bits in 'up.weight'"
    ):
        check(cluster, version, pulled_sums(cluster, store, version))
    mapped.close()
    run(store.delete(version))


def test_a_generator_that_kept_the_old_bits_of_one_tensor_is_caught(cluster):
    run, store = cluster.meshes.run, cluster.bf16
    version, _ = cluster.push(store, "fsdp_tp")
    pulled_sums(cluster, store, version)

    def held():
        return [box for _, sums in run(cluster.generator.sums.call()).items() for box in sums]

    check(cluster, version, held())
    run(cluster.generator.keep_old.call("down.weight", version - 1))
    with pytest.raises(WeightCanaryError, match=r"other bits in 'down.weight' .* still of another version"):
        check(cluster, version, held())
    run(store.delete(version))


def test_a_generator_in_another_dtype_is_caught(cluster):
    run, store = cluster.meshes.run, cluster.bf16
    version, _ = cluster.push(store, "fsdp")
    with pytest.raises(WeightCanaryError, match=r"was sent with dtype bfloat16 and .* with dtype float32"):
        check(cluster, version, pulled_sums(cluster, store, version, torch.float32))
    run(store.delete(version))


@pytest.mark.filterwarnings("ignore:is_rdma_available:DeprecationWarning")
def test_the_same_version_reaches_hosts_that_share_no_memory(cluster):
    """By messages, and by torchstore's own transport, which would be RDMA where there is hardware."""
    run, store = cluster.meshes.run, cluster.bf16
    version, _ = cluster.push(store, "fsdp_tp")
    far = copy.copy(store)
    far.config = dataclasses.replace(store.config, transport="torchstore")
    wanted = expected(version, torch.bfloat16)
    for full in cluster.pull(far, "tp", version, torch.bfloat16):
        assert_same_bits(full, wanted)

    received = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    by_key = run(store._index.locate.call_one(version))
    by_name = {key.rpartition("/")[2]: places for key, places in by_key.items()}
    copier = store._here().copier
    for volume_id, reads in plan_reads(version, parts_of(received), by_name).items():
        volume = store._strategy.get_storage_volume(volume_id)
        run(messages.fetch_by_pipe(volume, reads, copier=copier))
    assert_same_bits(received, wanted)
    run(store.delete(version))


def test_a_slow_reader_keeps_its_version_while_newer_ones_come_and_it_is_deleted(cluster):
    run, store = cluster.meshes.run, cluster.start(cluster.volume_mesh)
    state_dicts = {version: {"w": torch.full((1000,), float(version))} for version in range(1, 8)}

    def push(version):
        run(store.push(version=version, state_dict=state_dicts[version]))
        run(store.announce(version))
        return run(store.prune())

    push(1)
    ((_, place),) = locate(store, run, 1)
    mapped = MappedSegment(place.segment)
    with mapped.holding(place.segment) as data:
        assert [push(version) for version in range(2, 6)] == [[], [1], [2], [3]]
        assert place.part.view(data).unique().tolist() == [1]
        with pytest.raises(VersionNotFoundError) as caught:
            run(store.pull(version=1, state_dict={"w": torch.zeros(1000)}))
        assert "version 1 is not in the store; announced are [4, 5]" in str(caught.value)
    received = {"w": torch.zeros(1000)}
    for version in (6, 7):
        push(version)
        run(store.pull(version=version, state_dict=received))
        assert received["w"].unique().tolist() == [version]
    mapped.close()
    run(store.stop())


def shared_memory_of(pid):
    """Addresses of the segments that the process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[0] for line in lines if "/memfd:relay-weights" in line}


def test_memory_is_reused_from_version_to_version_and_has_no_name(cluster):
    run, store = cluster.meshes.run, cluster.start(cluster.volume_mesh)
    (pid,) = cluster.meshes.pids(cluster.volume_mesh)
    names, before = set(os.listdir("/dev/shm")), shared_memory_of(pid)
    used = set()
    for version in range(8):
        run(store.push(version=version, state_dict={"w": torch.ones(5000)}))
        run(store.announce(version))
        used |= {place.segment.id for _, place in locate(store, run, version)}
        run(store.pull(version=version, state_dict={"w": torch.zeros(5000)}))
        run(store.prune())
    assert len(used) == 3
    assert len(shared_memory_of(pid) - before) == 3
    assert set(os.listdir("/dev/shm")) <= names
    run(store.stop())
    assert shared_memory_of(pid) <= before


def test_too_little_memory_is_an_error_before_anything_is_written(cluster):
    run, store = cluster.meshes.run, cluster.start(cluster.volume_mesh)
    huge = torch.zeros(1).expand(2**40)
    with pytest.raises(SharedMemoryError) as caught:
        run(store.push(version=1, state_dict={"w": huge}))
    message = str(caught.value)
    assert message.startswith(
        "weights need 1.32e+04 GB of shared memory (3 versions of 4.4e+03 GB: those kept and the one being "
        "written), and "
    )
    assert "lower weights.keep_versions (now 2), or send them through files" in message
    assert run(store.stats()).num_bytes == 0
    run(store.push(version=2, state_dict={"w": torch.zeros(3)}))
    run(store.stop())


def test_two_runs_with_the_same_names_do_not_disturb_each_other(cluster):
    run = cluster.meshes.run
    stores = [cluster.start(cluster.volume_mesh), cluster.start(cluster.volume_mesh)]
    for value, store in enumerate(stores):
        run(store.push(version=1, state_dict={"w": torch.full((100,), float(value))}))
        run(store.announce(1))
    received = {"w": torch.full((100,), 7.0)}
    run(stores[1].pull(version=1, state_dict=received))
    assert received["w"].unique().tolist() == [1]
    run(stores[1].stop())
    run(stores[0].pull(version=1, state_dict=received))
    assert received["w"].unique().tolist() == [0]
    run(stores[0].stop())


@pytest.mark.slow
def test_a_hundred_versions_from_two_ranks_to_two_and_none_hangs(cluster):
    run = cluster.meshes.run
    store = cluster.bf16
    run(cluster.generator.build.call("tp", 999, torch.bfloat16))
    for _ in range(100):
        version, _ = cluster.push(store, "fsdp")
        received = run(cluster.generator.pull.call(store, version))
        check(cluster, version, [box for _, transfer in received.items() for box in transfer.sums])
        run(store.prune())
    assert len(run(store.versions())) == 2


def test_threads_and_versions_must_be_positive():
    with pytest.raises(ValueError, match="num_threads=0 must be at least 1"):
        WeightStore.Config(num_threads=0)
