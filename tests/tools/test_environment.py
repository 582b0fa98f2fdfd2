import asyncio

import pytest

from rl.tools.calculator import Calculator
from rl.tools.environment import ToolEnvironment
from rl.tools.tool import FunctionTool, announce, render_call
from rl.types import Message, Problem, Reply, ToolCall
from tests.support.fakes import completion

PROBLEM = Problem(id="p/0", question="What is 6 times 7?", answer="42")


def reply(*calls, text=""):
    """Return a reply of this text and calls, each a text or a name with arguments."""
    text += "\n".join(
        c if isinstance(c, str) else render_call(ToolCall(name=c[0], arguments=c[1])) for c in calls
    )
    return Reply(text=text, completion=completion(text))


def calculate(expression):
    return ("calculator", {"expression": expression})


def environment(*tools, **settings):
    return ToolEnvironment(problem=PROBLEM, tools=(Calculator(), *tools), **settings)


def step(env, *calls, text=""):
    return asyncio.run(env.step(reply(*calls, text=text)))


def counts(observation):
    return {
        name.removeprefix("tools/"): n
        for name, n in observation.metrics.items()
        if name != "tools/s"
    }


def test_every_call_is_answered_in_order_and_an_answer_ends_the_episode():
    env = environment(system="Be brief.")
    assert env.opening() == (
        Message(role="system", content=announce(env.tools, "Be brief.")),
        Message(role="user", content="What is 6 times 7?"),
    )
    observation = step(env, calculate("6*7"), calculate("1/0"), text="Let me see. ")
    assert observation.messages == (
        Message(role="tool", content="42"),
        Message(role="tool", content="Error: division by zero"),
    )
    assert counts(observation) == {"calls": 2, "errors": 1, "timeouts": 0}
    assert 0 <= observation.metrics["tools/s"] < 1
    last = step(env, text="It is 42.")
    assert last.messages == ()
    assert last.metrics == {"tools/calls": 0, "tools/errors": 0, "tools/timeouts": 0, "tools/s": 0}


def test_calls_beyond_the_limit_are_not_made_and_a_reply_with_more_ends_the_episode():
    env = environment(max_calls=3)
    assert counts(step(env, calculate("1"))) == {"calls": 1, "errors": 0, "timeouts": 0}
    observation = step(env, *[calculate(str(n)) for n in range(2, 7)])
    assert [message.content for message in observation.messages] == [
        "2",
        "3",
        "Error: 3 more calls were not made: max_calls=3 is reached",
    ]
    assert counts(observation) == {"calls": 5, "errors": 3, "timeouts": 0}
    over = step(env, calculate("1"))
    assert over.messages == ()
    assert counts(over) == {"calls": 1, "errors": 1, "timeouts": 0}


def test_long_answers_lose_their_middle():
    def repeat(times: int) -> str:
        """Repeat.

        Args:
            times: how often
        """
        return "a" * times + "\ud800" + "b" * times

    (message,) = step(
        environment(FunctionTool(repeat), max_result_chars=100), ("repeat", {"times": 500})
    ).messages
    assert message.content == "a" * 50 + "\n[901 characters left out]\n" + "b" * 50
    (message,) = step(environment(FunctionTool(repeat)), ("repeat", {"times": 1})).messages
    assert message.content == "a?b"


def test_time_limit_of_a_tool_is_counted():
    async def wait() -> str:
        """Waits."""
        await asyncio.Event().wait()
        return ""

    observation = step(
        environment(FunctionTool(wait, time_limit_s=0.05)), ("wait", {}), calculate("1")
    )
    assert [message.content for message in observation.messages] == [
        "Error: wait took longer than 0.05 s and was stopped",
        "1",
    ]
    assert counts(observation) == {"calls": 2, "errors": 1, "timeouts": 1}
    assert observation.metrics["tools/s"] >= 0.05


@pytest.mark.parametrize("ends", ["broken", "cancelled"])
def test_calls_overlap_and_end_with_a_defect_of_another_tool_and_with_the_step(ends):
    held: list[None] = []
    taken = asyncio.Event()

    async def hold() -> str:
        """Never returns."""
        held.append(None)
        try:
            taken.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # cleaning up may need to wait
            held.pop()
        return ""

    class Broken:
        name, description = "broken", "Is defective."
        parameters = {"type": "object"}  # noqa: RUF012

        async def call(self, arguments):
            raise AssertionError("a defect")

    async def run():
        tools = (FunctionTool(hold), Broken())
        other = "broken" if ends == "broken" else "hold"
        stepping = asyncio.create_task(environment(*tools).step(reply(("hold", {}), (other, {}))))
        await taken.wait()
        if ends == "cancelled":
            stepping.cancel()
        await asyncio.wait([stepping])
        assert held == []
        assert asyncio.all_tasks() == {asyncio.current_task()}
        if ends == "broken":
            with pytest.raises(AssertionError, match="a defect"):
                stepping.result()

    asyncio.run(run())
