"""What a call to real actors gives back, or says when it does not."""

import subprocess
import time

import pytest

from actors import launch
from actors.calls import ActorCallError, ActorGroup, ActorLostError, ActorTimeoutError, Timeouts
from actors.processes import identify
from rl.errors import RunError
from tests.support.call_actors import Answerer
from tests.support.monarch_meshes import monarch_meshes


@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
def test_a_deadline_that_is_not_positive_is_refused(value):
    with pytest.raises(ValueError, match=f"train_s={value} is not positive"):
        Timeouts(train_s=value)


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
