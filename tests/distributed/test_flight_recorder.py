import json
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rl.distributed.process_group import CommConfig, World, awaiting, connect
from tests.support.distributed import run_ranks


def miss_the_last_of_five(size, folder):
    """Rank 1 takes part in four sums, rank 0 in five: the notes of what rank 0 gets to know."""
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
        with awaiting("a sum", record_in=folder):
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
    assert [entry["collective_seq_id"] for entry in entries] == [4, 5, 6]  # of four sums, a barrier, a sum
    assert entries[-1]["profiling_name"] == "gloo:all_reduce"
    assert entries[-1]["input_sizes"] == [[7]]
    callers = [Path(frame["filename"]).name for frame in entries[-1]["frames"]]
    assert Path(__file__).name in callers
