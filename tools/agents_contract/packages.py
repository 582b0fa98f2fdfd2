"""The packages of the contract, each with the environment in which its client runs.

Versions clash with each other and with those of `.venv`, so each client has an environment of its
own below `.venv-agents/`. It is made once, and again when its requirements change.
"""

from __future__ import annotations

import fcntl
import hashlib
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.agents_contract import cases
from tools.agents_contract.cases import Case
from tools.setup_env import Environment

ROOT = Path(__file__).resolve().parents[2]
VENVS = ROOT / ".venv-agents"


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """A package whose unmodified client talks to the endpoint."""

    name: str
    """Name on the command line, and of the environment."""
    distribution: str
    """Distribution whose version the table shows."""
    client: str
    """Module of `clients/`."""
    cases: Mapping[str, Case]
    """Cases of the client by name."""
    requirements: tuple[str, ...]

    @property
    def environment(self) -> Environment:
        return Environment(VENVS / self.name)

    @property
    def module(self) -> str:
        return f"tools.agents_contract.clients.{self.client}"

    def read_version(self) -> str:
        """Return the version that is installed."""
        prefix = f"{self.distribution.replace('-', '_')}-"
        for name in self.environment.installed():
            if name.lower().startswith(prefix):
                return name[len(prefix) :].removesuffix(".dist-info")
        return "?"


PACKAGES = (
    Package(
        name="openai-2",
        distribution="openai",
        client="openai_client",
        cases=cases.OPENAI,
        requirements=("openai>=2,<3",),
    ),
    Package(
        name="openai-3",
        distribution="openai",
        client="openai_client",
        cases=cases.OPENAI,
        requirements=("openai>=3,<4",),
    ),
    Package(
        name="anthropic",
        distribution="anthropic",
        client="anthropic_client",
        cases=cases.ANTHROPIC,
        requirements=("anthropic>=2,<3",),
    ),
    Package(
        name="openai-agents",
        distribution="openai-agents",
        client="openai_agents_client",
        cases=cases.OPENAI_AGENTS,
        requirements=("openai-agents>=0.24,<0.25",),
    ),
    Package(
        name="pydantic-ai",
        distribution="pydantic-ai-slim",
        client="pydantic_ai_client",
        cases=cases.PYDANTIC_AI,
        requirements=("pydantic-ai-slim[openai,anthropic]>=2.68,<3",),
    ),
    Package(
        name="smolagents",
        distribution="smolagents",
        client="smolagents_client",
        cases=cases.SMOLAGENTS,
        requirements=("smolagents[openai]>=1.26,<2",),
    ),
    Package(
        name="langgraph",
        distribution="langgraph",
        client="langgraph_client",
        cases=cases.LANGGRAPH,
        requirements=("langgraph>=1.2,<2", "langchain>=1.5,<2", "langchain-openai>=1.7,<2"),
    ),
    Package(
        name="litellm",
        distribution="litellm",
        client="litellm_client",
        cases=cases.LITELLM,
        requirements=("litellm>=1.110,<2",),
    ),
    Package(
        name="openenv",
        distribution="openenv",
        client="openenv_client",
        cases=cases.OPENENV,
        requirements=("openenv>=0.10,<0.11",),
    ),
)


def choose_packages(names: list[str]) -> list[Package]:
    """Return the packages with these names, or all; raise ValueError for an unknown name."""
    known = {package.name: package for package in PACKAGES}
    for name in names:
        if name not in known:
            raise ValueError(f"package {name!r} is not known: must be one of {', '.join(known)}")
    return [known[name] for name in names] if names else list(PACKAGES)


def install(package: Package) -> None:
    """Create a package's environment; raise Refusal or InstallError if that is not possible."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    key = hashlib.sha256("\n".join([version, *package.requirements]).encode()).hexdigest()
    environment = package.environment
    VENVS.mkdir(exist_ok=True)
    with (VENVS / f"{package.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # A second call waits for the first.
        if environment.is_complete(key, groups=[]):
            return
        started = time.monotonic()
        print(f"installing {', '.join(package.requirements)} ...", flush=True)
        environment.create()
        environment.install(*package.requirements)
        environment.finish(key, groups=[])
        print(f"  {time.monotonic() - started:.0f} s", flush=True)
