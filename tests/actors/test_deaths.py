"""Deaths of processes that calls of actors wait for."""

import asyncio
import subprocess
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actors.cluster import group as actor_group
from actors.cluster.group import ActorGroup
from actors.cluster.recovery import Supervisor
from actors.config import RecoveryConfig, Timeouts
from actors.launch.calls import ActorLostError
from actors.vllm.requests import EngineFailedError
from rl.utils.processes import ProcessId, identify
from tests.support.mortal import MortalGenerator
from tests.support.virtual_time import now_s, run_in_virtual_time

PROCESSES = [ProcessId(pid, 1) for pid in (-1, -2, -3)]


class SilentMesh:
    """Mesh of one rank that never answers."""

    def size(self) -> int:
        return 1

    def __getattr__(self, endpoint: str) -> Any:
        return self

    def call(self):
        return asyncio.get_running_loop().create_future()


def group(*processes: ProcessId) -> ActorGroup:
    return ActorGroup(
        name="generator",
        mesh=SilentMesh(),
        timeouts=Timeouts(),
        processes=dict(enumerate(processes)),
    )


@pytest.fixture
def looks(monkeypatch):
    """Return the processes that were looked at; those of `dead` are dead."""
    looked: list[ProcessId] = []

    def look(process):
        looked.append(process)
        return process not in dead

    dead: set[ProcessId] = set()
    monkeypatch.setattr(actor_group, "is_alive", look)
    return looked, dead


def test_each_process_is_looked_at_twice_a_second_however_many_calls_wait(looks):
    looked, _ = looks

    async def wait() -> None:
        groups = [group(process) for process in PROCESSES]
        waiting = [
            asyncio.ensure_future(groups[i % 3].call("generate", timeout="generate_s"))
            for i in range(300)
        ]
        await asyncio.sleep(5.1)
        for call in waiting:
            call.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        looked_before = len(looked)
        await asyncio.sleep(5)
        assert len(looked) == looked_before  # nobody waits any more

    run_in_virtual_time(wait())
    assert {process: looked.count(process) for process in PROCESSES} == dict.fromkeys(PROCESSES, 10)


def test_failed_engine_of_a_group_without_restarts_is_told_in_its_own_words():
    mesh = MortalGenerator("generator")
    mesh.version, mesh.engine_failed = 0, True
    call = mesh.group().call("generate", [np.arange(2)], timeout="generate_s")
    with pytest.raises(EngineFailedError, match="RuntimeError: broken"):
        run_in_virtual_time(call)


def test_death_ends_the_calls_of_its_group_alone(looks, monkeypatch):
    _, dead = looks

    async def wait() -> None:
        waiting = [
            asyncio.ensure_future(group(*own).call("generate", timeout="generate_s"))
            for own in (PROCESSES[:2], PROCESSES[2:])
        ]
        await asyncio.sleep(1)
        dead.add(PROCESSES[1])
        with pytest.raises(ActorLostError, match="rank 1 of 1 is dead") as lost:
            await asyncio.wait_for(waiting[0], 5)
        assert lost.value.ranks == (1,)
        assert not waiting[1].done()
        waiting[1].cancel()
        with suppress(asyncio.CancelledError):
            await waiting[1]

    run_in_virtual_time(wait())


def test_death_of_a_real_process_is_noticed_by_every_event_loop(monkeypatch):
    monkeypatch.setattr(actor_group, "LOOK_EVERY_S", 0.01)

    async def wait() -> None:
        with subprocess.Popen(["sleep", "60"]) as sleeper:
            process = identify(sleeper.pid)
            assert process is not None
            with actor_group.get_death_watch().watch([process]) as death:
                sleeper.kill()
                await asyncio.wait_for(death, 10)

    for _ in range(2):
        asyncio.run(wait())


def test_watch_follows_a_restart_that_a_call_began_to_processes_of_another_host(looks):
    _, dead = looks
    here = PROCESSES[0]
    starts: list[None] = []

    async def start() -> ActorGroup:
        starts.append(None)
        return group(here) if len(starts) == 1 else group()

    async def main() -> None:
        # No process is on this host before the first restart.
        watched = replace(
            group(), start=start, supervisor=Supervisor(RecoveryConfig(), now_s=now_s)
        )
        watching = asyncio.create_task(watched.watch())
        await asyncio.sleep(1)
        watched.lose(ActorLostError("a call has failed", role="generator"), mesh=watched.mesh)
        await watched.wait_until_up()
        await asyncio.sleep(1)
        dead.add(here)
        await asyncio.sleep(1)
        await watched.wait_until_up()
        watching.cancel()

    run_in_virtual_time(main())
    assert len(starts) == 2
