"""Deaths of processes while a role starts: the role starts again within limits, or one line says
how it ended.
"""

import asyncio
import logging
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from actors.agents import AgentEndpoint
from actors.cluster.recovery import RestartsUsedUpError, ignore_event
from actors.cluster.starter import AgentSetup, RoleStarter
from actors.config import RecoveryConfig
from actors.launch import launcher as launch
from actors.launch import member
from actors.launch.calls import ActorLostError, ActorTimeoutError, deadline, end_of_process
from actors.launch.cleanup import import_path
from actors.launch.member import LogSettings
from actors.launch.placement import Placement, place_actors
from rl.agents.program import AgentProgram
from rl.utils.processes import identify
from rl.weights.store import WeightStore
from tests.support import reward_functions
from tests.support.clusters import CONFIG, SPEC
from tests.support.monarch_meshes import monarch_meshes
from tests.support.virtual_time import run_in_virtual_time

DEATH = """
import os, signal, sys, threading, time
def watch(module):
    while module not in sys.modules:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)
if moment := os.environ.get("RELAY_TEST_DEATH"):
    if moment == "first instruction":
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=watch, args=(moment,), daemon=True).start()
"""
"""A sitecustomize.py: the process kills itself when it starts, or once a module begins to be
imported.
"""


class UnluckyStarter(RoleStarter):
    """Starter whose roles are lost in their first starts, without processes."""

    def __init__(
        self, tmp_path: Any, *, num_losses: dict[str, int], start_s: float = 1.0, **recovery: Any
    ) -> None:
        launcher: Any = SimpleNamespace(run_in_background=None, end_lost=self._end_lost)
        config = replace(CONFIG, recovery=RecoveryConfig(**({"pause_s": 0.0} | recovery)))
        super().__init__(
            config=config,
            placements=place_actors(config, num_gpus=0),
            launcher=launcher,
            events=ignore_event,
            store=WeightStore.Config().build(dtype="float32"),
            model_spec=SPEC,
            hf_assets_path="none",
            rubric=reward_functions.alone(),
            agents=None,
            logs=LogSettings(folder=tmp_path, console_level="ERROR"),
            trainer_arguments={},
        )
        self.num_losses = num_losses
        self.start_s = start_s
        self.started: list[str] = []
        self.ended: list[str] = []

    async def _end_lost(self, at: Any) -> None:
        self.ended.append(at.role)

    async def _spawn(self, at: Any, start: Any, **_options: Any) -> Any:
        self._phases[at.role] = "its processes start"
        self.started.append(at.role)
        await asyncio.sleep(self.start_s)
        if self.started.count(at.role) <= self.num_losses.get(at.role, 0):
            raise ActorLostError(
                f"starting role {at.role!r}: killed by SIGKILL\nand more", role=at.role
            )
        del self._phases[at.role]
        return at.role


def roles_after_start(tmp_path, **settings):
    async def start():
        starter = UnluckyStarter(tmp_path, **settings)
        return await starter.start_all(), starter

    return run_in_virtual_time(start())


@pytest.fixture(autouse=True)
def no_threads(monkeypatch):
    """Remove files without a thread, for which virtual time would not wait."""

    async def run_now(function, **_):
        return function()

    monkeypatch.setattr("actors.cluster.starter.run_in_thread", run_now)


@pytest.mark.parametrize("role", ["trainer", "generator_1", "reward"])
def test_role_that_is_lost_while_it_starts_is_started_again(tmp_path, caplog, role):
    (roles, cluster), took_s = roles_after_start(tmp_path, num_losses={role: 2})
    assert (roles.trainer, roles.generators) == ("trainer", ["generator_0", "generator_1"])
    assert (roles.reward, roles.agents) == ("reward", None)
    assert (cluster.ended, took_s) == ([role] * 2, 3.0)
    assert cluster.has_new_store == (role == "trainer")
    lost = [r.getMessage() for r in caplog.records if "is lost" in r.getMessage()]
    assert lost[0] == (
        f"{role} is lost: starting role {role!r}: killed by SIGKILL; starting it again (1 of 3)"
    )


def test_role_that_is_lost_too_often_while_it_starts_ends_the_start_with_one_line(tmp_path):
    says = r"^trainer is lost again, after 3 restarts .*; the last reason: .*killed by SIGKILL$"
    with pytest.raises(RestartsUsedUpError, match=says):
        roles_after_start(tmp_path, num_losses={"trainer": 9})
    with pytest.raises(ActorLostError, match=r"^starting role 'reward': killed by SIGKILL"):
        roles_after_start(tmp_path, num_losses={"reward": 1}, max_restarts=0)


