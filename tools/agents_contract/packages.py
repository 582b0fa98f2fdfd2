"""The packages of the contract, each with the environment in which its client runs.

Versions clash with each other and with those of `.venv`, so each client has an environment of its
own below `.venv-agents/`. It is made once, and again when its requirements change.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.agents_contract import cases
from tools.agents_contract.cases import Case
from tools.setup_env import Environment, Refusal

ROOT = Path(__file__).resolve().parents[2]
VENVS = ROOT / ".venv-agents"
CODING = "coding-agents"
"""Name of all coding agents."""


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
    requirements: tuple[str, ...] = ()
    node_script: str = ""
    """Script by which a package of npm gets its program. npm runs it by itself where it may."""

    @property
    def is_coding_agent(self) -> bool:
        return self.client == "coding_agents_client"

    @property
    def environment(self) -> Environment:
        return Environment(VENVS / self.name)

    @property
    def module(self) -> str:
        return f"tools.agents_contract.clients.{self.client}"

    def read_version(self) -> str:
        """Return the version that is installed."""
        if self.is_coding_agent:
            described = VENVS / self.name / "node_modules" / self.distribution / "package.json"
            return str(json.loads(described.read_text())["version"])
        prefix = f"{self.distribution.replace('-', '_')}-"
        for name in self.environment.installed():
            if name.lower().startswith(prefix):
                return name[len(prefix) :].removesuffix(".dist-info")
        return "?"


def _make_coding_agent(name: str, package: str, version: str, *, script: str = "") -> Package:
    """Return a package of npm, of the newest version that begins like this."""
    return Package(
        name=name,
        distribution=package,
        client="coding_agents_client",
        cases={name: cases.CODED},
        requirements=(f"{package}@{version}",),
        node_script=script,
    )


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
    _make_coding_agent("claude-code", "@anthropic-ai/claude-code", "2", script="install.cjs"),
    _make_coding_agent("codex", "@openai/codex", "0"),
    _make_coding_agent("opencode", "opencode-ai", "1", script="postinstall.mjs"),
    _make_coding_agent("qwen-code", "@qwen-code/qwen-code", "0"),
    _make_coding_agent("pi", "@mariozechner/pi-coding-agent", "0"),
)


def choose_packages(names: list[str]) -> list[Package]:
    """Return the packages with these names, or all but the coding agents.

    Raises ValueError for an unknown name.
    """
    known = {package.name: [package] for package in PACKAGES}
    known[CODING] = [package for package in PACKAGES if package.is_coding_agent]
    if not names:
        return [package for package in PACKAGES if not package.is_coding_agent]
    chosen = []
    for name in names:
        if name not in known:
            raise ValueError(f"package {name!r} is not known: must be one of {', '.join(known)}")
        chosen += known[name]
    return chosen


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
        if package.is_coding_agent:
            _install_from_npm(package)
        else:
            environment.install(*package.requirements)
        environment.finish(key, groups=[])
        print(f"  {time.monotonic() - started:.0f} s", flush=True)


def _install_from_npm(package: Package) -> None:
    if shutil.which("npm") is None:
        raise Refusal(f"{package.name} needs Node: there is no program npm")
    environment, folder = package.environment, str(VENVS / package.name)
    quiet = ("--no-audit", "--no-fund", "--loglevel", "error")
    environment.run("npm", "install", *quiet, "--prefix", folder, *package.requirements)
    if package.node_script:
        place = VENVS / package.name / "node_modules" / package.distribution
        environment.run("node", str(place / package.node_script))
