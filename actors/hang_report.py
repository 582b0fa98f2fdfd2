"""Report of what a run's processes are doing when a call has timed out.

Each process records its open spans in logs/state (`rl.observability.spans`) and writes its stacks on request.
A few lines of each process go into the error's message, everything into logs/stacks-<n>.txt.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch.actor import ActorError

from actors.compat import SupervisionError
from actors.members import RoleProcesses
from rl.observability.span_reader import ProcessState, read_states
from rl.observability.stacks import excerpt, request_stacks
from rl.utils.errors import RunError
from rl.utils.processes import is_alive

logger = logging.getLogger(__name__)

REMOTE_S = 4.0
"""Timeout of the stacks of a process on another host, longer than `rl.observability.stacks.REQUEST_S`."""
SHARED_S = 10.0
"""Time during which calls that time out share one report of a role."""
MAX_REPORTED = 8
"""Processes that an error message has room for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessReport:
    """Open spans and stacks of one process, as text."""

    name: str
    spans: str
    stacks: str

    def short(self) -> str:
        """Return the spans and the busy stacks, for an error message."""
        return "".join([f"  {self.name}: {self.spans}", *(f"\n    {line}" for line in excerpt(self.stacks))])


def mesh_index(mesh: Any, rank: int) -> dict[str, int]:
    """Return the index of a rank in each dimension of a mesh, to slice it."""
    index, left = {}, rank
    for dim, size in reversed(mesh.sizes.items()):
        left, index[dim] = divmod(left, size)
    assert not left, f"there are {mesh.size()} ranks, there is no rank {rank}"
    return index


async def describe_role(role: RoleProcesses, ranks: Collection[int] | None, *, title: str) -> str:
    """Return lines for an error message about these ranks, or all, and write the full report to a file.

    Calls that time out together share one report.
    """
    key = tuple(range(len(role.hostnames)) if ranks is None else sorted(ranks))
    at_s, report = role.reports.get(key, (0.0, None))
    if report is None or time.monotonic() - at_s > SHARED_S:
        report = asyncio.ensure_future(_describe(role, key, title))
        role.reports[key] = (time.monotonic(), report)
    return await asyncio.shield(report)


async def _describe(role: RoleProcesses, ranks: Collection[int], title: str) -> str:
    assert role.logs is not None
    states = [s for s in read_states(role.logs) if s.role == role.name and s.rank in ranks]
    reports = await asyncio.gather(*(_report(state, role.logs, role=role) for state in states))
    return format_reports(reports, write_reports(reports, role.logs, title=title))


async def report_run(roles: Sequence[RoleProcesses], logs: Path) -> list[ProcessReport]:
    """Return the reports of all processes of these roles, and of other live processes in the same logs."""
    known = {role.name: role for role in roles}
    states = [state for state in read_states(logs) if state.role in known or is_alive(state.process)]
    return await asyncio.gather(*(_report(state, logs, role=known.get(state.role)) for state in states))


async def _report(state: ProcessState, logs: Path, *, role: RoleProcesses | None) -> ProcessReport:
    if state.is_here or role is None:
        stacks = await request_stacks(state, logs)
    else:
        stacks = await _remote_stacks(role, state.rank)
    return ProcessReport(name=state.name, spans=state.describe(), stacks=stacks)


async def _remote_stacks(role: RoleProcesses, rank: int) -> str:
    try:
        async with asyncio.timeout(REMOTE_S):
            member = role.members.slice(**mesh_index(role.members, rank))
            stacks: str = await member.stacks.call_one()
            return stacks
    except TimeoutError:
        return f"no stacks within {REMOTE_S:g} s"
    except (ActorError, SupervisionError) as error:
        return f"no stacks: {str(error).splitlines()[0]}"


def write_reports(reports: Sequence[ProcessReport], logs: Path, *, title: str) -> Path | None:
    """Write the full reports as logs/stacks-<n>.txt; return None if the file cannot be written."""
    texts = [f"==== {report.name}: {report.spans}\n{report.stacks.rstrip()}\n" for report in reports]
    for number in itertools.count(1):
        file = logs / f"stacks-{number}.txt"
        try:
            with file.open("x") as out:
                out.write("\n".join([f"{title}\n", *texts]))
        except FileExistsError:
            continue
        except OSError:
            return None
        return file
    raise AssertionError("there is always a next number")


def format_reports(reports: Sequence[ProcessReport], file: Path | None) -> str:
    """Return the lines that follow an error's message."""
    lines = [report.short() for report in reports[:MAX_REPORTED]]
    if len(reports) > MAX_REPORTED:
        lines.append(f"  and {len(reports) - MAX_REPORTED} more processes")
    if file is not None:
        lines.append(f"  all stacks: {file}")
    return "\n".join(lines)


def is_caused_by_timeout(error: BaseException | None) -> bool:
    """Return whether an error is a timeout or was raised because of one, here or in an actor."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        remote = getattr(error, "exception", None)
        if isinstance(error, TimeoutError) or isinstance(remote, TimeoutError):
            return True
        error = error.__cause__
    return False


async def add_hang_report(error: BaseException, roles: Sequence[RoleProcesses]) -> Path | None:
    """Write the stacks of all processes if a timeout ends the run, and return the file.

    The report is added to the error's message unless the message has one already.
    """
    logs = roles[0].logs if roles else None
    if logs is None or not is_caused_by_timeout(error):
        return None
    reports = await report_run(roles, logs)
    file = write_reports(reports, logs, title=f"{type(error).__name__}: {error}")
    if file is not None:
        logger.info("the stacks of all processes are in %s", file)
    if isinstance(error, RunError):
        if not error.more:
            error.more = format_reports(reports, file)
        elif file is not None:
            error.more = f"{error.more}\n  of the whole run: {file}"
    return file
