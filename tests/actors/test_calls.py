"""What a call to real actors gives back, or says when it does not."""

import re
import subprocess
import time

import pytest

from actors import launch
from actors.calls import (
    ActorCallError,
    ActorGroup,
    ActorLostError,
    ActorTimeoutError,
    Timeouts,
    may_hang,
)
from actors.processes import identify
from rl.distributed.process_group import CollectiveTimeoutError
from rl.errors import RunError
from rl.observability.process_state import read_states
from rl.weights.errors import WeightTimeoutError
from tests.support.call_actors import Answerer
from tests.support.monarch_meshes import monarch_meshes


@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
def test_a_deadline_that_is_not_positive_is_refused(value):
    with pytest.raises(ValueError, match=f"train_s={value} is not positive"):
        Timeouts(train_s=value)


def late(role):
    error = ActorTimeoutError("no answer")
    error.role = role
    return error


@pytest.mark.parametrize(
    ("error", "hangs"),
    [
        (late("trainer"), True),
        (late("generator_0"), False),
        (late(""), True),
        (WeightTimeoutError("pull"), True),
        (CollectiveTimeoutError("rank 0"), True),
        (ActorCallError("trainer.optim_step failed"), False),
    ],
)
def test_nothing_is_asked_of_a_role_that_may_hang(error, hangs):
    assert may_hang("trainer", after=error) is hangs


@pytest.fixture(scope="module")
def meshes():
    with monarch_meshes() as meshes:
        yield meshes


@pytest.fixture(scope="module")
def called(meshes):
    """Calls an endpoint of two actors, within a second or 30."""
    mesh = meshes.spawn_mesh(2, process_group=False).spawn("answerer", Answerer)

    def call(endpoint, *args, limit="train_s", processes=(), **kwargs):
        timeouts = Timeouts(train_s=30, close_s=1)
        group = ActorGroup(name="trainer", mesh=mesh, timeouts=timeouts, processes=dict(processes))
        return meshes.run(group.call(endpoint, *args, limit=limit, **kwargs))

    return call


pytestmark = pytest.mark.timeout(120)


@pytest.mark.medium
def test_answers_come_in_rank_order(called):
    assert called("add", 2, second=3) == [(0, 5), (1, 5)]


@pytest.mark.medium
def test_no_answer_names_actor_endpoint_and_deadline(called):
    with pytest.raises(
        ActorTimeoutError, match=r"^trainer\.never gave no answer within timeouts\.close_s=1$"
    ):
        called("never", limit="close_s")
    with pytest.raises(ActorTimeoutError, match=r"within timeouts\.close_s \+ close_s=2$"):
        called("never", limit="close_s + close_s")


@pytest.mark.medium
def test_no_answer_tells_what_each_rank_does_and_where_and_keeps_all_of_it(meshes, tmp_path):
    mesh = meshes.spawn_mesh(2, process_group=False)
    actors = mesh.spawn("answerer", Answerer)
    meshes.run(launch.setup_logs(mesh, folder=tmp_path, console_level="WARNING"))
    group = ActorGroup(
        name="trainer", mesh=actors, timeouts=Timeouts(close_s=1), watched=launch.watched(mesh)
    )
    with pytest.raises(ActorTimeoutError) as caught:
        meshes.run(group.call("never", limit="close_s"))
    with pytest.raises(ActorTimeoutError, match=r"^trainer\.never of rank 1 of 2 gave no answer") as alone:
        meshes.run(group.at_rank(1).call("never", limit="close_s"))
    assert group.watched is not None
    (_, asked), *_ = meshes.run(group.watched.members.stacks.call()).items()
    assert "(most recent call first):" in asked  # as those of another host are asked
    meshes.stop(mesh)
    role = launch_role(tmp_path)
    lines = caught.value.more.splitlines()
    assert re.fullmatch(rf"  {role}\[0\]: never for [1-9]\.\d s", lines[0])
    assert any(re.fullmatch(rf"  {role}\[1\]: never for [1-9]\.\d s", line) for line in lines)
    assert [line for line in lines if "tests/support/call_actors.py" in line and " never" in line]
    file = tmp_path / "stacks-1.txt"
    assert lines[-1] == f"  all stacks: {file}"
    assert file.read_text().count("tests/support/call_actors.py") >= 2
    assert f"{role}[0]" not in alone.value.more
    assert f"{role}[1]: never (2 times) for " in alone.value.more


def launch_role(logs):
    """Of the processes that say in these logs what they do."""
    (role,) = {state.role for state in read_states(logs / "state")}
    return role


@pytest.mark.medium
def test_what_an_endpoint_raises_comes_with_its_remote_traceback(called):
    with pytest.raises(ActorCallError, match=r"(?s)trainer\.raise_on_rank_1 failed:.*KeyError: 'missing'"):
        called("raise_on_rank_1", False)


@pytest.mark.medium
def test_a_run_error_of_an_endpoint_comes_as_itself(called):
    with pytest.raises(RunError, match=r"^here: no good$") as raised:
        called("raise_on_rank_1", True)
    assert type(raised.value) is RunError


@pytest.mark.medium
def test_a_death_of_which_monarch_says_nothing_is_seen_and_named_by_its_rank(called):
    with subprocess.Popen(["sleep", "60"]) as living, subprocess.Popen(["sleep", "1"]) as dying:
        started = time.monotonic()
        processes = {0: identify(living.pid), 1: identify(dying.pid)}
        with pytest.raises(
            ActorCallError, match=r"^trainer\.never failed: rank 1 of 2 is dead: its process ended$"
        ):
            called("never", processes=processes)
        assert time.monotonic() - started < 10
        living.kill()


@pytest.mark.medium
def test_an_error_of_a_rank_whose_peer_is_gone_a_moment_later_is_the_loss_of_that_peer(meshes, tmp_path):
    mesh = meshes.spawn_mesh(2, process_group=False)
    group = ActorGroup(
        name="trainer",
        mesh=mesh.spawn("answerer", Answerer),
        timeouts=Timeouts(train_s=30),
        processes=launch.local_processes(mesh),
    )
    marker = str(tmp_path / "marker")
    with pytest.raises(ActorLostError, match=r"rank 1 of 2 is dead") as raised:
        meshes.run(group.call("exit_on_rank_1_as_0_tells", marker, limit="train_s"))
    assert (raised.value.role, raised.value.ranks) == ("trainer", (1,))
    assert group.dead() == [1]


@pytest.mark.medium
def test_a_process_that_dies_in_a_call_is_named_by_its_rank_at_once_and_ever_after(called):
    started = time.monotonic()
    with pytest.raises(
        ActorLostError, match=r"^trainer\.exit_on_rank_1 failed: rank 1 of 2 is dead: .*code 3"
    ):
        called("exit_on_rank_1")
    assert time.monotonic() - started < 10
    with pytest.raises(ActorCallError, match=r"^trainer\.add failed: rank 1 of 2 is dead"):
        called("add", 2, second=3)
