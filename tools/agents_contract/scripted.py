"""A model that is a script: it reads the conversation, calls a tool, then answers.

It asks the first tool that it knows, with the numbers of the last question, and says what the tool
returned. With a shell it writes the answer into answer.txt. Without a tool it knows the answer
itself. What it writes is Qwen3's format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl.tools.tool import render_call
from rl.types import ToolCall

SUM = re.compile(r"(\d+) \+ (\d+)")
NUMBER = re.compile(r"\d+")
OBSERVED = "Observation:"
"""Mark with which smolagents tells the results of tools."""
ASKS_AGENT = "ask_adder"
HANDS_OVER = "transfer_to_adder"
SHELLS: Mapping[str, Mapping[str, Any]] = {
    "Bash": {"command": "...", "description": "Write the number."},
    "exec_command": {"cmd": "..."},
    "bash": {"command": "...", "description": "Write the number."},
    "run_shell_command": {"command": "...", "is_background": False},
}
"""Tools by which coding agents run commands, and their arguments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """A prompt as Qwen3's template renders it, read back."""

    system: str
    users: tuple[str, ...]
    """Texts of users and of tools, in order."""
    tools: frozenset[str]

    @classmethod
    def read(cls, prompt: str) -> Conversation:
        system, users = "", []
        for block in prompt.split("<|im_start|>")[1:]:
            role, _, text = block.partition("\n")
            text = text.partition("<|im_end|>")[0]
            if role == "system":
                system += text
            elif role == "user":
                users.append(text)
        announced = re.search(r"<tools>\n(.*?)\n</tools>", system, re.DOTALL)
        tools = set()
        for line in announced[1].splitlines() if announced else []:
            tools.add(json.loads(line)["function"]["name"])
        return cls(system=system, users=tuple(users), tools=frozenset(tools))

    @property
    def result(self) -> str | None:
        """The number that a tool has returned last, if the last message is a result."""
        last = self.users[-1]
        is_result = "<tool_response>" in last or OBSERVED in last
        numbers = NUMBER.findall(last) if is_result else []
        return numbers[-1] if numbers else None

    @property
    def shell(self) -> str | None:
        """The tool that runs commands."""
        return next((name for name in SHELLS if name in self.tools), None)

    @property
    def writes_code(self) -> bool:
        return not self.tools and "<code>" in self.system


def reply_to(prompt: str) -> str:
    """Return the reply to a prompt."""
    conversation = Conversation.read(prompt)
    shell = conversation.shell
    # The numbers in what a shell returns are not only those that a command has printed.
    if conversation.result is not None and shell is None:
        return _tell(conversation, conversation.result)
    questions = SUM.findall("\n".join(conversation.users))
    if not questions:
        return "Hello."
    first, second = map(int, questions[-1])
    if shell is not None and conversation.result is None:
        command = f"echo {first + second} | tee answer.txt"
        given = SHELLS[shell]
        return _call(shell, {k: command if v == "..." else v for k, v in given.items()})
    if "add" in conversation.tools:
        return _call("add", {"a": first, "b": second})
    if HANDS_OVER in conversation.tools:
        return _call(HANDS_OVER, {})
    if ASKS_AGENT in conversation.tools:
        return _call(ASKS_AGENT, {"input": f"What is {first} + {second}?"})
    if conversation.writes_code:
        return f"Thought: I add.\n<code>\nprint(add(a={first}, b={second}))\n</code>"
    return _tell(conversation, str(first + second))


def _tell(conversation: Conversation, value: str) -> str:
    """Return the last reply, as the package wants it."""
    if "final_answer" in conversation.tools:
        return _call("final_answer", {"answer": value})
    if "final_result" in conversation.tools:
        return _call("final_result", {"value": int(value)})
    if conversation.writes_code:
        return f"Thought: I know.\n<code>\nfinal_answer({value})\n</code>"
    return f"The sum is {value}."


def _call(name: str, arguments: Mapping[str, Any]) -> str:
    return render_call(ToolCall(name=name, arguments=arguments))
