"""The store between processes: Monarch meshes, gloo process groups, FSDP2 and TP."""

from __future__ import annotations

import copy
import dataclasses
import os
import signal
from pathlib import Path

import pytest
import torch
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from rl.utils.processes import identify
from rl.weights.checksum import check_sums
from rl.weights.plan import parts_of, plan_reads
from rl.weights.shared_memory import SegmentMaps
from rl.weights.types import (
    IncompleteVersionError,
    VersionExistsError,
    VersionNotFoundError,
    WeightMismatchError,
    WeightParityError,
    WeightStoreError,
    WeightTimeoutError,
)
from tests.support.weight_actors import UnevenNet, WeightActor, build_qwen3

pytestmark = [pytest.mark.medium, pytest.mark.timeout(180)]


LAYOUTS = [
    ("auto", "fsdp_tp", "tp"),
    ("auto", "fsdp_tp", "single"),
    ("auto", "hsdp", "tp"),
    ("auto", "fsdp", "single"),
    ("auto", "ddp", "tp"),
    ("auto", "ddp_dtensor", "single"),
    ("auto", "single", "tp"),
    ("torchstore", "fsdp_tp", "tp"),
    ("files", "fsdp_tp", "single"),
]


def expected(version, dtype):
    """Return the weights of a version: parameters in `dtype`, buffers in their own."""
    net = UnevenNet(seed=version)
    parameters = {name for name, _ in net.named_parameters()}
    return {name: v.to(dtype) if name in parameters else v for name, v in net.state_dict().items()}


def assert_same_bits(actual, wanted):
    assert actual.keys() == wanted.keys()
    for name, value in wanted.items():
        assert actual[name].dtype == value.dtype, name
        assert torch.equal(actual[name].detach(), value), name


@pytest.mark.parametrize(("cluster", "source", "target"), LAYOUTS, indirect=["cluster"])
def test_float32_trainer_to_bfloat16_generator_is_bit_exact_after_the_cast(cluster, source, target):
    version, _ = cluster.push(cluster.bf16, source)
    for full in cluster.pull(cluster.bf16, target, version, torch.bfloat16):
        assert_same_bits(full, expected(version, torch.bfloat16))
    cluster.meshes.run(cluster.bf16.delete(version))


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("target", ["generator", "whole"])
def test_qwen3_from_the_trainers_plan_to_the_generators_is_bit_exact_after_the_cast(cluster, target, experts):
    """A router's bias is not cast: a rounded bias would choose other experts."""
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


def test_replicas_are_sent_once(cluster):
    """bf16: 66 + 42 + 7 + 42 + 6 + 6 + 1 parameters; float32 scale; 2 int64 steps."""
    num_bytes = 2 * (66 + 42 + 7 + 42 + 6 + 6 + 1) + 4 + 16
    for layout in ("ddp", "ddp_dtensor", "hsdp", "fsdp_tp"):
        version, sent = cluster.push(cluster.bf16, layout)
        assert sum(sent) == num_bytes, layout
        cluster.meshes.run(cluster.bf16.delete(version))


