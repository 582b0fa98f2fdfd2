"""Packages that people use, unmodified, against the endpoint of agents: `make agents-contract`.

Each package is installed into an environment of its own below `.venv-agents/`. Its client script
(clients/) runs there as a black box, with address and key of the endpoint in its environment. The
endpoint's model is a script. Checked are both sides: what the client has seen, and what the episode
has recorded. It prints a table and exits with 0 if everything held, with 1 if something did not,
with 2 if a package cannot be installed.

    python -m tools.agents_contract openai-3 smolagents

Coding agents, which are programs of Node, are run if they are named: each is up to 400 MB.

    python -m tools.agents_contract coding-agents
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl.agents.dialects.fields import FIELDS
from rl.agents.endpoint.branches import list_conversations
from rl.agents.endpoint.episode import AgentEpisode
from rl.utils.proxies import make_loopback_exemption
from tools.agents_contract.cases import Case
from tools.agents_contract.clients.harness import CASES
from tools.agents_contract.packages import (
    CODING,
    PACKAGES,
    ROOT,
    Package,
    choose_packages,
    install,
)
from tools.agents_contract.server import ContractServer, Sampled, serve_contract
from tools.setup_env import InstallError, Refusal

DEADLINE_S = 300.0
"""Longest run of one client."""
QUIET = {
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Variables that keep packages from calling their makers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What became of a case."""

    package: str
    case: str
    problems: tuple[str, ...]
    """What did not hold; empty if everything did."""


async def run_package(server: ContractServer, package: Package) -> list[Finding]:
    """Run the cases of a package and check both sides."""
    episodes = {}
    for name, case in package.cases.items():
        episodes[name] = server.open(case)
    lines, output = await _run_client(server.url, package, episodes)
    findings = []
    for name, case in package.cases.items():
        episode = episodes[name]
        line = lines.get(name, {"error": f"the client ended without a line: {output[-2000:]}"})
        problems = check_client(case, line, episode)
        problems += check_record(case, episode, server.model.sampled[episode.settings.key])
        findings.append(Finding(package=package.name, case=name, problems=tuple(problems)))
        server.endpoint.end(episode)
    return findings


async def _run_client(
    url: str, package: Package, episodes: Mapping[str, AgentEpisode]
) -> tuple[dict[str, Any], str]:
    """Return the lines of a client by case, and everything else that it wrote."""
    cases = {name: make_variables(url, episode) for name, episode in episodes.items()}
    process = await asyncio.create_subprocess_exec(
        str(package.environment.python),
        "-m",
        package.module,
        env={
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            **make_loopback_exemption(os.environ),
            **QUIET,
            **next(iter(cases.values())),
            "PYTHONPATH": str(ROOT),
            CASES: json.dumps(cases),
        },
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        output, _ = await process.communicate()
    lines, others = {}, []
    for text in output.decode(errors="replace").splitlines():
        if text.startswith('{"case": '):
            line = json.loads(text)
            lines[line["case"]] = line
        else:
            others.append(text)
    return lines, "\n".join(others)


def make_variables(url: str, episode: AgentEpisode) -> dict[str, str]:
    """Return the environment variables that name the endpoint, as an agent gets them."""
    key = episode.settings.key
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
    }


def check_client(case: Case, line: Mapping[str, Any], episode: AgentEpisode) -> list[str]:
    """Return what a client has not seen as it should."""
    if "error" in line:
        return [f"the client failed: {line['error'].strip()}"]
    seen = line["seen"] or {}
    problems = []
    for name in sorted({*case.seen, *seen}):
        wanted, got = case.seen.get(name), seen.get(name)
        if name == "tokens":
            wanted = describe_tokens(episode)
        elif name == "fields":
            wanted, got = [], list_unknown_fields(got or {})
        if got != wanted:
            problems.append(f"the client saw {name}={got!r}, not {wanted!r}")
    return problems


def describe_tokens(episode: AgentEpisode) -> list[dict[str, Any]]:
    """Return the recorded tokens of each turn."""
    described = []
    for number in sorted(episode.record.turns):
        recorded = episode.record.turns[number]
        described.append({
            "prompt": recorded.plan.context_ids.tolist(),
            "completion": recorded.turn.completion.token_ids.tolist(),
        })  # fmt: skip
    return described


def list_unknown_fields(fields: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the fields that a client can send and that the endpoint's table does not have."""
    unknown = []
    for dialect, names in fields.items():
        rows = FIELDS[dialect]  # type: ignore[index]
        tops = {row.partition(".")[0] for row in rows}
        unknown += [f"{dialect}.{name}" for name in names if name not in tops]
    return unknown


def check_record(case: Case, episode: AgentEpisode, sampled: Sequence[Sampled]) -> list[str]:
    """Return what an episode has not recorded as it should."""
    problems = []
    record = episode.record
    branches = list_conversations(record, trained=()).branches
    got = tuple((len(branch.turns), branch.role, branch.cause) for branch in branches)
    if got != case.branches:
        problems.append(f"the record has the branches {got}, not {case.branches}")
    turns = [record.turns[number] for number in sorted(record.turns)]
    if len(turns) != len(sampled):
        problems.append(f"{len(sampled)} replies were sampled, {len(turns)} are recorded")
    for number, reply in enumerate(sampled):
        if not any(
            np.array_equal(turn.plan.context_ids, reply.prompt_ids)
            and np.array_equal(turn.turn.completion.token_ids, reply.completion.token_ids)
            for turn in turns
        ):
            problems.append(f"the tokens of reply {number} are not recorded as they were sampled")
    for name, least in case.at_least.items():
        if episode.counts[name] < least:
            problems.append(f"{name} is {episode.counts[name]}, not at least {least}")
    return problems


def print_table(findings: Sequence[Finding]) -> None:
    """Print what failed, then a line for each package."""
    for finding in findings:
        for problem in finding.problems:
            print(f"{finding.package}, {finding.case}: {problem}")
    print(f"{'package':18}{'version':12}{'cases':>7}{'passed':>8}{'failed':>8}")
    by_name = {package.name: package for package in PACKAGES}
    for name in dict.fromkeys(finding.package for finding in findings):
        of_package = [finding for finding in findings if finding.package == name]
        passed = sum(not finding.problems for finding in of_package)
        counts = f"{len(of_package):7}{passed:8}{len(of_package) - passed:8}"
        print(f"{name:18}{by_name[name].read_version():12}{counts}")


async def check_packages(packages: Sequence[Package]) -> list[Finding]:
    """Run the clients of packages, one after another."""
    findings = []
    async with serve_contract() as server:
        for package in packages:
            started = time.monotonic()
            findings += await run_package(server, package)
            print(f"{package.name}: {time.monotonic() - started:.0f} s", flush=True)
    return findings


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ", ".join(package.name for package in PACKAGES)
    parser.add_argument(
        "names", nargs="*", help=f"packages, or {CODING} (default: all others): {known}"
    )
    args = parser.parse_args(argv)
    try:
        packages = choose_packages(args.names)
        for package in packages:
            install(package)
    except (ValueError, Refusal, InstallError) as error:
        print(f"agents-contract: {error}", file=sys.stderr)
        return 2
    findings = asyncio.run(check_packages(packages))
    print_table(findings)
    return 1 if any(finding.problems for finding in findings) else 0


if __name__ == "__main__":
    sys.exit(main())
