"""Turns that two tensor-parallel ranks exchange; `test_vllm_two_ranks.py` has engines that follow
them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from actors.vllm.lockstep import EngineTurn, Lockstep
from actors.vllm.requests import Drawn
from tests.support.distributed import run_ranks

SILENCE_S = 1.0


def drawn(token_id: int) -> Drawn:
    return Drawn(tokens=[(7, token_id, -0.5)])


def talk() -> dict[str, object]:
    """Return what this rank saw: agreements, and the expected errors."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    lockstep = Lockstep(rank=rank, size=2, timeout_s=30)

    def exchange(lockstep: Lockstep) -> EngineTurn:
        return lockstep.exchange(EngineTurn(step=True) if rank == 0 else None)

    seen: dict[str, object] = {"turn": exchange(lockstep)}
    lockstep.record(drawn(11))
    exchange(lockstep)
    seen["agreements"] = [lockstep.all_agree(ok) for ok in (True, rank == 0, rank == 1)]
    lockstep.record(drawn(11 + rank))
    seen["divergence"] = _error_of(lambda: exchange(lockstep))
    impatient = Lockstep(rank=rank, size=2, timeout_s=SILENCE_S)
    if rank == 1:
        started = time.monotonic()
        seen["silence"] = _error_of(lambda: exchange(impatient))
        seen["silence_s"] = time.monotonic() - started
    dist.monitored_barrier()
    dist.destroy_process_group()
    return seen


def _error_of(function: Callable[[], object]) -> str:
    try:
        function()
    except Exception as error:  # noqa: BLE001  (any, to be looked at)
        return f"{type(error).__name__}: {error}"
    return "none"


@pytest.mark.medium
def test_rank_follows_rank_0_and_stops_if_it_diverges_or_hears_nothing():
    first, second = run_ranks(talk, 2, timeout_s=40)
    assert first["turn"] == second["turn"] == EngineTurn(step=True)
    assert first["agreements"] == second["agreements"] == [True, False, False]
    assert second["divergence"].startswith(
        "RuntimeError: generator rank 1 drew other tokens than rank 0"
    )
    assert second["silence"].startswith(
        "SilentRankError: generator rank 1 awaited rank 0's next turn, at most 1 s"
    )
    assert SILENCE_S * 0.9 < second["silence_s"] < SILENCE_S * 5
