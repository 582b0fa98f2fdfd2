"""Health of a run, as judged from its folder, and the doctor command."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import unicodedata
from dataclasses import dataclass

import pytest

from rl import doctor, report, timeline
from rl.doctor import examine
from rl.observability.events import Events
from rl.observability.run_folder import RunFolder
from rl.observability.spans import SpanRecorder, read_states
from rl.utils.processes import identify
from tests.support.watched_child import watched_child


@dataclass
class Watched:
    """Run's folder with this process as its controller, and another process that sleeps."""

    run: RunFolder
    controller: SpanRecorder
    sleeper: subprocess.Popen[bytes]

    def record_sleeper_as(self, role):
        recorder = SpanRecorder()
        file = recorder.start(self.run.logs, role=role, rank=0)
        recorder.stop()
        process = identify(self.sleeper.pid)
        assert process is not None
        assert file.name == f"{role}-0.json"
        self.record(role, pid=process.pid, start_ticks=process.start_ticks)

    def record(self, process, /, **fields):
        """Change fields of the state of a process."""
        file = self.run.logs / "state" / f"{process}-0.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    def kill_sleeper(self):
        self.sleeper.kill()
        self.sleeper.wait()

    def write_metrics(self, *records):
        self.run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))

    def age(self, seconds):
        """Move the controller's spans back by this many seconds."""
        file = self.run.logs / "state" / "controller-0.json"
        record = json.loads(file.read_text())
        record["clock_offset_s"] += seconds
        file.write_text(json.dumps(record))


@pytest.fixture
def run(tmp_path):
    with RunFolder.create(tmp_path, "run") as folder:
        yield folder


@pytest.fixture
def watched(run):
    controller = SpanRecorder()
    controller.start(run.logs, role="controller", rank=0)
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        yield Watched(run, controller, sleeper)
        sleeper.kill()
    controller.stop()


def test_run_with_a_recent_step_is_healthy(watched):
    watched.record_sleeper_as("trainer")
    watched.write_metrics({"step": 3, "time/step_s": 2.0}, {"step": 4, "time/step_s": 30.0})
    watched.controller.begin("step 5", None)
    health = examine(watched.run.path)
    assert (health.status, health.problems) == ("running", ())
    assert re.search(r"running; the last step was step 4, \d\.\d s ago", health.text)
    assert f"controller[0]    alive     pid {os.getpid()}: step 5 for 0." in health.text
    assert f"trainer[0]       alive     pid {watched.sleeper.pid}: idle for 0." in health.text
    assert health.text.endswith(
        "no problem found; the controller may wait up to 150 s for one thing"
    )


def test_silent_controller_is_a_problem(watched):
    watched.write_metrics({"step": 4, "time/step_s": 2.0})
    watched.controller.begin("waits for trainer.optim_step", None)
    assert examine(watched.run.path).problems == ()
    watched.age(61.0)
    (problem,) = examine(watched.run.path).problems
    says = "in the controller nothing has begun or ended for 61 s, expected are at most 60 s"
    assert problem.startswith(says)
    assert "waits for trainer.optim_step for 61." in problem
    assert examine(watched.run.path, expected_s=100.0).problems == ()


def test_dead_or_stopped_actor_is_a_problem(watched):
    watched.record_sleeper_as("generator_1")
    os.kill(watched.sleeper.pid, signal.SIGSTOP)
    os.waitpid(watched.sleeper.pid, os.WUNTRACED)
    health = examine(watched.run.path)
    assert health.problems == ("generator_1[0] is stopped by a signal",)
    assert "generator_1[0]   STOPPED" in health.text
    watched.kill_sleeper()
    health = examine(watched.run.path)
    assert health.problems == ("generator_1[0] is dead",)
    assert "PROBLEM: generator_1[0] is dead" in health.text


def test_run_without_its_controller_has_ended_or_finished(watched):
    watched.record_sleeper_as("controller")
    watched.kill_sleeper()
    health = examine(watched.run.path)
    problems = ("the controller is dead, and the run has not finished",)
    assert (health.status, health.problems) == ("ended", problems)
    watched.run.mark_finished()
    health = examine(watched.run.path)
    assert (health.status, health.problems) == ("finished", ())
    assert health.text.endswith("the run has finished")