def test_slow_start_is_told_with_what_it_waits_for(tmp_path, caplog):
    roles_after_start(tmp_path, num_losses={}, start_s=130.0)
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    waits = ", ".join(
        f"{role} (its processes start)"
        for role in ("trainer", "generator_0", "generator_1", "reward")
    )
    assert told == [f"still starting after {s} s: {waits}" for s in (60, 120)]


def test_deadline_of_a_start_names_its_option():
    async def wait():
        async with deadline(30.0, "starting role 'trainer'", option="timeouts.start_s"):
            await asyncio.Event().wait()

    says = r"^starting role 'trainer': no answer within 30 s \(timeouts\.start_s\)$"
    with pytest.raises(ActorTimeoutError, match=says):
        run_in_virtual_time(wait())


@pytest.mark.parametrize(
    ("report", "end"),
    [
        (
            "failed to configure process: Ready(Terminal(Killed { signal: 9, core_dumped: false "
            "}))",
            "killed by SIGKILL",
        ),
        ("the process this actor was running on failed: Killed(sig=7)", "killed by SIGBUS"),
        ("the process this actor was running on failed: Killed(sig=99)", "killed by signal 99"),
        ("Ready(Terminal(Stopped { exit_code: 3 }))", "it ended with status 3"),
        ("no answer", None),
    ],
)
def test_end_of_a_process_is_read_from_the_report(report, end):
    assert end_of_process(report) == end


@pytest.mark.parametrize(("timeout_s", "limit"), [(0.001, "31s"), (600.0, "630s")])
def test_limit_of_a_start_strikes_before_those_of_monarch(monkeypatch, timeout_s, limit):
    given = {}
    monkeypatch.setattr(member, "configure", lambda **limits: given.update(limits))
    member.allow_start(timeout_s)
    assert set(given.values()) == {limit}


def test_processes_of_a_role_are_searched_until_all_are_found(monkeypatch):
    searches = []

    def search(role, *, parents):
        searches.append(role)
        return [process] if len(searches) == 2 else []

    async def wait():
        launcher: Any = SimpleNamespace(
            _list_parents=lambda at: [1], hosts=None, add_signal=lambda error: error
        )
        answer = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.05, answer.set_result, "all there")
        return await launch.Launcher._wait_for_answers(
            launcher, Placement(role="r", num_procs=1), answer, "start"
        )

    process = identify(os.getpid())
    monkeypatch.setattr(launch, "LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(launch, "find_processes_of_role", search)
    assert asyncio.run(wait()) == "all there"
    assert searches == ["r", "r"]


@pytest.mark.medium
@pytest.mark.timeout(120)
def test_process_that_is_killed_before_it_answers_is_named_with_its_signal_at_once(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(DEATH)

    with monarch_meshes() as meshes:
        for moment in ("first instruction", "monarch", "torch"):
            with pytest.raises(
                ActorLostError, match=r"^starting role 'victim' .* is dead: killed by SIGKILL$"
            ) as raised:
                meshes.spawn_role("victim", num_procs=1, env=death(tmp_path, moment))
            assert raised.value.role == "victim"
            for role in list(meshes.launcher.roles):
                meshes.run(meshes.launcher.stop(role, is_lost=True))


def death(folder, moment):
    return {"PYTHONPATH": f"{folder}:{import_path()}", "RELAY_TEST_DEATH": moment}


def test_processes_of_agents_get_the_secrets_that_their_task_keeps(tmp_path):
    kept = {}

    async def spawn(at, *, keep, **_options):
        kept[at.role] = keep
        raise asyncio.CancelledError

    async def start():
        starter = UnluckyStarter(tmp_path, num_losses={})
        starter.config = replace(CONFIG, agents=AgentEndpoint.Config())
        starter.placements = place_actors(starter.config, num_gpus=0)
        renderer: Any = None
        starter.agents = AgentSetup(program=AgentProgram(keep_env=("MY_KEY",)), renderer=renderer)
        start: Any = starter.start_agents
        launcher: Any = SimpleNamespace(spawn_role=spawn)
        starter.launcher = launcher
        at = starter.placements
        assert at.agents is not None
        for placement in (at.trainer, at.agents):
            with pytest.raises(asyncio.CancelledError):
                await RoleStarter._spawn(starter, placement, start, imports=())

    asyncio.run(start())
    assert kept == {"trainer": set(), "agents": {"MY_KEY"}}
