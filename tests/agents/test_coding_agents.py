"""Peculiarities of coding agents: tools of Codex, and a line of Claude Code's system message."""

import pytest

from rl.agents.dialects import responses
from rl.agents.dialects.reply_reader import read_reply
from rl.tools.tool import render_call
from rl.types import Message, ToolCall
from tests.support.agent_replies import make_reply, make_request, parse_frames

CODEX_TOOLS = [
    {"type": "function", "name": "wait", "parameters": None},
    {
        "type": "namespace",
        "name": "agents",
        "tools": [{"type": "function", "name": "wait"}, {"type": "function", "name": "spawn"}],
    },
    {
        "type": "custom",
        "name": "patch",
        "description": "Change files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: LINE+"},
    },
    {"type": "web_search"},
]


def test_tools_of_codex_are_functions_to_the_model_and_its_own_to_the_client():
    request = make_request("responses", tools=CODEX_TOOLS)
    assert [tool.name for tool in request.tools] == ["wait", "agents__wait", "spawn", "patch"]
    assert request.tools[-1].description == (
        "Change files.\n\nGrammar of the input (lark):\nstart: LINE+"
    )
    assert request.harmless == ("tools[].type=web_search",)

    calls = [
        ToolCall(name="wait", arguments={"s": 1}),
        ToolCall(name="agents__wait", arguments={}),
        ToolCall(name="spawn", arguments={"task": "a"}),
        ToolCall(name="patch", arguments={"input": "+ é"}),
        # Not what the tool takes: the client is told the call as it is.
        ToolCall(name="patch", arguments={"patch": "x"}),
    ]
    parsed = read_reply(
        "".join(map(render_call, calls)), call_format="hermes", reply_id="r", has_tools=True
    )
    reply = make_reply(parsed)
    output = responses.make_body(reply, request, parsed)["output"]
    told = [(item["type"], item["name"], item.get("namespace")) for item in output]
    assert told == [
        ("function_call", "wait", None),
        ("function_call", "wait", "agents"),
        ("function_call", "spawn", "agents"),
        ("custom_tool_call", "patch", None),
        ("function_call", "patch", None),
    ]
    assert output[3]["input"] == "+ é"
    # As a history they are the calls that the model has written.
    outputs = [{"type": "custom_tool_call_output", "call_id": "c", "output": "done"}]
    history = make_request("responses", tools=CODEX_TOOLS, input=[*output, *outputs])
    assert history.messages == (parsed.message, Message(role="tool", content="done"))

    events = list(parse_frames(responses.stream_body(reply, request, parsed)))
    kind = "response.custom_tool_call_input"
    (delta,) = [event for event in events if event["type"] == f"{kind}.delta"]
    (done,) = [event for event in events if event["type"] == f"{kind}.done"]
    assert (delta["delta"], done["input"]) == ("+ é", "+ é")
    assert events[-1]["response"]["output"] == output


@pytest.mark.parametrize("as_text", [True, False])
def test_billing_line_of_claude_code_is_no_part_of_a_conversation(as_text):
    def ask(number):
        lines = [f"x-anthropic-billing-header: cch={number};", "You are an agent."]
        system = "\n".join(lines) if as_text else [{"type": "text", "text": x} for x in lines]
        return make_request("messages", system=system).messages

    assert ask(1) == ask(2)
    assert ask(1)[0].content == "You are an agent."
