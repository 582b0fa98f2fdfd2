"""Turns that two tensor-parallel ranks exchange."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch.distributed as dist

from actors.vllm.lockstep import Lockstep, Pause, Turn
from actors.vllm.requests import Drawn, Request
from rl.types import SamplingParams
from tests.support.distributed import run_ranks

pytestmark = pytest.mark.medium

REQUEST = Request(
    id=7,
    prompt=np.array([3, 1, 4], dtype=np.int32),
    max_tokens=5,
    sampling=SamplingParams(max_tokens=5, temperature=0.7, top_p=0.9, top_k=3, stop_token_ids=(2,)),
    seed=2**62,
)
TURNS = [
    Turn(admit=(REQUEST,), abort=(1, 2), step=True),
    Turn(step=True),
    Turn(),
    Turn(pause=Pause(version=9)),
    Turn(stop=True),
]
SILENCE_S = 1.0


def drawn(token_id: int) -> Drawn:
    return Drawn(tokens=[(7, token_id, -0.5)])


def talk() -> dict[str, object]:
    """Return the messages received on this rank, and the expected errors."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    lockstep = Lockstep(rank=rank, size=2, timeout_s=30)
    seen: dict[str, object] = {}
    received = []
    for turn in TURNS:
        received.append(lockstep.exchange(turn if rank == 0 else None))
        lockstep.record(drawn(11))
    seen["turns"] = received
    seen["agreements"] = [lockstep.all_agree(ok) for ok in (True, rank == 0, rank == 1)]

    lockstep.record(drawn(11 + rank))
    seen["divergence"] = _error_of(lambda: lockstep.exchange(Turn() if rank == 0 else None))

    impatient = Lockstep(rank=rank, size=2, timeout_s=SILENCE_S)
    if rank == 1:
        started = time.monotonic()
        seen["silence"] = _error_of(lambda: impatient.exchange(None))
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


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(talk, 2, timeout_s=40)


def test_turns_arrive_as_they_were_sent(ranks):
    first, *rest = ranks[1]["turns"]
    assert rest == TURNS[1:]
    assert (first.abort, first.step, first.pause, first.stop) == ((1, 2), True, None, False)
    (request,) = first.admit
    assert np.array_equal(request.prompt, REQUEST.prompt)
    others = ("id", "max_tokens", "sampling", "seed")
    assert [getattr(request, n) for n in others] == [getattr(REQUEST, n) for n in others]


def test_ranks_agree_only_if_every_rank_does(ranks):
    assert ranks[0]["agreements"] == ranks[1]["agreements"] == [True, False, False]


def test_rank_that_drew_other_tokens_stops(ranks):
    assert ranks[1]["divergence"].startswith("RuntimeError: generator rank 1 drew other tokens than rank 0")


def test_rank_waits_no_longer_than_its_deadline(ranks):
    assert ranks[1]["silence"].startswith(
        "SilentRankError: generator rank 1 awaited rank 0's next turn, at most 1 s"
    )
    assert SILENCE_S * 0.9 < ranks[1]["silence_s"] < SILENCE_S * 5


def test_single_rank_needs_no_messages():
    alone = Lockstep(rank=0, size=1, timeout_s=1)
    assert alone.exchange(Turn(step=True)) == Turn(step=True)
    alone.record(drawn(3))
    assert (alone.all_agree(True), alone.all_agree(False), alone.idle_turn_s) == (True, False, None)
