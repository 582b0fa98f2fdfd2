"""smolagents' ToolCallingAgent, as its own documentation writes it, in an environment of its own.

    python -m venv .venv-agents/smolagents
    .venv-agents/smolagents/bin/pip install "smolagents[openai]>=1.26,<2"
    python -m rl.train --module agents --config smolagents_agent

Nothing of relay is imported here: the URL of the model comes from the environment.
"""

from __future__ import annotations

import os
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first one.
        b: the second one.
    """
    return a * b


def main() -> None:
    model = OpenAIModel(
        model_id="policy",
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
    )
    agent = ToolCallingAgent(tools=[multiply], model=model, max_steps=4)
    print("answer:", agent.run(f"What is {sys.argv[1]}?"))


if __name__ == "__main__":
    main()
