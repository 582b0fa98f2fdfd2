"""Router over fakes in virtual time, which makes overlap deterministic."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.cluster.clients import CallSeeds, Router
from actors.launch.calls import ActorLostError
from rl.types import SamplingParams
from rl.utils.errors import RunError
from tests.support.fakes import SimulatedPolicy, completion
from tests.support.virtual_time import run_in_virtual_time

SAMPLING = SamplingParams(max_tokens=8, num_samples=2, seed=1)


def router_of(replicas: list[SimulatedPolicy], **settings: Any) -> Router:
    """Return a router over replicas that can always be called."""

    async def is_up() -> None:
        """Return at once."""

    pool: Any = SimpleNamespace(list_up=lambda: range(len(replicas)), wait_until_one_is_up=is_up)
    return Router(replicas, pool=pool, **settings)


class SeedsOnly:
    """Replica that notes the seeds of its calls; the first `num_lost` calls lose it."""

    def __init__(self, seen: list[int | None], *, num_lost: int = 0) -> None:
        self.seen = seen
        self.num_lost = num_lost

    async def generate(self, prompts: Any, *, sampling: SamplingParams, **settings: Any) -> Any:
        self.seen.append(sampling.seed)
        if len(self.seen) <= self.num_lost:
            raise ActorLostError("it is dead", role="generator")
        return [[] for _ in prompts]


def seeds_of_calls(num_calls: int, *, given: int | None = None, **seeds: Any) -> list[int | None]:
    """Return the seeds that two replicas get in calls of one prompt."""
    seen: list[int | None] = []
    replicas: Any = [SeedsOnly(seen), SeedsOnly(seen)]
    router = router_of(replicas, strategy="round_robin", seeds=CallSeeds(**seeds))

    async def main() -> None:
        for _ in range(num_calls):
            await router.generate([tokens("1")], sampling=replace(SAMPLING, seed=given))

    run_in_virtual_time(main())
    return seen


def tokens(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)


def named(name: str, seconds: float = 1.0, **settings: Any) -> SimulatedPolicy:
    return SimulatedPolicy(
        reply=lambda prompt, i: f"{name}{prompt}{i}", generate_s=lambda prompt: seconds, **settings
    )


def ask(router: Router, *texts: str, session: str | None = None) -> Any:
    return router.generate([tokens(t) for t in texts], sampling=SAMPLING, session=session)


def replies(groups: Any) -> list[list[str]]:
    return [[bytes(c.token_ids[:-1].tolist()).decode() for c in group] for group in groups]


def test_rollouts_of_a_call_are_spread_and_returned_in_order():
    router = router_of([named("A"), named("B")])
    groups, _ = run_in_virtual_time(ask(router, "1", "2", "3"))
    assert replies(groups) == [["A10", "A11"], ["B20", "B21"], ["A30", "A31"]]
    assert router.num_running == [0, 0]


def test_equal_prompts_of_a_call_go_to_one_replica_in_one_call():
    replicas = [named("A"), named("B")]
    router = router_of(replicas, strategy="round_robin")
    groups, _ = run_in_virtual_time(ask(router, "x", "y", "x"))
    assert [group[0][0] for group in replies(groups)] == ["A", "B", "A"]
    assert [replica.calls for replica in replicas] == [["generate"], ["generate"]]


@pytest.mark.parametrize(
    ("strategy", "expected"), [("least_loaded", "ABB"), ("round_robin", "ABA"), ("sticky", "ABB")]
)
def test_busy_replica_is_avoided_unless_replicas_take_turns(strategy, expected):
    async def main() -> str:
        router = router_of([named("A", 10), named("B", 1)], strategy=strategy)
        first, second = (asyncio.create_task(ask(router, text)) for text in "12")
        await asyncio.sleep(5)  # B is idle again
        third = await ask(router, "3")
        return "".join(replies(groups)[0][0][0] for groups in (await first, await second, third))

    assert run_in_virtual_time(main())[0] == expected


def busy_then(router: Router, calls: list[str | None]) -> str:
    """Return the first letters of the replicas that these sessions' calls go to, while A is busy
    after the first.
    """

    async def main() -> str:
        chosen = ""
        for session in calls:
            chosen += replies(await ask(router, "1", session=session))[0][0][0]
            router.num_running[0] = 10
        return chosen

    return run_in_virtual_time(main())[0]


def test_calls_of_a_session_stay_on_its_first_replica():
    for strategy, expected in (("sticky", "ABABB"), ("least_loaded", "ABBBB")):
        router = router_of([named("A"), named("B")], strategy=strategy)
        assert busy_then(router, ["s", "t", "s", "t", None]) == expected


def test_least_recently_used_session_is_forgotten(monkeypatch):
    monkeypatch.setattr("actors.cluster.clients.MAX_SESSIONS", 2)
    router = router_of([named("A"), named("B")], strategy="sticky")
    # t, which was used before s, makes room for u; s makes room for v.
    assert busy_then(router, ["s", "t", "s", "u", "s", "u", "v", "s"]) == "ABABABBB"


def test_each_replica_continues_the_completions_of_its_own_prompts():
    begun = [[completion(f"{prompt}{sample}") for sample in range(2)] for prompt in "123"]
    asking = router_of([named("A"), named("B")]).generate(
        [tokens(text) for text in "123"], sampling=SAMPLING, begun=begun
    )
    groups, _ = run_in_virtual_time(asking)
    assert replies(groups) == [["10", "11"], ["20", "21"], ["30", "31"]]


def test_begun_completions_of_other_prompts_are_refused():
    asking = router_of([named("A")]).generate(
        [tokens("1"), tokens("2")], sampling=SAMPLING, begun=[[]]
    )
    with pytest.raises(ValueError, match="begun has completions of 1 prompts, there are 2"):
        run_in_virtual_time(asking)


def test_error_of_one_replica_cancels_the_calls_to_the_others():
    class Broken(SimulatedPolicy):
        async def generate(self, *args: Any, **settings: Any) -> Any:
            raise RunError("generator_1 is gone")

    other = named("A", 30)
    router = router_of([other, Broken(reply=lambda prompt, i: "")])

    async def main() -> None:
        with pytest.raises(RunError, match="generator_1 is gone"):
            await ask(router, "1", "2")
        await asyncio.sleep(0)

    _, took_s = run_in_virtual_time(main())
    assert took_s == 0
    assert other.num_running == 0
    assert router.num_running == [0, 0]
