"""Messages between two ranks, for `test_vllm_lockstep.py`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np
import torch.distributed as dist

from actors.vllm.driver import Lockstep, Turn
from actors.vllm.requests import Drawn, Request

REQUEST = Request(
    id=7,
    prompt=np.array([3, 1, 4], dtype=np.int32),
    max_tokens=5,
    temperature=0.7,
    top_p=0.9,
    top_k=3,
    stop_token_ids=(2,),
    seed=2**62,
)
TURNS = [
    Turn(admit=(REQUEST,), abort=(1, 2), step=True),
    Turn(step=True),
    Turn(),
    Turn(update=9),
    Turn(stop=True),
]
SILENCE_S = 1.0


def drawn(token_id: int) -> Drawn:
    return Drawn(request_ids=[7], token_ids=[token_id], logprobs=[-0.5], finished={})


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