@pytest.mark.parametrize("cluster", ["auto", "torchstore", "files"], indirect=True)
def test_pruning_keeps_two_versions_and_frees_the_others(cluster, tmp_path):
    run, store = cluster.meshes.run, cluster.start(cluster.volume_mesh, tmp_path)
    (pid,) = cluster.meshes.pids(cluster.volume_mesh)
    size = 32 * 2**20
    state_dict = {"w": torch.ones(size // 4), "b": torch.ones(3)}

    def push(version):
        assert run(store.push(version=version, state_dict=state_dict)).num_bytes == size + 12
        run(store.announce(version))
        return run(store.prune())

    assert [push(1), push(2), push(3)] == [[], [], [1]]
    assert run(store.versions()) == [2, 3]
    resident = resident_bytes(pid)
    for version in range(4, 10):
        assert push(version) == [version - 2]
    assert run(store.versions()) == [8, 9]
    assert resident_bytes(pid) - resident < 3 * size
    if cluster.transport == "files":
        assert [file.parent.name for file in sorted(tmp_path.rglob("*.bin"))] == ["v8", "v9"]
    run(store.stop())
    run(store.stop())
    assert list(tmp_path.iterdir()) == []


def resident_bytes(pid):
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_version_is_never_overwritten_but_may_return_after_its_deletion(cluster):
    run, store = cluster.meshes.run, cluster.fp32
    version, target = cluster.next_version(), torch.full((3,), 7.0)
    exists = f"version {version} is already"
    run(store.push(version=version, state_dict={"w": torch.zeros(3)}))
    with pytest.raises(VersionExistsError, match=f"{exists} pushed by rank 0"):
        run(store.push(version=version, state_dict={"w": torch.ones(3)}))
    run(store.announce(version))
    for again in (store.push(version=version, state_dict={"v": torch.ones(3)}), store.announce(version)):
        with pytest.raises(VersionExistsError, match=f"{exists} announced"):
            run(again)
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
    target = torch.full((3,), 7.0)
    run(store.push(version=first, state_dict={"w": torch.zeros(3)}))
    run(store.announce(first))
    run(store.push(version=second, state_dict={"w": torch.ones(3)}))
    state = rf"announced are \[{first}\], pushed and not announced are \[{second}\]"
    for version in (second, 12345):
        with pytest.raises(VersionNotFoundError, match=f"version {version} is not in the store; {state}"):
            run(store.pull(version=version, state_dict={"w": target}))
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
    with pytest.raises(ActorError, match=r"'embed.weight' has shape \(11, 6\) in the store and \(12, 6\)"):
        run(cluster.generator.pull_wrong_shape.call(store, version))
    net = UnevenNet(seed=0).state_dict()
    extra = torch.zeros(1)
    del net["gate"]
    with pytest.raises(WeightMismatchError, match="missing 'extra', not asked for 'gate'"):
        run(store.pull(version=version, state_dict=net | {"extra": extra}))
    run(store.delete(version))


def test_dead_rank_leaves_an_incomplete_version_that_can_be_deleted(cluster):
    run, store = cluster.meshes.run, cluster.fp32
    version = cluster.next_version()
    mesh = cluster.meshes.spawn_mesh(2)
    trainer = mesh.spawn("trainer", WeightActor)
    run(trainer.setup.call())
    run(trainer.build.call("fsdp", version, torch.float32))
    assert run(trainer.slice(procs=0).push.call_one(store, version)).num_bytes > 0
    dies = cluster.meshes.pids(mesh)[1]
    with pytest.raises(SupervisionError):  # from its exit status, or its silence on a busy machine
        run(trainer.slice(procs=1).push.call_one(store, version, [1]))
    assert identify(dies) is None
    with pytest.raises(IncompleteVersionError, match=f"version {version} is incomplete: 7 of 9 tensors lack"):
        run(store.announce(version))
    run(store.delete(version))
    cluster.meshes.stop(mesh)


def test_hanging_volume_meets_the_deadline_and_a_dead_one_is_named(cluster, tmp_path):
    run, mesh = cluster.meshes.run, cluster.meshes.spawn_mesh(1, process_group=False)
    store = cluster.start(mesh, tmp_path)
    (pid,) = cluster.meshes.pids(mesh)
    state_dict = {"w": torch.zeros(1000), "b": torch.zeros(4)}
    run(store.push(version=1, state_dict=state_dict))
    run(store.announce(1))
    store.config = dataclasses.replace(store.config, timeout_s=3)
    os.kill(pid, signal.SIGSTOP)
    # One thread may still answer until all have stopped.
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    with pytest.raises(WeightTimeoutError, match=r"push of version 2 .* within timeout_s=3: .* the index"):
        run(store.push(version=2, state_dict=state_dict))
    with pytest.raises(WeightTimeoutError, match=r"pull of version 1 \(2 tensors\) on rank 0 .* the"):
        run(store.pull(version=1, state_dict=state_dict))
    os.kill(pid, signal.SIGKILL)
    store.config = dataclasses.replace(store.config, timeout_s=60)
    with pytest.raises(WeightStoreError, match=r"push of version 3 \(2 tensors\) on rank 0 failed: lost the"):
        run(store.push(version=3, state_dict=state_dict))
    cluster.meshes.stop(mesh)


def stored_boxes(store, run, version, name):
    return run(store._index.locate.call_one(version))[name]


def pulled_sums(cluster, store, version, dtype=torch.bfloat16):
    cluster.meshes.run(cluster.generator.build.call("tp", 999, dtype))
    answers = cluster.meshes.run(cluster.generator.pull.call(store, version))
    return [box for _, sums in answers.items() for box in sums]


def check(cluster, version, pulled):
    check_sums(version=version, pushed=cluster.pushed[version], pulled={"generator": pulled})


def test_parity_catches_corrupted_stale_and_miscast_weights(cluster):
    run, store = cluster.meshes.run, cluster.bf16
    version, _ = cluster.push(store, "fsdp_tp")
    check(cluster, version, pulled_sums(cluster, store, version))

    def held():
        return [box for _, sums in run(cluster.generator.sums.call()).items() for box in sums]

    check(cluster, version, held())
    run(cluster.generator.keep_old.call("down.weight", version - 1))
    with pytest.raises(WeightParityError, match=r"other bits in 'down.weight' .* still of another version"):
        check(cluster, version, held())
    with pytest.raises(WeightParityError, match=r"'float32', .* was sent as \('bfloat16'"):
        check(cluster, version, pulled_sums(cluster, store, version, torch.float32))
    stored, *others = stored_boxes(store, run, version, "up.weight")
    assert len(others) == 3
    with SegmentMaps(max_age=1).holding(stored.place) as data:
        stored.part.view(data).view(torch.int16)[0, 1] ^= 1
    with pytest.raises(WeightParityError, match=f"version {version}: generator 'generator' holds other bits"):
        check(cluster, version, pulled_sums(cluster, store, version))
    run(store.delete(version))


@pytest.mark.filterwarnings("ignore:is_rdma_available:DeprecationWarning")
def test_pushed_version_reaches_hosts_that_share_no_memory(cluster):
    """The two ways are messages, and torchstore's own transport, which uses RDMA where there is hardware."""
    run, store = cluster.meshes.run, cluster.bf16
    version, _ = cluster.push(store, "fsdp_tp")
    far = copy.copy(store)
    far.config = dataclasses.replace(store.config, transport="torchstore")
    wanted = expected(version, torch.bfloat16)
    for full in cluster.pull(far, "tp", version, torch.bfloat16):
        assert_same_bits(full, wanted)

    received = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    stored = run(store._index.locate.call_one(version))
    for number, reads in plan_reads(version, parts_of(received), stored).items():
        run(store._here().fetch_by_rdma(store._volume(number), version, reads))
    assert_same_bits(received, wanted)
    run(store.delete(version))
