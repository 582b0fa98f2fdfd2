import json
import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from actors.launch.cleanup import free_port
from rl.distributed.process_group import CommConfig, World, await_ranks, connect
from tests.support.distributed import run_ranks

ADDRESS = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}


def test_world_is_read_from_torchruns_variables():
    world = World.from_env({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", **ADDRESS})
    assert world == World(rank=5, size=8, local_rank=1, master_addr="10.0.0.1", master_port=1234)
    assert World.from_env({}) == World(rank=0, size=1)


def test_incomplete_environment_names_what_is_missing():
    with pytest.raises(ValueError, match=r"WORLD_SIZE=2 is set .*, but RANK, MASTER_PORT is not"):
        World.from_env({"WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"})


def test_existing_group_of_another_size_is_refused():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        with pytest.raises(
            ValueError, match="world size 2 differs from the existing process group's 4"
        ):
            connect(world=World(size=2), device=torch.device("cpu"), comm=CommConfig())
    finally:
        dist.destroy_process_group()


def test_single_process_makes_no_group():
    assert not connect(world=World(), device=torch.device("cpu"), comm=CommConfig())
    assert not dist.is_initialized()


@pytest.mark.parametrize("rank", [0, 1])
def test_absent_ranks_raise_a_timeout_naming_the_address(rank):
    world = World(rank=rank, size=2, master_port=free_port())
    expected = rf"rank {rank}: not all 2 ranks .* 127\.0\.0\.1:{world.master_port} within 0\.3 s"
    with pytest.raises(TimeoutError, match=expected):
        connect(world=world, device=torch.device("cpu"), comm=CommConfig(init_timeout_s=0.3))
    assert not dist.is_initialized()


def miss_the_last_of_five(size, folder):
    """Run four sums on rank 1 and five on rank 0; return the notes of rank 0's error."""
    comm = CommConfig(trace_buffer_size=size, init_timeout_s=60.0)
    connect(world=World.from_env(), device=torch.device("cpu"), comm=comm)
    value = torch.ones(3)
    for _ in range(4):
        dist.all_reduce(value)
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    if dist.get_rank() == 1:
        return []
    try:
        with await_ranks("a sum", record_in=folder):
            dist.all_reduce(torch.ones(7))
    except RuntimeError as error:
        return error.__notes__
    return ["nothing raised"]


@pytest.mark.medium
@pytest.mark.parametrize("size", [3, 0])
def test_latest_collectives_are_written_when_one_fails(size, tmp_path):
    notes, _ = run_ranks(miss_the_last_of_five, 2, size, str(tmp_path / "run"), timeout_s=50)
    assert notes[0] == "rank 0 of 2 of the trainer, in a sum"
    if size == 0:
        assert len(notes) == 1
        assert list(tmp_path.iterdir()) == []
        return
    file = tmp_path / "run" / "collectives_rank0.json"
    assert notes[1] == f"the latest collectives of this rank are in {file}"
    entries = json.loads(file.read_text())
    assert [entry["collective_seq_id"] for entry in entries] == [
        4,
        5,
        6,
    ]  # of four sums, a barrier, a sum
    assert entries[-1]["profiling_name"] == "gloo:all_reduce"
    assert entries[-1]["input_sizes"] == [[7]]
    callers = [Path(frame["filename"]).name for frame in entries[-1]["frames"]]
    assert Path(__file__).name in callers


@pytest.mark.medium
@pytest.mark.parametrize(("interfaces", "num_devices"), [("", 1), ("lo,lo", 2)])
def test_every_gloo_group_has_one_worker_and_the_requested_devices(interfaces, num_devices):
    counted = run_ranks(count_threads, 4, interfaces, timeout_s=60)
    assert counted == [[(1, num_devices), (4, 4 * num_devices)]] * 4


def count_threads(interfaces: str) -> list[tuple[int, int]]:
    """Count workers and devices with the default group alone, then with three more groups."""

    def counted() -> tuple[int, int]:
        names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
        return names.count("pt_gloo_runloop"), names.count("gloo_tcp_loop")

    os.environ["GLOO_SOCKET_IFNAME"] = interfaces
    comm = CommConfig(
        trace_buffer_size=0
    )  # The flight recorder's lock would keep the collectives apart.
    connect(world=World.from_env(), device=torch.device("cpu"), comm=comm, always=True)
    dist.barrier()  # a worker thread has its name once it ran a collective
    alone = counted()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for group in (*mesh.get_all_groups(), dist.new_group(backend="gloo")):
        dist.barrier(group)
    together = counted()
    dist.destroy_process_group()
    return [alone, together]
