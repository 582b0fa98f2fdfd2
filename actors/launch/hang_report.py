"""Report of what a run's processes are doing when it ends because a call has timed out.

A few lines of each process go into the error's message, all open spans and stacks into
logs/stacks-<n>.txt.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from monarch.actor import ActorError

from actors.launch.calls import ActorLostError, find_mesh_index, is_caused_by_timeout
from actors.launch.compat import SupervisionError
from actors.launch.member import RoleProcesses
from rl.observability.spans import ProcessState, read_states
from rl.observability.stacks import (
    ProcessReport,
    collect_reports,
    format_excerpts,
    request_stacks,
    write_reports,
)
from rl.utils.errors import RunError, list_causes
from rl.utils.processes import is_alive

logger = logging.getLogger(__name__)

REMOTE_S = 4.0
"""Timeout of the stacks of a process on another host, longer than
`rl.observability.stacks.REQUEST_S`.
"""


async def add_hang_report(error: Exception, roles: Sequence[RoleProcesses]) -> None:
    """Write the stacks of all processes of these roles if a timeout ends the run.

    The error names the file. Its message gets the busy stacks of the role that gave no answer, or
    of all roles.
    """
    logs = roles[0].logs if roles else None
    # Monarch also takes a process for dead that does not answer it, such as a stopped process.
    is_hang = is_caused_by_timeout(error) or any(
        isinstance(cause, ActorLostError) and not cause.is_dead for cause in list_causes(error)
    )
    if logs is None or not is_hang:
        return

    reports = await report_run(roles, logs)
    file = write_reports(reports, logs, title=f"{type(error).__name__}: {error}")
    if file is not None:
        logger.info("the stacks of all processes are in %s", file)
    if isinstance(error, RunError):
        silent = [report for report in reports if report.role == getattr(error, "role", "")]
        error.more = format_excerpts(silent or reports, file)


async def report_run(roles: Sequence[RoleProcesses], logs: Path) -> list[ProcessReport]:
    """Return the reports of these roles' processes, and of other live processes in the logs."""
    role_of = {role.name: role for role in roles}
    # The controller is no role, and processes that have ended leave their state files.
    states = [s for s in read_states(logs) if s.role in role_of or is_alive(s.process)]
    return await collect_reports(states, logs, request=partial(_request, role_of))


async def _request(role_of: dict[str, RoleProcesses], state: ProcessState, logs: Path) -> str:
    """Return the stacks of a process, through its actor if the process is on another host."""
    role = role_of.get(state.role)
    if state.is_here or role is None:
        return await request_stacks(state, logs)
    try:
        async with asyncio.timeout(REMOTE_S):
            member = role.members.slice(**find_mesh_index(role.members, state.rank))
            stacks: str = await member.stacks.call_one()
            return stacks
    except (TimeoutError, ActorError, SupervisionError) as error:
        return f"no stacks within {REMOTE_S:g} s: {type(error).__name__}"
