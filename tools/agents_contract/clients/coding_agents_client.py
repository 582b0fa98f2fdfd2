"""Coding agents, unmodified: programs that run commands in a folder.

Each gets a folder and a home of its own, and the endpoint in the way that it reads anyway.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.agents_contract.clients.harness import QUESTION, run_cases

ORDER = f"{QUESTION} Write the number into answer.txt."
LIMIT_S = 120.0
CODEX = """model = "any"
model_provider = "relay"
[model_providers.relay]
name = "relay"
base_url = "{url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
"""Codex reads no variable with a URL."""


def run(command: list[str], *, files: dict[str, str] | None = None, **env: str) -> Any:
    """Return what a coding agent has written into its file, and whether it told the answer.

    Args:
        command: the program, of those that are installed, with its arguments.
        files: texts to write into its home before.
        env: further variables.
    """
    programs = Path(sys.prefix) / "node_modules" / ".bin"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        home, work = Path(folder) / "home", Path(folder) / "work"
        work.mkdir()
        for path, text in (files or {}).items():
            place = home / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        home.mkdir(exist_ok=True)
        done = subprocess.run(
            [str(programs / command[0]), *command[1:]],
            cwd=work,
            env={**os.environ, "HOME": str(home), "PWD": str(work), **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
        written = work / "answer.txt"
        if done.returncode or not written.exists():
            raise RuntimeError(f"status {done.returncode}, wrote: {done.stdout[-2000:]}")
        return {"file": written.read_text().strip(), "says": "The sum is 5." in done.stdout}


def claude_code() -> Any:
    # It refuses to skip permissions as root, unless it is told of a sandbox.
    return run(["claude", "-p", ORDER, "--dangerously-skip-permissions"], IS_SANDBOX="1")


def codex() -> Any:
    skip = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    config = CODEX.format(url=os.environ["OPENAI_BASE_URL"])
    return run(["codex", "exec", *skip, ORDER], files={".codex/config.toml": config})


def opencode() -> Any:
    options = {"baseURL": os.environ["OPENAI_BASE_URL"], "apiKey": os.environ["OPENAI_API_KEY"]}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "relay",
        "options": options,
        "models": {"policy": {"name": "policy"}},
    }
    config = {"autoupdate": False, "model": "relay/policy", "provider": {"relay": provider}}
    # Without a title it asks for one, at the same time as for the first reply.
    return run(
        ["opencode", "run", "--title", "sum", ORDER],
        files={".config/opencode/opencode.json": json.dumps(config)},
    )


def qwen_code() -> Any:
    return run(["qwen", "--auth-type", "openai", "-y", "-p", ORDER], OPENAI_MODEL="policy")


def pi() -> Any:
    model = {"id": "policy", "name": "policy", "input": ["text"], "contextWindow": 128_000}
    provider = {
        "baseUrl": os.environ["OPENAI_BASE_URL"],
        "api": "openai-completions",
        "apiKey": os.environ["OPENAI_API_KEY"],
        "models": [model],
    }
    config = json.dumps({"providers": {"relay": provider}})
    command = ["pi", "--provider", "relay", "--model", "policy", "-p", ORDER]
    return run(command, files={".pi/agent/models.json": config})


if __name__ == "__main__":
    agents: dict[str, Callable[[], Any]] = {
        "claude-code": claude_code,
        "codex": codex,
        "opencode": opencode,
        "qwen-code": qwen_code,
        "pi": pi,
    }
    run_cases(agents)