def test_command_prints_spans_and_stacks_of_a_healthy_run(run, capsys):
    Events(run.events, wall_clock=lambda: 5.0).add("recovered", role="generator_0", after_s=1.5)
    with (
        watched_child(run.logs, "tasks", role="controller") as controller,
        watched_child(run.logs, "lock", role="trainer", rank=1) as trainer,
    ):
        assert doctor.main([str(run.path)]) == 0
        assert (controller.poll(), trainer.poll()) == (None, None)
    printed = capsys.readouterr().out
    assert (
        f"trainer[1]       alive     pid {trainer.pid}, version 7: optim_step of version 7 for"
        in printed
    )
    assert (
        'event: {"time": 5.0, "event": "recovered", "role": "generator_0", "after_s": 1.5}'
        in printed
    )
    assert "==== controller[0]: optim_step" in printed
    assert "in wait_for_an_answer" in printed
    assert "in take_twice" in printed


@pytest.mark.parametrize("command", [doctor, report, timeline])
def test_commands_refuse_a_folder_that_is_not_a_run(command, tmp_path, capsys):
    assert command.main([str(tmp_path)]) == 2
    assert f"error: {tmp_path} is not the folder of a run: it has no" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# Runs that have ended


@pytest.mark.parametrize(
    ("reason", "problems", "last"),
    [
        ("SystemExit: 143", (), "the run was stopped by SIGTERM; continue it with --resume "),
        ("SystemExit: 129", (), "the run was stopped by SIGHUP; continue it with --resume "),
        ("KeyboardInterrupt: ", (), "the run was stopped by Ctrl-C; continue it with --resume "),
        (
            "RunError: a full disk",
            ("the run was ended by an error: RunError: a full disk",),
            "continue it with ",
        ),
    ],
)
@pytest.mark.parametrize("host", ["here", "elsewhere"])
def test_run_that_has_stopped_says_how_and_no_process_of_it_is_missed(
    watched, reason, problems, last, host
):
    watched.record_sleeper_as("controller")
    watched.record_sleeper_as("trainer")
    if host == "here":
        watched.kill_sleeper()
    else:
        watched.record("controller", host="another.example")
        watched.age(10_000.0)
    Events(watched.run.events).add("resumed", step=3)
    Events(watched.run.events).add("stopped", reason=reason)
    health = examine(watched.run.path)
    assert (health.status, health.problems) == ("ended", problems)
    assert health.text.splitlines()[-1].startswith(last)
    assert doctor.main([str(watched.run.path)]) == (1 if problems else 0)


def test_run_that_was_stopped_and_resumed_is_judged_anew(watched):
    Events(watched.run.events).add("stopped", reason="SystemExit: 143")
    Events(watched.run.events).add("resumed", step=3)
    assert examine(watched.run.path).status == "running"
    watched.record_sleeper_as("controller")
    watched.record("controller", start_ticks=1)  # the pid belongs to another process now
    health = examine(watched.run.path)
    assert health.problems == ("the controller is dead, and the run has not finished",)


def test_process_of_another_container_with_the_name_of_this_machine_is_not_taken_for_dead(
    watched, capsys
):
    """Its pid is nobody's here, or that of somebody else."""
    watched.record("controller", pid_namespace=1, pid=2**22, start_ticks=1)
    assert doctor.main([str(watched.run.path)]) == 0
    shown = capsys.readouterr().out
    assert f"pid {2**22} on {socket.gethostname()}, in another container: idle" in shown
    assert f"no stacks: it runs on {socket.gethostname()}, in another container" in shown


# Folders from elsewhere


def test_process_that_does_not_write_into_the_folder_gets_no_signal(watched, tmp_path, capsys):
    """A folder can name any process of the machine, also one with a handler of the signal and a
    file of that name.
    """
    with watched_child(tmp_path / "other", "tasks") as other:
        victim = identify(other.pid)
        assert victim is not None
        watched.record_sleeper_as("trainer")
        watched.record("trainer", pid=victim.pid, start_ticks=victim.start_ticks)
        stacks = watched.run.logs / "state" / "trainer-0.stacks"
        of_other = tmp_path / "other" / "state" / "trainer-0.stacks"
        stacks.write_text("of a person\n")
        doctor.main([str(watched.run.path)])
        assert "the process is not of this run" in capsys.readouterr().out
        assert stacks.read_text() == "of a person\n"
        assert of_other.read_text() == ""  # no stacks were asked for


