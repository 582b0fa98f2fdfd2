import numpy as np
import pytest

from actors.vllm.driver import Lockstep, Turn
from tests.actors.vllm_lockstep_ranks import REQUEST, SILENCE_S, TURNS, drawn, talk
from tests.support.distributed import run_ranks

pytestmark = pytest.mark.medium


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(talk, 2, timeout_s=40)


def test_turns_arrive_as_they_were_sent(ranks):
    first, *rest = ranks[1]["turns"]
    assert rest == TURNS[1:]
    assert (first.abort, first.step, first.update, first.stop) == ((1, 2), True, None, False)
    (request,) = first.admit
    assert np.array_equal(request.prompt, REQUEST.prompt)
    others = ("id", "max_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "seed")
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
