"""Weights through the real store: Monarch meshes, gloo process groups, FSDP2 and TP."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path

import pytest
import torch
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from rl.process_id import identify
from rl.weights.errors import (
    IncompleteVersionError,
    VersionExistsError,
    VersionNotFoundError,
    WeightMismatchError,
    WeightStoreError,
    WeightTimeoutError,
)
from rl.weights.store import WeightStore
from rl.weights.volumes import VolumeStats
from tests.support.weight_actors import UnevenNet, WeightActor, build_qwen3

pytestmark = [pytest.mark.medium, pytest.mark.timeout(180)]


@pytest.fixture(params=["auto", "torchstore"])
def cluster(all_transports, request):
    all_transports.use(request.param)
    return all_transports


SLOW_ON_BOTH = pytest.mark.parametrize(
    "cluster", ["auto", pytest.param("torchstore", marks=pytest.mark.slow)], indirect=True
)


def expected(version, dtype):
    """Parameters in `dtype`; the buffers keep theirs."""
    net = UnevenNet(seed=version)
    parameters = {name for name, _ in net.named_parameters()}
    return {name: v.to(dtype) if name in parameters else v for name, v in net.state_dict().items()}


def assert_same_bits(actual, wanted):
    assert actual.keys() == wanted.keys()
    for name, value in wanted.items():
        assert actual[name].dtype == value.dtype, name
        assert torch.equal(actual[name].detach(), value), name


def test_fsdp_tp_uses_strided_shards(cluster):
    """Else the tests below would not cover them."""
    placements = cluster.meshes.run(cluster.trainer.build.call("fsdp_tp", 0, torch.float32))
    assert all(kinds == ["_StridedShard", "Shard"] for _, kinds in placements.items())


@pytest.mark.parametrize("target", ["tp", "single"])
@pytest.mark.parametrize("source", ["fsdp_tp", "hsdp", "fsdp", "ddp", "ddp_dtensor", "single"])
def test_float32_trainer_to_bfloat16_generator_is_bit_exact_after_the_cast(cluster, source, target):
    version, _ = cluster.push(cluster.bf16, source)
    for full in cluster.pull(cluster.bf16, target, version, torch.bfloat16):
        assert_same_bits(full, expected(version, torch.bfloat16))
    cluster.meshes.run(cluster.bf16.delete(version))


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("target", ["generator", "whole"])
def test_qwen3_from_the_trainers_plan_to_the_generators_is_bit_exact_after_the_cast(cluster, target, experts):
    """A router's bias is not cast: a rounded one would choose other experts."""
    run, store, version = cluster.meshes.run, cluster.bf16, cluster.next_version()
    wanted = build_qwen3("whole", seed=version, dtype=torch.bfloat16, experts=experts)
    uncast = [name for name, tensor in wanted.items() if tensor.dtype == torch.float32]
    assert len(uncast) == (2 if experts else 0)
    run(cluster.trainer.build_qwen3.call("trainer", version, torch.float32, experts))
    run(cluster.trainer.push.call(store, version, buffers=uncast))
    run(store.announce(version))
    generator = cluster.generator if target == "generator" else cluster.generator.slice(procs=0)
    run(generator.build_qwen3.call(target, 999, torch.bfloat16, experts))
    run(generator.pull.call(store, version))
    received = [full for _, full in run(generator.full.call()).items()]
    assert len(received) == (2 if target == "generator" else 1)
    for full in received:
        assert_same_bits(full, wanted)
    run(store.delete(version))


def test_float32_stays_float32_through_a_single_volume(cluster):
    version, _ = cluster.push(cluster.fp32, "fsdp_tp")
    for full in cluster.pull(cluster.fp32, "tp", version, torch.float32):
        assert_same_bits(full, expected(version, torch.float32))
    cluster.meshes.run(cluster.fp32.delete(version))


def test_replicas_are_sent_once(cluster):
    """bf16: 66 + 42 + 7 + 42 + 6 + 6 + 1 parameters; float32 scale; 2 int64 steps."""
    num_bytes = 2 * (66 + 42 + 7 + 42 + 6 + 6 + 1) + 4 + 16
    for layout in ("ddp", "ddp_dtensor", "hsdp", "fsdp_tp"):
        version, sent = cluster.push(cluster.bf16, layout)
        assert sum(sent) == num_bytes, layout
        cluster.meshes.run(cluster.bf16.delete(version))


