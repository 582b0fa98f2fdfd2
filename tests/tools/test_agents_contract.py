"""The contract of agent packages: its scripted model, and that its checks can fail."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from tests.support.agent_endpoint import serve
from tools.agents_contract.__main__ import check_client, check_record, list_unknown_fields
from tools.agents_contract.cases import expect
from tools.agents_contract.packages import PACKAGES, choose_packages
from tools.agents_contract.scripted import reply_to
from tools.agents_contract.server import Sampled

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def render(*users, tools=(), system="Be brief."):
    described = "\n".join(json.dumps({"function": {"name": name}}) for name in tools)
    announced = f"\n<tools>\n{described}\n</tools>" if tools else ""
    blocks = [f"<|im_start|>system\n{system}{announced}<|im_end|>\n"]
    blocks += [f"<|im_start|>user\n{user}<|im_end|>\n" for user in users]
    return "".join([*blocks, "<|im_start|>assistant\n"])


@pytest.mark.parametrize(
    ("prompt", "reply"),
    [
        (render("Hi"), "Hello."),
        (render("2 + 3?"), "The sum is 5."),
        (render("2 + 3?", tools=["add"]), '{"name": "add", "arguments": {"a": 2, "b": 3}}'),
        (render("2 + 3?", "<tool_response>\n7\n</tool_response>", tools=["add"]), "The sum is 7."),
        (render("2 + 3?", "Observation:\n7", tools=["add", "final_answer"]), '{"answer": "7"}'),
        (render("2 + 3?", tools=["transfer_to_adder"]), '{"name": "transfer_to_adder"'),
        (render("2 + 3?", system="Write <code>."), "print(add(a=2, b=3))\n</code>"),
    ],
)
def test_script_calls_a_tool_and_tells_its_result(prompt, reply):
    assert reply in reply_to(prompt)


def test_unknown_package_is_refused_by_name():
    coding = choose_packages(["coding-agents"])
    assert [package.name for package in coding][:2] == ["claude-code", "codex"]
    assert choose_packages([]) + coding == list(PACKAGES)
    with pytest.raises(ValueError, match="package 'openai' is not known: must be one of openai-2"):
        choose_packages(["openai"])


def test_fields_that_the_table_lacks_are_listed():
    fields = {"chat": ["model", "stream_options", "colour"], "messages": ["output_config"]}
    assert list_unknown_fields(fields) == ["chat.colour"]


def test_both_sides_of_a_case_are_checked():
    async def scenario():
        async with serve(reply_to) as served:
            await served.chat({"role": "user", "content": "2 + 3?"})
            return served.episode

    episode = asyncio.run(scenario())
    (recorded,) = episode.record.turns.values()
    sampled = Sampled(prompt_ids=recorded.plan.context_ids, completion=recorded.turn.completion)
    case = expect(((1, "main", ""),), answer="The sum is 5.")
    assert check_client(case, {"seen": {"answer": "The sum is 5."}}, episode) == []
    assert check_record(case, episode, [sampled]) == []

    # Each of these is wrong in one thing.
    (problem,) = check_client(case, {"seen": {"answer": "6"}}, episode)
    assert problem == "the client saw answer='6', not 'The sum is 5.'"
    (problem,) = check_client(case, {"error": "no"}, episode)
    assert problem == "the client failed: no"
    (problem,) = check_record(expect(answer=""), episode, [sampled])
    assert problem.startswith("the record has the branches ((1, 'main', ''),), not ((2,")
    (problem,) = check_record(case, episode, [])
    assert problem == "0 replies were sampled, 1 are recorded"
    other = Sampled(prompt_ids=np.array([1]), completion=recorded.turn.completion)
    (problem,) = check_record(case, episode, [other])
    assert problem == "the tokens of reply 0 are not recorded as they were sampled"
