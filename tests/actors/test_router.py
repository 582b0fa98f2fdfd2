"""Router over fakes in virtual time, which makes overlap deterministic."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.router import Router
from rl.types import SamplingParams
from rl.utils.errors import RunError
from tests.support.fakes import SimulatedPolicy
from tests.support.virtual_time import run_in_virtual_time

SAMPLING = SamplingParams(max_tokens=8, num_samples=2, seed=1)


def router_of(replicas: list[SimulatedPolicy], **settings: Any) -> Router:
    """Return a router over replicas that can always be called."""

    async def is_up() -> None:
        """Return at once."""

    pool: Any = SimpleNamespace(up=lambda: range(len(replicas)), wait_until_one_is_up=is_up)
    return Router(replicas, pool=pool, **settings)


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


def test_calls_of_a_session_stay_on_its_first_replica():
    async def main() -> list[str]:
        router = router_of([named("A", 1), named("B", 1)], strategy="sticky")
        names = []
        for session in ("s", "t", "s", "t", "t"):
            busy = asyncio.create_task(ask(router, "other", session=f"busy {session}"))
            await asyncio.sleep(0.1)
            names.append(replies(await ask(router, "1", session=session))[0][0][0])
            await busy
        return names

    names = run_in_virtual_time(main())[0]
    assert names[0] == names[2]
    assert names[1] == names[3] == names[4]


def test_begun_completions_of_other_prompts_are_refused():
    asking = router_of([named("A")]).generate([tokens("1"), tokens("2")], sampling=SAMPLING, begun=[[]])
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
