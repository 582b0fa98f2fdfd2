import torch
import torch.distributed as dist

from rl.distributed.compat import use_one_gloo_worker
from rl.distributed.expert_parallel import ExpertExchange
from tests.support.distributed import run_ranks


def exchange():
    """Rank 0 has experts 0 and 1, rank 1 experts 2 and 3; expert n multiplies its rows by its
    weight.
    """
    use_one_gloo_worker()
    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    weights = torch.tensor([2.0, 3.0] if rank == 0 else [5.0, 7.0], requires_grad=True)
    seen = []

    def compute(rows_SE, ends_N):
        seen.extend([rows_SE.flatten().tolist(), ends_N.tolist()])
        counts = ends_N.diff(prepend=ends_N.new_zeros(1))
        return rows_SE * weights.repeat_interleave(counts).unsqueeze(1)

    # Rank 0: a row for each expert but the third; rank 1: two rows for the second expert.
    mine = torch.tensor([[1.0], [2.0], [4.0]] if rank == 0 else [[8.0], [16.0]], requires_grad=True)
    ends = torch.tensor([1, 2, 2, 3] if rank == 0 else [0, 2, 2, 2])
    out = ExpertExchange(group)(mine, ends, compute)
    (out * torch.arange(1.0, len(out) + 1).unsqueeze(1)).sum().backward()
    assert mine.grad is not None
    assert weights.grad is not None
    return {
        "seen": seen,
        "out": out.flatten().tolist(),
        "mine_grad": mine.grad.flatten().tolist(),
        "weights_grad": weights.grad.tolist(),
    }


def test_rows_travel_to_their_experts_and_gradients_back():
    zero, one = run_ranks(exchange, 2, timeout_s=50)
    # By expert, and by rank within an expert.
    assert zero["seen"] == [[1, 2, 8, 16], [1, 4]]
    assert one["seen"] == [[4], [0, 1]]
    assert zero["out"] == [1 * 2, 2 * 3, 4 * 7]
    assert one["out"] == [8 * 3, 16 * 3]
    assert zero["mine_grad"] == [2, 2 * 3, 3 * 7]
    assert one["mine_grad"] == [3, 2 * 3]
    # A weight's gradient is over all ranks' rows: 2 * 2 of rank 0, 8 + 16 * 2 of rank 1.
    assert zero["weights_grad"] == [1, 2 * 2 + 8 + 16 * 2]
    assert one["weights_grad"] == [0, 4 * 3]