def test_store_pickles_and_refuses_to_work_before_start(cluster):
    copy = pickle.loads(pickle.dumps(WeightStore.Config(timeout_s=7).build(dtype="bfloat16")))
    assert (copy.dtype, copy.config.timeout_s) == ("bfloat16", 7)
    with pytest.raises(WeightStoreError, match=r"call start\(\) first"):
        cluster.meshes.run(copy.versions())


def test_two_versions_are_kept_and_older_ones_are_freed(cluster):
    run, store = cluster.meshes.run, cluster.start(cluster.volume_mesh, transport=cluster.transport)
    (pid,) = cluster.meshes.pids(cluster.volume_mesh)
    size = 32 * 2**20
    state_dict = {"w": torch.ones(size // 4), "b": torch.ones(3)}

    def push(version):
        assert run(store.push(version=version, state_dict=state_dict)).num_bytes == size + 12
        run(store.announce(version))
        return run(store.prune())

    assert [push(1), push(2), push(3)] == [[], [], [1]]
    assert run(store.versions()) == [2, 3]
    assert run(store.stats()) == VolumeStats(num_boxes=4, num_bytes=2 * (size + 12))
    resident = resident_bytes(pid)
    for version in range(4, 12):
        assert push(version) == [version - 2]
    assert run(store.versions()) == [10, 11]
    assert run(store.stats()) == VolumeStats(num_boxes=4, num_bytes=2 * (size + 12))
    assert resident_bytes(pid) - resident < 3 * size
    run(store.delete(10))
    run(store.delete(11))
    assert run(store.stats()) == VolumeStats(num_boxes=0, num_bytes=0)
    run(store.stop())
    run(store.stop())


def resident_bytes(pid):
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_a_version_is_never_overwritten(cluster):
    run, store = cluster.meshes.run, cluster.fp32
    version = cluster.next_version()
    run(store.push(version=version, state_dict={"w": torch.zeros(3)}))
    with pytest.raises(VersionExistsError, match=f"version {version} is already pushed by rank 0"):
        run(store.push(version=version, state_dict={"w": torch.ones(3)}))
    run(store.announce(version))
    with pytest.raises(VersionExistsError, match=f"version {version} is already announced"):
        run(store.push(version=version, state_dict={"other": torch.ones(3)}))
    with pytest.raises(VersionExistsError, match=f"version {version} is already announced"):
        run(store.announce(version))
    target = torch.full((3,), 7.0)
    run(store.pull(version=version, state_dict={"w": target}))
    assert target.tolist() == [0, 0, 0]
    run(store.delete(version))
    run(store.push(version=version, state_dict={"w": torch.ones(3)}))
    run(store.announce(version))
    run(store.pull(version=version, state_dict={"w": target}))
    assert target.tolist() == [1, 1, 1]
    run(store.delete(version))


def test_missing_and_unannounced_versions_are_not_readable(cluster):
    run, store = cluster.meshes.run, cluster.fp32
    first, second = cluster.next_version(), cluster.next_version()
    run(store.push(version=first, state_dict={"w": torch.zeros(3)}))
    run(store.announce(first))
    run(store.push(version=second, state_dict={"w": torch.ones(3)}))
    target = torch.full((3,), 7.0)
    for version in (second, 12345):
        with pytest.raises(VersionNotFoundError) as caught:
            run(store.pull(version=version, state_dict={"w": target}))
        assert f"version {version} is not in the store" in str(caught.value)
        assert f"announced are [{first}], pushed and not announced are [{second}]" in str(caught.value)
    assert target.tolist() == [7, 7, 7]
    with pytest.raises(VersionNotFoundError, match="nothing of version 12345 was pushed"):
        run(store.announce(12345))
    with pytest.raises(VersionNotFoundError, match="version 12345 is not in the store"):
        run(store.delete(12345))
    run(store.delete(second))
    run(store.delete(first))


def test_mismatches_name_the_tensor_and_both_shapes(cluster):
    run, store = cluster.meshes.run, cluster.bf16
    version, _ = cluster.push(store, "fsdp_tp")
    run(cluster.generator.build.call("tp", 0, torch.bfloat16))
    with pytest.raises(
        ActorError, match=r"'embed.weight' has shape \(11, 6\) in the store and \(12, 6\) here"
    ):
        run(cluster.generator.pull_wrong_shape.call(store, version))
    net = UnevenNet(seed=0).state_dict()
    extra = torch.zeros(1)
    del net["gate"]
    with pytest.raises(WeightMismatchError, match="missing 'extra', not asked for 'gate'"):
        run(store.pull(version=version, state_dict=net | {"extra": extra}))
    run(store.delete(version))


def test_state_dict_entries_that_are_no_tensors_are_refused(cluster):
    with pytest.raises(ValueError, match=r"state_dict\['_extra_state'\] is a dict"):
        cluster.meshes.run(cluster.fp32.push(version=1, state_dict={"_extra_state": {}}))


@SLOW_ON_BOTH
def test_a_rank_that_dies_leaves_an_incomplete_version_that_can_be_deleted(cluster):
    run, store = cluster.meshes.run, cluster.fp32
    version = cluster.next_version()
    mesh = cluster.meshes.spawn_mesh(2)
    trainer = mesh.spawn("trainer", WeightActor)
    run(trainer.setup.call())
    run(trainer.build.call("fsdp", version, torch.float32))
    assert run(trainer.slice(procs=0).push.call_one(store, version)).num_bytes > 0
    dies = cluster.meshes.pids(mesh)[1]
    with pytest.raises(SupervisionError):  # of its exit status, or, on a busy machine, of its silence
        run(trainer.slice(procs=1).push.call_one(store, version, [1]))
    assert identify(dies) is None
    with pytest.raises(IncompleteVersionError) as caught:
        run(store.announce(version))
    assert f"version {version} is incomplete: 7 of 9 tensors lack a rank's part" in str(caught.value)
    assert "there are mesh coordinates [(0,)] of a mesh of (2,)" in str(caught.value)
    run(store.delete(version))
    assert run(store.stats()).num_boxes == 0
    cluster.meshes.stop(mesh)


@SLOW_ON_BOTH
def test_a_hanging_volume_gives_a_deadline_error_that_names_everything(cluster):
    run = cluster.meshes.run
    mesh = cluster.meshes.spawn_mesh(1, process_group=False)
    store = WeightStore.Config(timeout_s=2, transport=cluster.transport).build()
    run(store.start(mesh))
    (pid,) = cluster.meshes.pids(mesh)
    state_dict = {"w": torch.zeros(1000), "b": torch.zeros(4)}
    run(store.push(version=1, state_dict=state_dict))
    run(store.announce(1))
    os.kill(pid, signal.SIGSTOP)
    # Of a process of many threads one may still answer until all have stopped.
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    try:
        with pytest.raises(WeightTimeoutError) as caught:
            run(store.push(version=2, state_dict=state_dict))
        assert str(caught.value) == (
            "weight store: push of version 2 (2 tensors) on rank 0 not finished within timeout_s=2: "
            "waited for the index"
        )
        with pytest.raises(
            WeightTimeoutError, match=r"pull of version 1 \(2 tensors\) on rank 0 .* the index"
        ):
            run(store.pull(version=1, state_dict=state_dict))
        with pytest.raises(WeightTimeoutError, match="announce of version 2 on rank 0"):
            run(store.announce(2))
    finally:
        os.kill(pid, signal.SIGCONT)
    cluster.meshes.stop(mesh)


@SLOW_ON_BOTH
def test_a_dead_volume_is_an_error_that_names_the_operation(cluster):
    run = cluster.meshes.run
    mesh = cluster.meshes.spawn_mesh(1, process_group=False)
    store = WeightStore.Config(timeout_s=60, transport=cluster.transport).build()
    run(store.start(mesh))
    (pid,) = cluster.meshes.pids(mesh)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(
        WeightStoreError, match=r"push of version 1 \(1 tensors\) on rank 0 failed: lost the index"
    ):
        run(store.push(version=1, state_dict={"w": torch.zeros(1000)}))
    cluster.meshes.stop(mesh)
