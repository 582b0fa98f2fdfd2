"""What an agent is: the command or function of every episode, and its limits."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from rl.agents.players.plays import MIB, AgentSpec
from rl.types import Problem
from rl.utils.proxies import EXEMPTING, make_loopback_exemption

PROBLEM_FILE = "problem.json"
"""File in the working folder with the problem: `id`, `question` and `info`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentProgram:
    """An agent of foreign code, started once for each episode."""

    command: tuple[str, ...] = ()
    """Program and arguments. `{python}` is the Python of this process, `{question}` the problem's
    question."""
    function: str = ""
    """Function of one argument, the problem, in place of a command: "module:function"."""
    env: Mapping[str, str] = field(default_factory=dict)
    collect: tuple[str, ...] = ()
    """Paths in the working folder of the files that reward functions read."""
    shown_info: tuple[str, ...] = ()
    """Entries of the problem's `info` that the agent sees; others may hold the answer."""
    shows_answer: bool = False
    """Let the agent see the problem's answer and demonstration."""
    needs_network: bool = False
    """Agents need more of the network than the endpoint."""
    max_output_bytes: int = 16 * MIB
    max_folder_bytes: int = 1024 * MIB
    keep_home: bool = False
    keep_env: tuple[str, ...] = ()
    """Variables that agents get although they look like secrets."""
    may_leave_processes: bool = False
    """Processes that the agent leaves at its end are no failure of the rollout; they are ended."""
    may_exit_with_error: bool = False
    """An exit status other than 0 is no failure of the rollout: the reward reads it."""

    def make_spec(self, problem: Problem, *, url: str, key: str, time_limit_s: float) -> AgentSpec:
        """Return the agent of one episode, which has the endpoint's URL in its environment.

        Raises ValueError for a problem that no agent could be given.
        """
        info = {name: problem.info[name] for name in self.shown_info if name in problem.info}
        problem = replace(problem, info=info)
        if not self.shows_answer:
            problem = replace(problem, answer="", demonstration="")
        described: dict[str, Any] = {"id": problem.id, "question": problem.question}
        described |= {"answer": problem.answer} if self.shows_answer else {}
        described |= {"info": problem.info}
        try:
            described_json = json.dumps(described, ensure_ascii=False, default=str)
        except (TypeError, RecursionError) as error:
            raise ValueError(f"info cannot be written as JSON: {error}") from error
        return AgentSpec(
            command=self._fill_in(problem) if self.command else None,
            env=make_agent_environment(url=url, key=key) | dict(self.env),
            argument=problem,
            files={PROBLEM_FILE: described_json},
            collect=self.collect,
            time_limit_s=time_limit_s,
            max_output_bytes=self.max_output_bytes,
            max_folder_bytes=self.max_folder_bytes,
            keep_home=self.keep_home,
        )

    def _fill_in(self, problem: Problem) -> tuple[str, ...]:
        if "\0" in problem.question and any("{question}" in part for part in self.command):
            raise ValueError("the question has a NUL character, which no argument can have")
        # Not `format`: arguments may contain other braces.
        filled = []
        for part in self.command:
            filled.append(
                part.replace("{python}", sys.executable).replace("{question}", problem.question)
            )
        return tuple(filled)


def make_agent_environment(*, url: str, key: str) -> dict[str, str]:
    """Return the variables with which clients find the endpoint; `url` is that of the episode.

    The URL names the episode as the key does: some programs set a key of their own.
    """
    variables = {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "RELAY_EPISODE_URL": url,
    }
    # Reached directly, whatever proxy the environment names: it is on this machine, or `agents.url`
    # names it. Hosts that the user exempts stay exempted.
    exempt = {name: os.environ[name] for name in EXEMPTING if name in os.environ}
    return variables | make_loopback_exemption(
        {"http_proxy": "any"} | exempt, others=[urlsplit(url).hostname or "localhost"]
    )
