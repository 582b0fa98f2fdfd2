"""Report of what a run's processes are doing when it ends because a call has timed out.

A few lines of each process go into the error's message, all open spans and stacks into
logs/stacks-<n>.txt.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from monarch.actor import ActorError

from actors.calls import ActorLostError, is_caused_by_timeout, mesh_index
from actors.compat import SupervisionError
from actors.members import RoleProcesses
from rl.observability.spans import ProcessState, read_states
from rl.observability.stacks import excerpt, request_stacks
from rl.utils.errors import RunError, causes
from rl.utils.processes import is_alive

logger = logging.getLogger(__name__)

REMOTE_S = 4.0
"""Timeout of the stacks of a process on another host, longer than
`rl.observability.stacks.REQUEST_S`.
"""
MAX_REPORTED = 8
"""Processes that an error message has room for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessReport:
    role: str
    name: str
    spans: str
    stacks: str


async def add_hang_report(error: Exception, roles: Sequence[RoleProcesses]) -> None:
    """Write the stacks of all processes of these roles if a timeout ends the run, and name the file
    in the error.

    The error's message gets the busy stacks of the role that gave no answer, or of all roles.
    """
    logs = roles[0].logs if roles else None
    # Monarch also takes a process for dead that does not answer it, such as a stopped one.
    is_hang = is_caused_by_timeout(error) or any(
        isinstance(cause, ActorLostError) and not cause.is_dead for cause in causes(error)
    )
    if logs is None or not is_hang:
        return
    reports = await report_run(roles, logs)
    file = write_reports(reports, logs, title=f"{type(error).__name__}: {error}")
    if file is not None:
        logger.info("the stacks of all processes are in %s", file)
    if isinstance(error, RunError):
        silent = [report for report in reports if report.role == getattr(error, "role", "")]
        error.more = format_reports(silent or reports, file)


async def report_run(roles: Sequence[RoleProcesses], logs: Path) -> list[ProcessReport]:
    """Return the reports of all processes of these roles, and of other live processes in the same
    logs.
    """
    known = {role.name: role for role in roles}
    states = [
        state for state in read_states(logs) if state.role in known or is_alive(state.process)
    ]
    stacks = await asyncio.gather(
        *(_stacks(state, logs, known.get(state.role)) for state in states)
    )
    return [
        ProcessReport(role=state.role, name=state.name, spans=state.describe(), stacks=text)
        for state, text in zip(states, stacks, strict=True)
    ]


async def _stacks(state: ProcessState, logs: Path, role: RoleProcesses | None) -> str:
    if state.is_here or role is None:
        return await request_stacks(state, logs)
    try:
        async with asyncio.timeout(REMOTE_S):
            member = role.members.slice(**mesh_index(role.members, state.rank))
            stacks: str = await member.stacks.call_one()
            return stacks
    except (TimeoutError, ActorError, SupervisionError) as error:
        return f"no stacks within {REMOTE_S:g} s: {type(error).__name__}"


def write_reports(reports: Sequence[ProcessReport], logs: Path, *, title: str) -> Path | None:
    """Write the full reports as logs/stacks-<n>.txt; return None if the file cannot be written."""
    texts = [
        f"==== {report.name}: {report.spans}\n{report.stacks.rstrip()}\n" for report in reports
    ]
    paths = (logs / f"stacks-{number}.txt" for number in itertools.count(1))
    file = next(path for path in paths if not path.exists())
    try:
        file.write_text("\n".join([f"{title}\n", *texts]))
    except OSError:
        return None
    return file


def format_reports(reports: Sequence[ProcessReport], file: Path | None) -> str:
    """Return the lines that follow an error's message."""
    lines = []
    for report in reports[:MAX_REPORTED]:
        lines += [
            f"  {report.name}: {report.spans}",
            *(f"    {line}" for line in excerpt(report.stacks)),
        ]
    if len(reports) > MAX_REPORTED:
        lines.append(f"  and {len(reports) - MAX_REPORTED} more processes")
    return "\n".join([*lines, *([] if file is None else [f"  all stacks: {file}"])])
