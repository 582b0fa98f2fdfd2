"""What ranks do with groups of gloo for `test_gloo.py`."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rl.distributed.process_group import CommConfig, World, connect, disconnect

AT_A_TIME = 32
"""Collectives that are started before the first of them is waited for."""


def gather_and_add(num_rounds: int) -> np.ndarray:
    """[rounds, at a time]: sums of what came back, of all-gathers and all-reduces in turn, on one rank."""
    join()
    ops, group = torch.ops._c10d_functional, dist.distributed_c10d._get_default_group().group_name
    mine = torch.ones(4)
    sums = torch.empty(num_rounds, AT_A_TIME)
    for of_round in sums:
        started = [
            ops.all_reduce(mine, "sum", group) if number % 2 else ops.all_gather_into_tensor(mine, 1, group)
            for number in range(AT_A_TIME)
        ]
        arrived = [ops.wait_tensor(result) for result in started]
        of_round.copy_(torch.stack(arrived).sum(1))
    disconnect()
    return sums.numpy()


def count_threads(interfaces: str) -> list[tuple[int, int]]:
    """Workers and devices with the group of all ranks alone, then with those of two axes and one more."""
    os.environ["GLOO_SOCKET_IFNAME"] = interfaces
    join()
    dist.barrier()  # a thread names itself as it starts; to have run a collective, it has
    alone = gloo_threads()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for group in (*mesh.get_all_groups(), dist.new_group(backend="gloo")):
        dist.barrier(group)
    counted = [alone, gloo_threads()]
    disconnect()
    return counted


def join() -> None:
    """Without a record of the collectives: it is kept under a lock, which spaces them."""
    comm = CommConfig(trace_buffer_size=0)
    connect(world=World.from_env(), device=torch.device("cpu"), comm=comm, always=True)


def gloo_threads() -> tuple[int, int]:
    names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    return names.count("pt_gloo_runloop"), names.count("gloo_tcp_loop")