@pytest.mark.parametrize("command", [doctor, timeline, report])
@pytest.mark.parametrize(
    "name", ["status.json", "metrics.jsonl", "events.jsonl", "logs/state/x-0.json"]
)
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_pipes_and_links_in_place_of_files_end_every_command_with_one_line(
    run, tmp_path, command, name, kind, capsys
):
    mine, file = tmp_path / "mine", run.path / name
    mine.write_text("{}")
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    os.mkfifo(file) if kind == "pipe" else file.symlink_to(mine)
    assert command.main([str(run.path)]) == 2
    assert capsys.readouterr().err == f"error: {file} is not a regular file\n"


@pytest.mark.parametrize("name", ["logs", "logs/state", "logs/spans"])
def test_folder_of_the_logs_that_is_a_link_is_not_followed(run, tmp_path, name):
    (tmp_path / "mine" / "state").mkdir(parents=True)
    if name == "logs":
        run.logs.rmdir()
    (run.path / name).symlink_to(tmp_path / "mine")
    with pytest.raises(ValueError, match=f"{run.path / name} is a link, not a folder of the run"):
        examine(run.path)


def test_doctor_has_its_status_and_no_traceback_when_nobody_reads_its_output(watched):
    watched.record_sleeper_as("trainer")
    watched.kill_sleeper()
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "rl.doctor", str(watched.run.path)]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False, timeout=50)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, b"")


ODD: tuple[object, ...] = (True, -1, 0, 2**40, "1", None, 1.5, [], {})


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("pid", ODD),
        ("start_ticks", (True, -1, "1", None)),
        ("rank", (True, -1, "0", None, 1)),
        ("role", ("../../../x", "a/b", "", "a\x1b[31m", ".", None, 1, "trainer ")),
        ("host", (None, 3)),
        ("clock_offset_s", (None, "1", float("nan"), float("inf"), True)),
        ("changed_s", (None, float("nan"))),
        ("policy_version", (True, "1", -1)),
        ("pid_namespace", (True, "1", -1)),
        (
            "open",
            (None, [1], [{"name": 1, "num": 1, "version": None, "since_s": 1.0}], [{"name": "x"}]),
        ),
        ("failed", (1, {}, {"name": "x", "error": None, "at_s": 1.0})),
    ],
)
def test_state_of_other_types_is_no_process(watched, field, values):
    for value in values:
        watched.record_sleeper_as("trainer")
        watched.record("trainer", **{field: value})
        names = {state.name for state in read_states(watched.run.logs)}
        assert names == {"controller[0]"}, value


def test_no_control_characters_of_a_folder_reach_the_terminal(watched, capsys):
    evil = "\x1b]0;title\x07\x9b31m\r\u202e\u2066"
    watched.record_sleeper_as("trainer")
    opened = [{"name": evil, "num": 1, "version": None, "since_s": 1.0}]
    watched.record(
        "trainer", host=evil, open=opened, failed={"name": evil, "error": evil, "at_s": 1.0}
    )
    Events(watched.run.events).add("stopped", reason=evil)
    doctor.main([str(watched.run.path)])
    watched.write_metrics({"step": 1, "loss/mean": evil})
    report.main([str(watched.run.path)])
    shown = "".join(capsys.readouterr())
    assert not [c for c in shown if c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cf")]
    assert r"\x1b]0;title\x07" in shown


@pytest.mark.parametrize(
    "line", ["[]", "{}", '{"step": "x"}', '{"step": NaN, "time/step_s": []}', '{"step": null}']
)
def test_odd_metrics_and_config_are_left_out(watched, line):
    watched.run.metrics.write_text(
        f'{line}\n{{"step": 4, "time/step_s": "x", "time/eval_s": 1e400}}\n'
    )
    watched.run.config_json.write_text('{"values": {"timeouts": {"setup_s": "x"}}}')
    health = examine(watched.run.path)
    assert "the last step was step 4" in health.text
    assert "may wait up to 600 s" in health.text
