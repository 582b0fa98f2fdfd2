"""Results and errors of calls to real actors."""

import subprocess
import time
from dataclasses import replace

import pytest

from actors.cluster.group import ActorGroup
from actors.config import Timeouts
from actors.generator import VLLMGenerator
from actors.launch.calls import (
    ActorCallError,
    ActorLostError,
    ActorTimeoutError,
)
from actors.launch.compat import get_endpoint_name
from actors.launch.member import LogSettings
from actors.reward import RewardActor
from actors.tinker import TinkerTrainer
from actors.trainer import PolicyTrainer
from rl.utils.errors import RunError
from rl.utils.processes import identify
from tests.support.call_actors import Answerer
from tests.support.monarch_meshes import monarch_meshes

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def meshes():
    with monarch_meshes() as meshes:
        yield meshes


@pytest.fixture(scope="module")
def group(meshes, tmp_path_factory):
    """Two actors with logs; the last test ends a process of them."""
    logs = LogSettings(folder=tmp_path_factory.mktemp("logs"), console_level="WARNING")
    role = meshes.spawn_role("trainer", num_procs=2, logs=logs)
    actors = role.mesh.spawn("answerer", Answerer)
    return ActorGroup(
        name="trainer", mesh=actors, timeouts=Timeouts(train_s=30), processes=role.local
    )


@pytest.fixture(scope="module")
def called(meshes, group):
    """Return a function that calls an endpoint of the two actors."""

    def call(endpoint, *args, **kwargs):
        return meshes.run(group.call(endpoint, *args, timeout="train_s", **kwargs))

    return call


@pytest.mark.medium
@pytest.mark.parametrize("actor", [PolicyTrainer, TinkerTrainer, VLLMGenerator, RewardActor])
def test_endpoints_of_an_actor_have_its_methods_names(actor):
    endpoints = {
        name: value for name in dir(actor) if hasattr(value := getattr(actor, name), "_propagator")
    }
    assert {"setup", "close"} <= endpoints.keys()
    assert {name: get_endpoint_name(value) for name, value in endpoints.items()} == {
        name: name for name in endpoints
    }


def test_answers_come_in_rank_order(called):
    assert called("add", 2, second=3) == [(0, 5), (1, 5)]


@pytest.mark.medium
def test_timeout_names_call_and_deadline_and_the_stacks_of_its_role_can_be_asked_for(meshes, group):
    short = replace(group, timeouts=Timeouts(train_s=1))
    with pytest.raises(
        ActorTimeoutError, match=r"^trainer\.never gave no answer within 1 s \(timeouts\.train_s\)"
    ):
        meshes.run(short.call("never", timeout="train_s"))
    with pytest.raises(ActorTimeoutError, match=r"^trainer\.never of rank 1 of 2 gave no answer"):
        meshes.run(short.call("never", rank=1, timeout="train_s"))
    (role,) = meshes.launcher.roles
    (_, asked), *_ = meshes.run(role.members.stacks.call()).items()
    assert "(most recent call first):" in asked  # The way in which ranks on other hosts are asked.


@pytest.mark.medium
def test_endpoint_error_has_its_remote_traceback_and_a_run_error_is_raised_unchanged(called):
    with pytest.raises(
        ActorCallError, match=r"(?s)trainer\.raise_on_rank_1 failed:.*KeyError: 'missing'"
    ):
        called("raise_on_rank_1", False)
    with pytest.raises(RunError, match=r"^here: no good$") as raised:
        called("raise_on_rank_1", True)
    assert type(raised.value) is RunError


@pytest.mark.medium
def test_death_not_reported_by_monarch_is_noticed_and_names_the_rank(meshes, group):
    with subprocess.Popen(["sleep", "60"]) as living, subprocess.Popen(["sleep", "1"]) as dying:
        started = time.monotonic()
        watching = replace(group, processes={0: identify(living.pid), 1: identify(dying.pid)})
        says = r"^trainer\.never failed: rank 1 of 2 is dead: its process ended$"
        with pytest.raises(ActorCallError, match=says):
            meshes.run(watching.call("never", timeout="train_s"))
        assert time.monotonic() - started < 10
        living.kill()


@pytest.mark.medium
def test_error_of_a_rank_whose_peer_then_dies_is_the_loss_of_the_peer(called, group, tmp_path):
    with pytest.raises(ActorLostError, match=r"rank 1 of 2 is dead") as raised:
        called("exit_on_rank_1_after_rank_0_raises", str(tmp_path / "marker"))
    assert (raised.value.role, raised.value.ranks) == ("trainer", (1,))
    assert group.find_dead() == [1]
    with pytest.raises(ActorCallError, match=r"^trainer\.add failed: rank 1 of 2 is dead"):
        called("add", 2, second=3)
