import pytest
import torch
import torch.distributed as dist

from rl.distributed.process_group import CommConfig, World, awaiting, connect
from tests.support.distributed import free_port


def test_world_is_read_as_torchrun_sets_it():
    environ = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
    }
    assert World.from_env(environ) == World(
        rank=5, size=8, local_rank=1, master_addr="10.0.0.1", master_port=1234
    )


def test_empty_environment_is_a_single_process():
    assert World.from_env({}) == World(rank=0, size=1)


def test_missing_variable_is_named():
    with pytest.raises(ValueError, match=r"WORLD_SIZE=2 .*MASTER_ADDR, MASTER_PORT is not"):
        World.from_env({"WORLD_SIZE": "2", "RANK": "0"})


def test_variable_that_is_no_number_is_named():
    with pytest.raises(ValueError, match="RANK='one'"):
        World.from_env({"WORLD_SIZE": "2", "RANK": "one", "MASTER_ADDR": "a", "MASTER_PORT": "1"})


def test_rank_beyond_the_world_is_refused():
    with pytest.raises(ValueError, match="rank=2"):
        World(rank=2, size=2)


def test_single_process_makes_no_group():
    assert not connect(world=World(), device=torch.device("cpu"), comm=CommConfig())
    assert not dist.is_initialized()


@pytest.mark.parametrize("rank", [0, 1])
def test_absent_ranks_are_a_timeout_that_says_where_they_were_awaited(rank):
    world = World(rank=rank, size=2, master_port=free_port())
    expected = rf"rank {rank}: not all 2 ranks .* 127\.0\.0\.1:{world.master_port} within 0\.3 s"
    with pytest.raises(TimeoutError, match=expected):
        connect(world=world, device=torch.device("cpu"), comm=CommConfig(init_timeout_s=0.3))
    assert not dist.is_initialized()


def test_error_passes_without_a_group_as_it_is():
    with pytest.raises(RuntimeError, match="broken") as caught, awaiting("a call"):
        raise RuntimeError("broken")
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("settings", [{"init_timeout_s": 0.0}, {"train_timeout_s": 0.0}])
def test_timeout_must_be_positive(settings):
    (field,) = settings
    with pytest.raises(ValueError, match=f"{field}=0"):
        CommConfig(**settings)


def test_size_of_the_record_of_collectives_must_not_be_negative():
    with pytest.raises(ValueError, match="trace_buffer_size=-1: must be at least 0"):
        CommConfig(trace_buffer_size=-1)
