"""What the processes of a run are doing when somebody has waited for them for too long.

Each says it in logs/state (`rl.observability.activity`), and writes its stacks when it is asked to. A few
lines of that go into the error's message, all of it into logs/stacks-<n>.txt.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from rl.errors import RunError
from rl.observability.activity import STATE_FOLDER
from rl.observability.process_state import ProcessState, read_states
from rl.observability.stack_excerpt import excerpt
from rl.observability.stacks import ask
from rl.process_id import is_alive

logger = logging.getLogger(__name__)

REMOTE_S = 4.0
"""For a process of another host to answer with its stacks: more than it takes to write them there."""
SHARED_S = 10.0
"""Within this a role is not asked again: hundreds of calls may have one deadline."""
MAX_TOLD = 8
"""Processes that a message has room for."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Recent:
    at_s: float
    """By `time.monotonic`."""
    telling: asyncio.Future[str]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Watched:
    """The processes of one role, as its start left them."""

    role: str
    num_ranks: int
    logs: Path
    members: Any
    """Actor mesh of `actors.members.Member`."""
    recent: dict[tuple[int, ...], _Recent] = field(default_factory=dict)
    """What was told last, by ranks."""

    def forget(self) -> None:
        """Nobody asks any more what they do: they are lost, and their place is taken or given up."""
        for file in (self.logs / STATE_FOLDER).glob(f"{self.role}-*"):
            with suppress(OSError):  # what is left there is only told
                file.unlink()


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Of one process."""

    name: str
    doing: str
    stacks: str

    def short(self) -> str:
        """For a message: what it does, and where."""
        return "".join([f"  {self.name}: {self.doing}", *(f"\n    {line}" for line in excerpt(self.stacks))])

    def long(self) -> str:
        return f"==== {self.name}: {self.doing}\n{self.stacks.rstrip()}\n"


def place_of(mesh: Any, rank: int) -> dict[str, int]:
    """Where a rank is on a mesh, to slice it."""
    place, left = {}, rank
    for dim, size in reversed(mesh.sizes.items()):
        left, place[dim] = divmod(left, size)
    assert not left, f"there are {mesh.size()} ranks, there is no rank {rank}"
    return place


async def reports_of_role(watched: Watched, ranks: Collection[int] | None = None) -> list[Report]:
    """What these ranks of a role do, all of them when None. Takes a few seconds at most."""
    states = {(s.role, s.rank): s for s in read_states(watched.logs / STATE_FOLDER)}
    wanted = range(watched.num_ranks) if ranks is None else sorted(ranks)
    return list(
        await asyncio.gather(*(_report(watched, rank, states.get((watched.role, rank))) for rank in wanted))
    )


async def told_by_role(watched: Watched, ranks: Collection[int] | None, *, title: str) -> str:
    """Lines for a message; all of it is written to a file. Calls that end at the same time share both."""
    key = tuple(range(watched.num_ranks) if ranks is None else sorted(ranks))
    now_s = time.monotonic()
    recent = watched.recent.get(key)
    if recent is None or now_s - recent.at_s > SHARED_S:
        recent = _Recent(at_s=now_s, telling=asyncio.ensure_future(_tell(watched, key, title)))
        watched.recent[key] = recent
    return await asyncio.shield(recent.telling)


async def _tell(watched: Watched, ranks: Collection[int], title: str) -> str:
    reports = await reports_of_role(watched, ranks)
    return told(reports, write_reports(reports, watched.logs, title=title))


async def reports_of_run(roles: Sequence[Watched]) -> list[Report]:
    """What all processes of a run do: these roles', and whoever else tells it in the same folder."""
    folders = dict.fromkeys(role.logs / STATE_FOLDER for role in roles)
    known = {role.role for role in roles}
    others = [(folder, s) for folder in folders for s in read_states(folder) if s.role not in known]
    told = await asyncio.gather(
        *(_here(folder, state) for folder, state in others if is_alive(state.process)),
        *(_all_of(role) for role in roles),
    )
    return list(itertools.chain.from_iterable(told))


async def _here(folder: Path, state: ProcessState) -> list[Report]:
    return [Report(name=state.name, doing=state.describe(), stacks=await ask(state, folder))]


async def _all_of(role: Watched) -> list[Report]:
    return await reports_of_role(role)


async def _report(watched: Watched, rank: int, state: ProcessState | None) -> Report:
    name = f"{watched.role}[{rank}]"
    doing = "has not said what it does" if state is None else state.describe()
    if state is not None and state.is_here:
        return Report(name=name, doing=doing, stacks=await ask(state, watched.logs / STATE_FOLDER))
    try:
        asked = watched.members.slice(**place_of(watched.members, rank)).stacks.call_one()
        stacks: str = await asyncio.wait_for(_answer(asked), REMOTE_S)
    except TimeoutError:
        stacks = f"no stacks within {REMOTE_S:g} s"
    except (ActorError, SupervisionError) as error:
        stacks = f"no stacks: {str(error).splitlines()[0]}"
    return Report(name=name, doing=doing, stacks=stacks)


async def _answer(asked: Any) -> Any:
    return await asked


def write_reports(reports: Sequence[Report], logs: Path, *, title: str) -> Path | None:
    """All of it, as logs/stacks-<n>.txt; None where that cannot be written."""
    for number in itertools.count(1):
        file = logs / f"stacks-{number}.txt"
        try:
            with file.open("x") as out:
                out.write("\n".join([f"{title}\n", *(report.long() for report in reports)]))
        except FileExistsError:
            continue
        except OSError:
            return None
        return file
    raise AssertionError("there is always a next number")


def told(reports: Sequence[Report], file: Path | None) -> str:
    """The lines that follow an error's message."""
    lines = [report.short() for report in reports[:MAX_TOLD]]
    if len(reports) > MAX_TOLD:
        lines.append(f"  and {len(reports) - MAX_TOLD} more processes")
    if file is not None:
        lines.append(f"  all stacks: {file}")
    return "\n".join(lines)


def exceeded_a_deadline(error: BaseException | None) -> bool:
    """Whether it is a deadline's error, or one raised because of one, here or in an actor."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        remote = getattr(error, "exception", None)
        if isinstance(error, TimeoutError) or isinstance(remote, TimeoutError):
            return True
        error = error.__cause__
    return False


async def tell_what_run_does(error: BaseException, watched: Sequence[Watched]) -> Path | None:
    """Where the stacks of all processes were written, if it is a deadline that ends the run.

    An error that does not tell yet what processes do, tells it then.
    """
    if not watched or not exceeded_a_deadline(error):
        return None
    reports = await reports_of_run(watched)
    file = write_reports(reports, watched[0].logs, title=f"{type(error).__name__}: {error}")
    if file is not None:
        logger.info("the stacks of all processes are in %s", file)
    if isinstance(error, RunError):
        if not error.more:
            error.more = told(reports, file)
        elif file is not None:
            error.more = f"{error.more}\n  of the whole run: {file}"
    return file
